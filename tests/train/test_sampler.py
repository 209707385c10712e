from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trimaran.nouns.noun import TrimaranError
from trimaran.train.text.sampler import Sampler
from trimaran.train.text.tokens import Tokens


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


def test_a_batch_is_the_text_of_its_windows(tokens: Tokens) -> None:
    sampler = Sampler(tokens, 64, seed=3)
    batch = sampler.batch(10, 4)
    assert batch.shape == (4, 65)
    np.testing.assert_array_equal(batch[2], tokens.read(sampler.start_of(12), 65))


def test_too_little_text_is_refused_with_both_numbers(tokens: Tokens) -> None:
    with pytest.raises(TrimaranError, match=rf"{len(tokens)} tokens are fewer than the {10**9 + 1} of one sample"):
        Sampler(tokens, 10**9, seed=3)
