"""What a stored row is known by, and how stores of earlier versions would have kept it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from trimaran.nouns.columns import FURTHER_COLUMNS
from trimaran.nouns.measurement import Measurement
from trimaran.store.sql_row import FIELDS

# Where in a row's cells stands what stores of earlier versions did not keep.
_KEPT_SINCE = frozenset(FIELDS.index(column.name) for column in FURTHER_COLUMNS)
_TRIAL_KEY = frozenset((FIELDS.index("trial_key"),))


def digest_of(cells: Sequence[object]) -> bytes:
    """What a row's cells are known by: 16 bytes, where those of a hundred thousand rows would fill the memory."""
    return hashlib.blake2b(repr(tuple(cells)).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def as_earlier(measurement: Measurement, cells: Sequence[object]) -> Iterator[list[object]]:
    """The cells as earlier versions kept them, where these kept less: further columns, or the key of a log's row."""
    if any(cells[at] is not None for at in _KEPT_SINCE):
        yield _without(_KEPT_SINCE, cells)
    if measurement.trial_key and not measurement.created_at:
        yield _without(_TRIAL_KEY, cells)


def _without(places: frozenset[int], cells: Sequence[object]) -> list[object]:
    return [None if at in places else cell for at, cell in enumerate(cells)]
