"""Choice: what all that lists a layout's fields has to know of one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from trimaran.layout.words import Word
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.columns import FURTHER_COLUMNS, Cell, Column
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload

# The values that are worth proposing to run a workload on so many devices of a cluster, the plainest first.
Proposes = Callable[[Workload, Cluster, Stack, int], Iterable[Any]]
# A value's coordinates in the surrogate's space, in length scales of the cost model's error.
Coordinates = Callable[[Any], tuple[float, ...]]


@dataclass(frozen=True)
class Heading:
    """How printed tables and the page show the choice, in records under `key` or its name.

    `blank` says where its default is not shown: nowhere, in a row that has it, or in a table whose rows all have it;
    the first kind of blank is shown of plans alone. The page drops a `dull` column whose rows all say the same.
    """

    title: str
    key: str = ""
    blank: Literal["never", "row", "table"] = "never"
    dull: bool = False


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One field of a layout: one of `words`, or a number, or a list that a grid holds apart.

    `short` is its name in `--fix` and in the page's filters. `proposes` is None where a search makes the values from
    those of others; a choice that is not `fixable` cannot be held at a value. Layouts that differ only in choices
    that are not `distinct` share one place in a ranking. One that is not `exact` has a loss of its own, and a search
    leaves what is `on_request` at its default unless it is held at another value. `column` and `heading` are None where
    it has none. `plain` are the values that a ranking prefers among equally fast layouts; none where all are as plain.
    (ZeRO and sequence parallelism leave each rank less to hold for the same traffic, and are as plain as without.)
    """

    name: str
    short: str = ""
    default: Any
    words: tuple[Any, ...] = ()
    word: Word
    column: Column | None
    heading: Heading | None
    proposes: Proposes | None
    fixable: bool = True
    distinct: bool = True
    exact: bool = True
    on_request: bool = False
    plain: tuple[Any, ...] = ()
    coordinates: Coordinates

    @property
    def bounds(self) -> tuple[int, int | None] | None:
        """The least and the largest number, where it is one: those of its column."""
        if self.words or not isinstance(self.default, int):
            return None
        if self.column is None:
            return min(self.default, 1), None
        return min(self.default, int(self.column.minimum or 0)), int(self.column.maximum or 0)

    @property
    def in_grid(self) -> bool:
        """Whether a grid holds it as an array of numbers or indexes."""
        return bool(self.words) or self.bounds is not None

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off."""
        return self.words == (False, True)

    @property
    def is_count(self) -> bool:
        """Whether it is a number from 1 on, such that twice as much is a step."""
        return self.bounds is not None and self.bounds[0] == 1

    def cell(self, value: Any) -> Cell:
        """What a row says of a value: nothing of the default, where tables have the column only if a row fills it."""
        return None if self._may_be_blank and value == self.default else value

    def stated(self, cell: Cell) -> Any:
        """The value that a row's cell states, a blank one the default where `cell` leaves it blank."""
        return self.default if self._may_be_blank and cell is None else cell

    @property
    def _may_be_blank(self) -> bool:
        return self.column in FURTHER_COLUMNS

    def index(self, value: Any) -> int:
        """The number that stands for a value in a grid: itself, or the place among the words."""
        return self.words.index(value) if self.words else int(value)

    def value(self, index: Any) -> Any:
        """The value that a grid's number stands for."""
        return self.words[int(index)] if self.words else int(index)
