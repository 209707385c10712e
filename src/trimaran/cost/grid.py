"""LayoutGrid: many layouts as one struct of NumPy arrays, which the cost model ranks at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trimaran.cost.splits.split_table import SplitTable
from trimaran.cost.splits.warm_up import Split
from trimaran.layout.axes import DEGREES, INSIDE, Laid
from trimaran.layout.choices import CHOICE, IN_GRID, index_of
from trimaran.layout.layout import Layout, resolve_split
from trimaran.layout.stages import even_split, most_stages, stack_split, weighted_split
from trimaran.nouns.model import Model
from trimaran.nouns.precision import PRECISIONS, Precision
from trimaran.nouns.recompute import RECOMPUTES
from trimaran.nouns.stack import FOLDED, Stack
from trimaran.nouns.workload import Workload
from trimaran.operators.counts import head_in_layers

Ints = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]
Bools = NDArray[np.bool_]

# Combinations of columns have a place each where they are at most so many, besides so many a row.
_FEW, _FEW_PER_ROW = 4096, 8
_FOLDED = tuple(index_of("schedule", word) for word in FOLDED)
STACK_SPLIT, EVEN_SPLIT, WEIGHTED_SPLIT, OTHER_SPLIT = range(4)


def among(column: Ints, values: Iterable[int]) -> Bools:
    """Where a column has one of a few values, shape (n,): a tenth of the time that np.isin takes for short columns."""
    found = np.zeros(len(column), dtype=bool)
    for value in values:
        found |= column == value
    return found


@dataclass(frozen=True)
class LayoutGrid(Laid[Ints]):
    """n layouts; every field but `splits` is an array of shape (n,).

    Choices of a layout are held as numbers, words as their index (Choice.index in trimaran.layout.choices).
    `global_batch` is the workload's, or another one to try (a ramp-up's steps). `split` says where
    the stage split comes from, so that `layout` can state it; `split_row` is its row in `splits`. `most_batches` are
    the micro-batches of the replica that has most of them where a layout states each replica's, else 0.
    """

    dp: Ints
    shard: Ints
    tp: Ints
    cp: Ints
    cp_kind: Ints
    pp: Ints
    ep: Ints
    etp: Ints
    dispatcher: Ints
    ep_overlap: Ints
    vpp: Ints
    mbs: Ints
    zero_stage: Ints
    dp_kind: Ints
    sequence_parallel: Bools
    recompute: Ints
    recompute_every: Ints
    offload: Ints
    compression: Ints
    local_steps: Ints
    fragments: Ints
    outer_delay: Ints
    precision: Ints
    schedule: Ints
    placement: Ints
    split: Ints
    split_row: Ints
    global_batch: Ints
    most_batches: Ints
    splits: SplitTable

    @classmethod
    def build(cls, workload: Workload, stack: Stack, **columns: ArrayLike) -> Self:
        """A grid from columns that broadcast against each other; a missing one has Layout's default.

        Columns are named as Layout's fields; words may be given as such or as indices. The
        schedule defaults to 1F1B, interleaved under vpp > 1. `split` is one of STACK_SPLIT (the
        stack's own choice), EVEN_SPLIT and WEIGHTED_SPLIT. Nothing is validated here: see
        trimaran.layout.rules for the rules.
        """
        given = {name: _indexes(name, values) for name, values in columns.items()}
        if "schedule" not in given:
            pp, vpp = np.broadcast_arrays(given.get("pp", 1), given.get("vpp", 1))
            usual = np.where(vpp > 1, index_of("schedule", "interleaved"), index_of("schedule", "1f1b"))
            given["schedule"] = np.where(pp > 1, usual, index_of("schedule", "none"))
        defaults: dict[str, Any] = {choice.name: choice.index(choice.default) for choice in IN_GRID}
        defaults |= {"split": STACK_SPLIT, "global_batch": workload.global_batch, "most_batches": 0}
        merged = {**defaults, **given}
        arrays = dict(zip(merged, np.broadcast_arrays(*(np.atleast_1d(v) for v in merged.values())), strict=True))
        splits, arrays["split_row"] = _splits(
            workload, stack, *(arrays[name] for name in ("tp", "pp", "vpp", "split", "schedule"))
        )
        held: dict[str, Any] = {name: np.ascontiguousarray(array, _dtype(name)) for name, array in arrays.items()}
        return cls(**held, splits=splits)

    @classmethod
    def from_layouts(cls, layouts: Sequence[Layout], workload: Workload, stack: Stack) -> Self:
        """A grid of the given layouts, their own stage splits included."""
        splits = [
            Split(layout.pp, resolve_split(layout, workload, stack), layout.schedule in FOLDED) for layout in layouts
        ]
        table = tuple(dict.fromkeys(splits))
        row = {split: index for index, split in enumerate(table)}
        columns: dict[str, Any] = {
            choice.name: np.array(
                [choice.index(getattr(layout, choice.name)) for layout in layouts], dtype=_dtype(choice.name)
            )
            for choice in IN_GRID
        }
        columns["split"] = np.array([OTHER_SPLIT if layout.stage_split else STACK_SPLIT for layout in layouts])
        columns["split_row"] = np.array([row[split] for split in splits], dtype=np.int64)
        columns["global_batch"] = np.full(len(layouts), workload.global_batch)
        columns["most_batches"] = np.array([max(layout.replica_batches, default=0) for layout in layouts], np.int64)
        return cls(**columns, splits=SplitTable(table))

    def __len__(self) -> int:
        return len(self.dp)

    @cached_property
    def _answers(self) -> dict[tuple[object, ...], NDArray[Any]]:
        """What was asked of axes and choices before: the parts of memory and time ask for the same again and again."""
        return {}

    def _answer(self, asked: tuple[object, ...], found: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        if asked not in self._answers:
            answer = found()
            answer.setflags(write=False)
            self._answers[asked] = answer
        return self._answers[asked]

    @cached_property
    def devices(self) -> Ints:
        """Ranks used: the product of all degrees."""
        return self.fold(*DEGREES)

    def size(self, axis: str) -> Ints:
        """Ranks along an axis, along a part of one, or along an axis of the experts."""
        return self._answer(("size", axis), partial(super().size, axis))

    def stride(self, axis: str) -> Ints:
        """Distance in ranks between two neighbours of a group along the axis."""
        return self._answer(("stride", axis), partial(super().stride, axis))

    def lies_inside(self, inner: str, outer: str) -> Ints:
        """1 where a layout's placement has `inner` inside `outer`, else 0; shape (n,)."""
        return INSIDE[inner, outer][self.placement]

    def chose(self, choice: str, *words: object) -> Bools:
        """Where a choice is one of `words`, shape (n,)."""
        found = partial(among, getattr(self, choice), [index_of(choice, word) for word in words])
        return self._answer((choice, words), found)

    @cached_property
    def folded(self) -> Bools:
        """Where ranks hold two chunks folded, so that the first has both ends of the model."""
        return among(self.schedule, _FOLDED) & (self.pp > 1)

    @cached_property
    def micro_batches(self) -> Ints:
        """Micro-batches of the replica that has most of them, in one iteration."""
        return np.asarray(np.where(self.most_batches, self.most_batches, -(-self.global_batch // (self.dp * self.mbs))))

    @cached_property
    def filled(self) -> Floats:
        """Share of the sequences of that replica's micro-batches that there are; 1 where the global batch divides."""
        filled = -(-self.global_batch // self.dp) / (self.micro_batches * self.mbs)
        return np.asarray(np.where(self.most_batches, 1.0, filled))

    @cached_property
    def lone(self) -> Bools:
        """Where no two ranks hold the same weights: neither replicas nor ranks that share sequences."""
        return np.asarray(self.dp * self.cp == 1)

    def partial_recomputes(self) -> Iterator[tuple[str, Ints]]:
        """Every word of recompute but none and full that layouts chose, and which layouts did."""
        for index in np.flatnonzero(np.bincount(self.recompute)).tolist():
            if (word := RECOMPUTES[index]) not in ("none", "full"):
                yield word, np.flatnonzero(self.recompute == index)

    def take(self, index: Any) -> Self:
        """The sub-grid at `index` (anything that indexes a NumPy array along its axis)."""
        columns = {
            field.name: np.atleast_1d(getattr(self, field.name)[index])
            for field in fields(self)
            if field.name != "splits"
        }
        return type(self)(**columns, splits=self.splits)

    def with_global_batch(self, batches: ArrayLike) -> Self:
        """The same layouts under other global batches, which broadcast to shape (n,)."""
        return replace(self, global_batch=np.broadcast_to(np.asarray(batches, dtype=np.int64), self.dp.shape))

    def layout(self, index: int) -> Layout:
        """One member as a Layout, with its stage split stated where it is not the stack's own choice."""
        stated = () if self.split[index] == STACK_SPLIT else self.splits.splits[self.split_row[index]].layers
        chosen = {choice.name: choice.value(getattr(self, choice.name)[index]) for choice in IN_GRID}
        return Layout(**chosen, stage_split=stated)


def _dtype(name: str) -> type[np.generic]:
    return np.bool_ if name in CHOICE and CHOICE[name].is_switch else np.int64


def _indexes(name: str, values: ArrayLike) -> NDArray[Any]:
    """Words of a column as indexes; numbers as they are."""
    array = np.asarray(values)
    if array.dtype.kind in "US":
        return np.array([index_of(name, str(word)) for word in array.ravel()]).reshape(array.shape)
    return array


def _splits(
    workload: Workload, stack: Stack, tp: Ints, pp: Ints, vpp: Ints, split: Ints, schedule: Ints
) -> tuple[SplitTable, Ints]:
    """The stage splits of n layouts and the row of each.

    They depend on few distinct (TP, PP, VPP, kind of split), and on whether they are folded.
    """
    weighs_head = (split == WEIGHTED_SPLIT) | (stack.head_weighted_stages & (split == STACK_SPLIT))
    folded = among(schedule, _FOLDED)
    keys = (np.where(weighs_head, tp, 1), pp, vpp, split, *([folded.astype(np.int64)] if folded.any() else []))
    first, inverse = distinct(keys)
    layers = workload.model.layers
    head = cache(partial(head_in_layers, stack.trained(workload.model), workload.seq_len))
    splits = [
        _split(stack, layers, head, *column) for column in zip(*(key[first].tolist() for key in keys), strict=True)
    ]
    table = tuple(dict.fromkeys(splits))
    row = {known: index for index, known in enumerate(table)}
    return SplitTable(table), np.array([row[known] for known in splits], dtype=np.int64)[inverse]


def _split(
    stack: Stack, layers: int, head: Callable[[int], float], tp: int, pp: int, vpp: int, kind: int, folded: int = 0
) -> Split:
    stages = pp * vpp
    if stages > most_stages(stack, layers) or (folded and vpp != 2):
        return Split(1, (layers,))  # refused by the rules on stages and chunks; any figure does
    if kind == WEIGHTED_SPLIT and stages <= layers:
        return Split(pp, weighted_split(layers, stages, head(tp), stack.bare_ends), bool(folded))
    if kind == EVEN_SPLIT and stages <= layers:
        return Split(pp, even_split(layers, stages), bool(folded))
    return Split(pp, stack_split(stack, layers, stages, lambda: head(tp)), bool(folded))


def distinct(keys: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Index of one member of each distinct combination of the key columns, and each row's combination."""
    size = len(keys[0])
    code, values = np.zeros(size, dtype=np.int64), 1
    for column in keys:
        least, most = (int(column.min()), int(column.max())) if size else (0, 0)
        if least == most:
            continue
        if most - least > _FEW_PER_ROW * size + _FEW:
            present, index = np.unique(column, return_inverse=True)
            count = len(present)
        else:
            index, count = column - least, most - least + 1
        if values * count > _FEW_PER_ROW * size + _FEW:
            values, code = _ranked(code, values)
        code = code * count + index
        values *= count
    if values > _FEW_PER_ROW * size + _FEW:
        _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
        return first, inverse
    # Few enough combinations to keep a place for each: far quicker than sorting the rows.
    first = np.full(values, -1, dtype=np.int64)
    first[code[::-1]] = np.arange(size - 1, -1, -1)
    occurring = np.flatnonzero(first >= 0)
    rank = np.empty(values, dtype=np.int64)
    rank[occurring] = np.arange(len(occurring))
    return first[occurring], rank[code]


def _ranked(code: Ints, values: int) -> tuple[int, Ints]:
    """The codes below `values` as ranks among those that occur, and how many do."""
    occurs = np.zeros(values, dtype=np.bool_)
    occurs[code] = True
    occurring = np.flatnonzero(occurs)
    rank = np.empty(values, dtype=np.int64)
    rank[occurring] = np.arange(len(occurring))
    return len(occurring), rank[code]


def by_precision(precision: Ints, value: Callable[[Precision], float]) -> Floats:
    """`value` of each layout's precision, shape of the indexes `precision`."""
    return np.array([value(entry) for entry in PRECISIONS.values()], dtype=np.float64)[precision]


def any_narrow(precision: Ints) -> bool:
    """Whether a layout's precision, an index into PRECISIONS, has products narrower than 16 bit."""
    return bool(np.array([entry.narrow is not None for entry in PRECISIONS.values()])[precision].any())


def padded_vocab_of(model: Model, stack: Stack, tp: Ints) -> Floats:
    """Vocabulary that each layout computes with: padded to 128 x TP where the stack pads, shape (n,)."""
    if not stack.pads_vocab:
        return np.full(tp.shape, float(model.vocab))
    # of each degree once: whole numbers are divided far slower than they are looked up
    multiple = 128 * np.arange(1, int(tp.max(initial=1)) + 1)
    return (-(-model.vocab // multiple) * multiple).astype(np.float64)[tp - 1]
