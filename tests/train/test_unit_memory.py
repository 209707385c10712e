"""Units that take turns at memory: who lies where, who has it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pool import Pool
from reference import Reference
from shapes import LLAMA
from test_same_loss_on_every_layout import assert_same
from trimaran.nouns.attention import LatentAttention
from trimaran.protocol.job import TrainJob
from trimaran.train.engine.unit_memory import PLACES, UnitMemory

EMBEDDING, LAYER, NORM = 4096, 1024, 64


def memory(*lengths: int) -> UnitMemory:
    """Memory for layers of so many elements."""
    return UnitMemory([("layers", length) for length in lengths], torch.float32, torch.device("cpu"))


def held_bytes(units: UnitMemory) -> int:
    """Bytes behind all tensors, counted once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in units.tensors}
    return sum(storages.values())


def test_layers_take_turns_at_two_places_that_are_kept() -> None:
    units = memory(EMBEDDING, *[LAYER] * 6, NORM)
    assert held_bytes(units) == PLACES * LAYER * 4
    layers = units.tensors[1:7]
    for first, second, third in zip(layers, layers[1:], layers[2:], strict=False):
        assert first.data_ptr() != second.data_ptr()
        assert first.data_ptr() == third.data_ptr()


def test_what_one_wrote_is_not_lost_while_its_neighbour_writes() -> None:
    units = memory(*[LAYER] * 4)
    first, second, third, _ = units.tensors
    assert units.take(first)
    first.fill_(1.0)
    assert units.take(second)
    second.fill_(2.0)
    assert not units.take(first)
    assert (first == 1.0).all()
    units.give_back(first)
    assert units.take(third)
    third.fill_(3.0)
    assert (second == 2.0).all()


def test_two_that_take_turns_are_never_worked_with_at_once() -> None:
    units = memory(*[LAYER] * 4)
    units.take(units.tensors[0])
    with pytest.raises(RuntimeError, match="at once"):
        units.take(units.tensors[2])
    # one that has nothing gives nothing back
    units.give_back(units.tensors[2])
    assert units.holder(units.tensors[2]) is units.tensors[0]


def test_a_unit_of_another_size_takes_memory_and_gives_it_back() -> None:
    units = memory(EMBEDDING, *[LAYER] * 3, EMBEDDING)
    first, last = units.tensors[0], units.tensors[-1]
    assert units.take(first)
    view = first[:8].view(2, 4)
    assert units.take(last)
    assert held_bytes(units) == (2 * EMBEDDING + PLACES * LAYER) * 4
    units.give_back(first)
    units.give_back(last)
    assert held_bytes(units) == PLACES * LAYER * 4
    assert view.shape == (2, 4)


@given(lengths=st.lists(st.sampled_from([1, 2, 3]), max_size=12))
def test_neighbours_of_one_size_never_share_and_no_size_has_more_than_it_needs(lengths: list[int]) -> None:
    units = memory(*lengths)
    for length in set(lengths):
        of_length = [tensor for tensor in units.tensors if len(tensor) == length]
        storages = [tensor.untyped_storage()._cdata for tensor in of_length]
        assert all(a != b for a, b in pairwise(storages))
        assert len(set(storages)) == min(len(of_length), PLACES)
        for tensor in of_length:
            assert units.take(tensor)
            assert len(tensor) == length and tensor.untyped_storage().nbytes() >= 4 * length
            units.give_back(tensor)


def test_what_is_as_large_as_a_layer_by_chance_is_worked_with_beside_it() -> None:
    kinds = ["embedding.tokens", *["layers", "layers.experts"] * 4, "head.weight"]
    units = UnitMemory([(kind, LAYER) for kind in kinds], torch.float32, torch.device("cpu"))
    embedding, *of_layers, head = units.tensors
    assert all(units.take(tensor) for tensor in (embedding, *of_layers[:4], head))


@pytest.mark.parametrize("layout", ["dp2,tp3,mbs4,fsdp", "dp2,tp3,mbs4,zero2"])
def test_a_model_whose_embedding_is_as_large_as_a_layer_trains(
    pool: Pool, make_job: Callable[..., TrainJob], reference: Reference, layout: str
) -> None:
    # of TP's three ranks each has 128 x 12 elements of the vocabulary, and as many of a layer
    attention = LatentAttention(query_rank=0, kv_rank=12, plain_dim=3, rotary_dim=4, value_dim=1)
    shape = {"hidden": 12, "heads": 6, "kv_heads": 6, "head_dim": 7, "ffn_hidden": 60, "tied_embedding": True}
    model = LLAMA.model_copy(update={**shape, "layers": 4, "latent_attention": attention})
    assert_same(pool.run(make_job(layout, model=model, steps=3)), reference.run(model, steps=3))
