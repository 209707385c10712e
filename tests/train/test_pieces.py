"""Spans of flat memory as boxes of the tensors they are part of."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trimaran.train.state.pieces import boxes

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_the_boxes_of_a_span_are_its_elements_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    numbers = np.arange(size).reshape(shape)
    found = [
        numbers[tuple(slice(offset, offset + length) for offset, length in zip(offsets, sizes, strict=True))].ravel()
        for offsets, sizes in boxes(shape, begin, end)
    ]
    assert np.array_equal(np.concatenate([np.empty(0, int), *found]), np.arange(begin, end))
    assert len(found) <= 2 * len(shape) - 1
