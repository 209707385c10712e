"""Units that take turns at memory: who lies where, who has it, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimaran.train.engine.unit_memory import PLACES, UnitMemory

EMBEDDING, LAYER, NORM = 4096, 1024, 64


def memory(*lengths: int) -> UnitMemory:
    """Memory for units of so many elements."""
    return UnitMemory(lengths, torch.float32, torch.device("cpu"))


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
