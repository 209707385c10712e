from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from trimaran.nouns.noun import TrimaranError
from trimaran.train.text.sampler import Sampler
from trimaran.train.text.tokens import TokenFile, TokenIndex, Tokens


@pytest.fixture(scope="module")
def tokens(data_dir: Path) -> Tokens:
    return Tokens(data_dir)


def test_an_epoch_shows_every_window_once_and_the_next_epoch_in_another_order(tokens: Tokens) -> None:
    sampler = Sampler(tokens, 64, seed=3)
    n = sampler.samples_per_epoch
    first = [sampler.start_of(k) for k in range(n)]
    second = [sampler.start_of(k) for k in range(n, 2 * n)]
    assert sorted(first) == sorted(second) == list(range(0, n * 64, 64))
    assert first != second


def test_order_depends_on_the_seed_alone(tokens: Tokens) -> None:
    forwards = [Sampler(tokens, 64, seed=3).start_of(k) for k in (0, 5, 900)]
    sampler = Sampler(tokens, 64, seed=3)
    backwards = [sampler.start_of(k) for k in (900, 5, 0)]
    assert forwards == backwards[::-1]
    assert [Sampler(tokens, 64, seed=4).start_of(k) for k in (0, 5, 900)] != forwards


def test_an_order_takes_four_bytes_a_window(tmp_path: Path) -> None:
    """Every rank holds that of its epoch: at eight bytes one of a few billion windows filled a node's memory."""
    windows = 1_000_000
    (tmp_path / "tokens.bin").write_bytes(bytes(windows + 1))
    index = TokenIndex(
        files=(TokenFile(name="tokens.bin", dtype="uint8", tokens=windows + 1),),
        vocab=257, end_of_document=256, tokenizer="bytes", documents=1, text_bytes=windows,
    )  # fmt: skip
    (tmp_path / "index.json").write_text(index.model_dump_json())
    sampler = Sampler(Tokens(tmp_path), 1, seed=3)
    tracemalloc.start()
    starts = [sampler.start_of(k) for k in (0, 1, windows - 1)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * windows
    # as trainings that go on have seen it so far
    expected = np.random.Generator(np.random.Philox(key=np.array([3, 0], np.uint64))).permutation(windows)
    assert starts == expected[[0, 1, -1]].tolist()


def test_a_batch_is_the_text_of_its_windows(tokens: Tokens) -> None:
    sampler = Sampler(tokens, 64, seed=3)
    batch = sampler.batch(10, 4)
    assert batch.shape == (4, 65)
    np.testing.assert_array_equal(batch[2], tokens.read(sampler.start_of(12), 65))


def test_too_little_text_is_refused_with_both_numbers(tokens: Tokens) -> None:
    with pytest.raises(TrimaranError, match=rf"{len(tokens)} tokens are fewer than the {10**9 + 1} of one sample"):
        Sampler(tokens, 10**9, seed=3)
