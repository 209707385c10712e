"""Blends give each text its share, and no sample twice before the text has been seen."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.job import DataJob
from trimaran.recipe.data_settings import DataSettings
from trimaran.train.programs.tokenise import prepare
from trimaran.train.text.blend import BLOCK, Blend
from trimaran.train.text.sampler import Sampler
from trimaran.train.text.tokens import Tokens


@settings(deadline=None, max_examples=25)
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    first=st.integers(0, 3 * BLOCK),
)
def test_samples_of_a_text_are_numbered_without_gaps_and_in_proportion(weights: list[float], first: int) -> None:
    blend = Blend(weights)
    places = [blend.place_of(sample) for sample in range(first, first + 500)]
    for text, weight in enumerate(weights):
        numbers = [number for of, number in places if of == text]
        if not numbers:
            continue
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        share = weight / sum(weights)
        assert numbers[0] == pytest.approx(share * first, abs=len(weights) + 1 + first / BLOCK)


@pytest.fixture(scope="module")
def three_texts(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """Texts of 60, 200 and 1000 documents; every document is distinct."""
    folder = tmp_path_factory.mktemp("texts")
    blend = []
    for name, (documents, weight) in {"a": (60, 1.0), "b": (200, 2.0), "c": (1000, 5.0)}.items():
        path = folder / f"{name}.jsonl"
        path.write_text("\n".join(json.dumps({"text": f"{name}{i:06d}"}) for i in range(documents)))
        blend.append({"paths": [str(path)], "weight": weight})
    data = DataSettings.model_validate({"blend": blend})
    return Tokens(prepare(DataJob(data=data, vocab=300, cache_dir=str(folder / "cache"))))


@settings(deadline=None, max_examples=20)
@given(
    dp=st.sampled_from([1, 2, 3, 4, 6]),
    mbs=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**63 - 1),
    validation=st.sampled_from([0.0, 0.2]),
    resumed_at=st.integers(0, 20),
)
def test_no_sample_is_seen_twice_in_an_epoch_on_any_layout(
    three_texts: Tokens, dp: int, mbs: int, seed: int, validation: float, resumed_at: int
) -> None:
    """What all replicas read in all steps, some of them after a resumption, is every window of a text once an epoch."""
    batch, steps = 24, 30
    own = batch // dp
    seen: Counter[int] = Counter()
    sampler = Sampler(three_texts, 9, seed, validation=validation)
    for step in range(steps):
        if step == resumed_at:
            sampler = Sampler(three_texts, 9, seed, validation=validation)
        for replica in range(dp):
            for micro in range(0, own, mbs):
                first = step * batch + replica * own + micro
                seen.update(sampler.start_of(sample) for sample in range(first, first + min(mbs, own - micro)))
    whole = Sampler(three_texts, 9, seed, validation=validation)
    assert sum(seen.values()) == batch * steps
    assert seen == Counter(whole.start_of(sample) for sample in range(batch * steps))
    for begin, end in three_texts.parts:
        counts = [count for start, count in seen.items() if begin <= start < end]
        windows = next(s.windows for s in whole._streams if s.begin == begin)
        shown = sum(counts)
        assert max(counts) == -(-shown // windows)
        if shown >= windows:
            assert len(counts) == windows and min(counts) >= shown // windows


def test_held_out_text_is_never_trained_on_and_documents_are_whole(three_texts: Tokens) -> None:
    training, held_out = (Sampler(three_texts, 9, 3, validation=0.2, held_out=side) for side in (False, True))
    for part, (begin, end) in enumerate(three_texts.parts):
        train, valid = training._streams[part], held_out._streams[part]
        train_end = train.begin + train.windows * 9 + 1
        assert begin == train.begin and train_end <= valid.begin < valid.begin + valid.windows * 9 < end
        assert three_texts.read(valid.begin - 1, 1)[0] == three_texts.index.end_of_document
        assert (end - valid.begin) / (end - begin) == pytest.approx(0.2, abs=0.02)


def test_too_little_held_out_text_is_refused_with_both_numbers(three_texts: Tokens) -> None:
    with pytest.raises(TrimaranError, match=r"text 1 of the blend: \d+ tokens held out are fewer than the 65"):
        Sampler(three_texts, 64, 3, validation=0.05, held_out=True)
