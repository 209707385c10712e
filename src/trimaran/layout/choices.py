"""Choices: one row for each field of a layout, from which all that lists a layout's fields is made.

The grid, the sieve, the search's space, the surrogate, the notation, the table columns, the printed tables and the
page iterate over CHOICES, so a further choice is a further row here, a field of Layout and one of LayoutGrid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import Field

from trimaran.layout.axes import (
    AXES,
    PLACEMENTS,
    PROPOSED_PLACEMENTS,
    USUAL_PLACEMENT,
    Axis,
    places_so,
    stated_placement,
    usual_axes,
)
from trimaran.layout.words import (
    Word,
    beside,
    flagged,
    listed_in_runs,
    numbered,
    ordered,
    prefixed,
    recomputing,
    shared_out,
    spelled,
)
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.columns import BY_NAME, FURTHER_COLUMNS, Cell, Column
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.precision import PRECISIONS, PrecisionName
from trimaran.nouns.recompute import MODULES, RECOMPUTES, WHOLE, modules_of
from trimaran.nouns.stack import (
    FOLDED,
    Compression,
    ContextParallelKind,
    DataParallelKind,
    Dispatcher,
    ExpertOverlap,
    Offload,
    Schedule,
    Stack,
)
from trimaran.nouns.workload import Workload
from trimaran.operators.modules import covers

# The values that are worth proposing to run a workload on so many devices of a cluster, the plainest first.
Proposes = Callable[[Workload, Cluster, Stack, int], Iterable[Any]]
# A value's coordinates in the surrogate's space, in length scales of the cost model's error.
Coordinates = Callable[[Any], tuple[float, ...]]
# Doubling a degree changes what the cost model may have wrong; so does every other choice. One unit is one length scale
# of the surrogate. Layouts that differ in anything are apart: equal ones would be known once one of them is measured.
_SWITCH, _SMALL_SWITCH = 1.0, 0.3


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


def usual_precision(cluster: Cluster, stack: Stack) -> PrecisionName:
    """What a layout trains in when nobody says: 16 bit where device and stack have it; fp32 on a CPU."""
    order: tuple[PrecisionName, ...] = ("fp32", "bf16") if cluster.device.kind == "cpu" else ("bf16", "fp16", "fp32")
    for precision in order:
        if cluster.device.peak(precision) is not None and precision in stack.precisions:
            return precision
    raise TrimaranError(
        f"{cluster.device.name or 'the device'} computes in {', '.join(cluster.device.peak_tflops)} and {stack.name} "
        f"in {', '.join(stack.precisions)}: they share no precision, choose another stack"
    )


def usual_schedule(pp: int, vpp: int) -> Schedule:
    """The schedule of a layout that names none: 1F1B where there is a pipeline, interleaved with virtual stages."""
    return "none" if pp <= 1 else "interleaved" if vpp > 1 else "1f1b"


def usual_chunks(schedule: object) -> int:
    """The virtual stages of a layout that states none: folded schedules have two."""
    return 2 if schedule in FOLDED else 1


def _doublings(scale: float) -> Coordinates:
    """Doubling the number is `scale` length scales."""
    return lambda number: (scale * math.log2(number),)


def _steps(size: float, values: tuple[Any, ...]) -> Coordinates:
    """Each value is `size` length scales from the next."""
    return lambda value: (size * values.index(value),)


def _switches(size: float, values: tuple[Any, ...]) -> Coordinates:
    """Each of the values is a switch of its own."""
    return lambda value: tuple(size * (value == each) for each in values)


def _recomputed(word: str) -> tuple[float, ...]:
    """None, selective and full a switch apart; named modules lie by selective, each a small switch from the others."""
    named = modules_of(word)
    place = 1 if named else WHOLE.index(word)
    return (_SWITCH * place, *(_SMALL_SWITCH * (module in named) for module in MODULES))


def _unevenness(split: tuple[int, ...]) -> tuple[float, ...]:
    """Layers that the fullest stage has more than the leanest; 0 where the split is left to the stack."""
    return (_SMALL_SWITCH * (max(split) - min(split)) if split else 0.0,)


def _unlikeness(batches: tuple[int, ...]) -> tuple[float, ...]:
    """How often the most micro-batches of a replica double the fewest; 0 where all take as many."""
    return (_SMALL_SWITCH * math.log2(max(batches) / min(batches)) if batches else 0.0,)


def _places(placement: tuple[str, ...]) -> tuple[float, ...]:
    """A small switch for each usual axis that is not at its usual place, and one where another axis is not at its."""
    order = zip(usual_axes(placement), usual_axes(USUAL_PLACEMENT), strict=True)
    moved = stated_placement(placement) != usual_axes(placement)
    return (*(_SMALL_SWITCH * (axis != usual) for axis, usual in order), _SMALL_SWITCH * moved)


def _stated(size: float, scale: float) -> Coordinates:
    """Stating a number is `size` length scales from leaving it to others (0), and doubling it `scale`."""
    return lambda number: (size * (number > 0), scale * math.log2(max(number, 1)))


def _degree(axis: Axis) -> Choice:
    return Choice(
        name=axis.name, default=1, word=numbered(axis.name, axis.name, usual=None if axis.usual else 1),
        column=BY_NAME[axis.name],
        heading=Heading(axis.title) if axis.usual else Heading(axis.title, blank="table", dull=True),
        proposes=lambda workload, cluster, stack, devices: [
            degree
            for degree in range(1, min(devices, max(1, axis.largest(workload, stack))) + 1)
            if axis.worth(workload, degree)
        ],
        coordinates=_doublings(axis.scale),
    )  # fmt: skip


_SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


def _shards(cluster: Cluster, stack: Stack, devices: int) -> Sequence[int]:
    """All replicas, or parts of them by powers of two, where the stack shards so and there are nodes to stay inside."""
    if not stack.hybrid_zero_stages or cluster.nodes == 1:
        return (0,)
    return (0, *(2**power for power in range(1, devices.bit_length()) if 2**power < devices))


def _placements(stack: Stack) -> Sequence[tuple[str, ...]]:
    """The orders of axes that the stack has, the usual one first where it has that."""
    return [order for order in PROPOSED_PLACEMENTS if places_so(stack, order)]


def _expert_degrees(workload: Workload, stack: Stack, devices: int) -> Sequence[int]:
    """Divisors of the experts, where the stack lays them out over ranks."""
    experts = workload.model.experts if stack.expert_parallel else 1
    return [degree for degree in range(1, min(experts, devices) + 1) if experts % degree == 0] or [1]


def _overlaps(workload: Workload, stack: Stack) -> Sequence[ExpertOverlap]:
    """None, and what DualPipeV is made for, where the stack has both and the model experts."""
    made_for = "dualpipev" in stack.overlaps_batches and "batch" in stack.expert_overlaps
    return ("none", "batch") if made_for and workload.model.experts else ("none",)


# Choices that go with an axis stand behind it.
_WITH_AXIS: Mapping[str, tuple[Choice, ...]] = {
    "dp": (
        Choice(
            name="shard",
            default=0,
            word=numbered("shard", "shard", usual=0),
            column=BY_NAME["shard"],
            heading=Heading("Shard", blank="row", dull=True),
            proposes=lambda workload, cluster, stack, devices: _shards(cluster, stack, devices),
            distinct=False,
            coordinates=_stated(_SMALL_SWITCH, 0.2),
        ),
    ),
    "cp": (
        Choice(
            name="cp_kind",
            default="ring",
            words=get_args(ContextParallelKind),
            word=prefixed("cp_kind", "cp", get_args(ContextParallelKind), "ring"),
            column=BY_NAME["cp_kind"],
            heading=Heading("CP kind", blank="row"),
            proposes=lambda workload, cluster, stack, devices: dict.fromkeys(("ring", *stack.context_parallel)),
            distinct=False,
            coordinates=_switches(_SMALL_SWITCH, get_args(ContextParallelKind)[1:]),
        ),
    ),
    "pp": (
        Choice(
            name="ep",
            default=1,
            word=numbered("ep", "ep"),
            column=BY_NAME["ep"],
            heading=Heading("EP", blank="table", dull=True),
            proposes=lambda workload, cluster, stack, devices: _expert_degrees(workload, stack, devices),
            coordinates=_doublings(0.5),
        ),
        Choice(
            name="etp",
            default=0,
            word=numbered("etp", "etp", usual=0),
            column=BY_NAME["etp"],
            heading=Heading("ETP", blank="row", dull=True),
            proposes=lambda workload, cluster, stack, devices: (
                (1, 0) if workload.model.experts and stack.own_expert_tensor else (0,)
            ),
            coordinates=_stated(_SMALL_SWITCH, 0.5),
        ),
        Choice(
            name="dispatcher",
            default="alltoall",
            words=get_args(Dispatcher),
            word=prefixed("dispatcher", "dispatch", get_args(Dispatcher), "alltoall"),
            column=BY_NAME["dispatcher"],
            heading=Heading("Dispatcher", blank="row"),
            proposes=lambda workload, cluster, stack, devices: (
                stack.dispatchers if workload.model.experts and stack.dispatchers else ("alltoall",)
            ),
            coordinates=_switches(_SMALL_SWITCH, ("allgather", "deepep", "hybridep")),
        ),
        Choice(
            name="ep_overlap",
            default="none",
            words=get_args(ExpertOverlap),
            word=prefixed("ep_overlap", "overlap", get_args(ExpertOverlap), "none"),
            column=BY_NAME["ep_overlap"],
            heading=Heading("EP overlap", blank="row"),
            proposes=lambda workload, cluster, stack, devices: _overlaps(workload, stack),
            coordinates=_switches(_SMALL_SWITCH, ("shared", "batch")),
        ),
    ),
}

CHOICES: tuple[Choice, ...] = (
    *(choice for axis in AXES for choice in (_degree(axis), *_WITH_AXIS.get(axis.name, ()))),
    Choice(
        name="vpp", default=1, word=numbered("vpp", "vpp"), column=BY_NAME["vpp"],
        heading=Heading("VPP", blank="table", dull=True), proposes=None, plain=(1,),
        coordinates=_doublings(0.5),
    ),
    Choice(
        name="mbs", default=1, word=numbered("mbs", "mbs", usual=None), column=BY_NAME["mbs"], heading=Heading("MBS"),
        proposes=lambda workload, cluster, stack, devices: range(1, workload.global_batch + 1),
        coordinates=_doublings(0.4),
    ),
    Choice(
        name="zero_stage", short="zero", default=0, word=numbered("zero_stage", "zero", usual=0),
        column=BY_NAME["zero_stage"], heading=Heading("ZeRO", dull=True),
        proposes=lambda workload, cluster, stack, devices: stack.zero_stages,
        coordinates=_steps(_SWITCH / 2, (0, 1, 2, 3)),
    ),
    Choice(
        name="dp_kind", default="all_reduce", words=get_args(DataParallelKind),
        word=flagged(
            "dp_kind", {"ps": {"dp_kind": "parameter_server"}, "fsdp": {"dp_kind": "fully_sharded", "zero_stage": 3}}
        ),
        column=BY_NAME["dp_kind"], heading=Heading("DP kind", blank="row"),
        proposes=lambda workload, cluster, stack, devices: stack.dp_kinds,
        plain=("all_reduce",),
        # fully sharded is ZeRO stage 3, which is far from the others already
        coordinates=_switches(_SWITCH, ("parameter_server",)),
    ),
    Choice(
        name="sequence_parallel", short="sp", default=False, words=(False, True),
        word=flagged("sequence_parallel", {"sp": {"sequence_parallel": True}}),
        column=None, heading=Heading("SP", key="sp", blank="row"),
        proposes=lambda workload, cluster, stack, devices: (False, True) if stack.sequence_parallel else (False,),
        coordinates=_switches(_SWITCH, (True,)),
    ),
    Choice(
        name="recompute", default="none", words=RECOMPUTES, word=recomputing(),
        column=BY_NAME["recompute"], heading=Heading("Recompute"),
        proposes=lambda workload, cluster, stack, devices: [
            word for word in stack.recomputes if all(covers(module, workload.model) for module in modules_of(word))
        ],
        plain=("none",),
        coordinates=_recomputed,
    ),
    Choice(
        name="recompute_every", default=1, word=beside("recompute"), column=None, heading=None,
        proposes=lambda workload, cluster, stack, devices: stack.recompute_every, coordinates=_doublings(0.4),
    ),
    Choice(
        name="offload", default="none", words=get_args(Offload),
        word=prefixed("offload", "offload", get_args(Offload), "none"),
        column=BY_NAME["offload"], heading=Heading("Offload", blank="row"),
        # a search that finds nothing that fits asks again with what the stack can offload
        on_request=True,
        proposes=lambda workload, cluster, stack, devices: ("none",),
        coordinates=_switches(_SWITCH, ("optimizer", "weights", "activations")),
    ),
    Choice(
        name="compression", default="none", words=get_args(Compression),
        word=prefixed("compression", "compress", get_args(Compression), "none"),
        column=BY_NAME["compression"], heading=Heading("Compression", blank="row"),
        proposes=lambda workload, cluster, stack, devices: ("none",), exact=False, on_request=True,
        coordinates=_switches(_SWITCH, ("fp16", "int8", "powersgd")),
    ),
    Choice(
        name="local_steps", short="local", default=0, word=numbered("local_steps", "local", usual=0),
        column=BY_NAME["local_steps"], heading=Heading("Local steps", blank="row"),
        proposes=lambda workload, cluster, stack, devices: (0,), exact=False, on_request=True,
        coordinates=_stated(_SWITCH, 0.4),
    ),
    Choice(
        name="fragments", default=1, word=numbered("fragments", "fragments"), column=None,
        heading=Heading("Fragments", blank="row"),
        proposes=lambda workload, cluster, stack, devices: (1,), exact=False, on_request=True,
        coordinates=_doublings(_SMALL_SWITCH),
    ),
    Choice(
        name="outer_delay", short="delay", default=0, word=numbered("outer_delay", "delay", usual=0), column=None,
        heading=Heading("Outer delay", blank="row"),
        proposes=lambda workload, cluster, stack, devices: (0,), exact=False, on_request=True,
        coordinates=_stated(_SMALL_SWITCH, 0.1),
    ),
    Choice(
        name="precision", default="fp32", words=tuple(PRECISIONS),
        word=spelled("precision", tuple(PRECISIONS), lambda fields: "fp32"),
        column=BY_NAME["precision"], heading=Heading("Precision", dull=True),
        proposes=lambda workload, cluster, stack, devices: (usual_precision(cluster, stack),),
        # two precisions differ in two of these coordinates, and so by one switch
        coordinates=_switches(_SWITCH / math.sqrt(2), tuple(PRECISIONS)),
    ),
    Choice(
        name="schedule", default="none", words=_SCHEDULES,
        word=spelled("schedule", _SCHEDULES, lambda fields: usual_schedule(fields["pp"], fields["vpp"])),
        column=BY_NAME["schedule"], heading=Heading("Schedule", dull=True),
        proposes=lambda workload, cluster, stack, devices: ("none", *stack.schedules),
        # an interleaved one shows in vpp, and so does what is folded
        plain=("none", "1f1b", "interleaved", *FOLDED),
        # beside 1F1B; interleaved shows in vpp
        coordinates=_switches(_SWITCH, ("gpipe", "zero_bubble", *FOLDED)),
    ),
    Choice(
        name="stage_split", default=(), word=shared_out("stage_split", "split", "stages"), column=None, heading=None,
        proposes=None, fixable=False, distinct=False, coordinates=_unevenness,
    ),
    Choice(
        name="replica_batches", default=(), word=shared_out("replica_batches", "batches", "replicas"), column=None,
        heading=None, proposes=None, fixable=False, distinct=False, coordinates=_unlikeness,
    ),
    Choice(
        name="placement", default=USUAL_PLACEMENT, words=PLACEMENTS, word=ordered("placement", USUAL_PLACEMENT),
        column=None, heading=None, proposes=lambda workload, cluster, stack, devices: _placements(stack),
        distinct=False, coordinates=_places,
    ),
    Choice(
        name="placed", default=(), word=listed_in_runs("placed", "on"), column=None, heading=None,
        proposes=None, fixable=False, distinct=False,
        # layouts that stand elsewhere are a switch apart, by whichever of two places
        coordinates=lambda placed: (_SWITCH * (len(placed) > 0), _SMALL_SWITCH * (hash(placed) % 997) / 997),
    ),
)  # fmt: skip

CHOICE: Mapping[str, Choice] = {choice.name: choice for choice in CHOICES}
# What a grid holds as arrays, and what a row of a table has a column for.
IN_GRID: tuple[Choice, ...] = tuple(choice for choice in CHOICES if choice.in_grid)
IN_TABLES: tuple[Choice, ...] = tuple(choice for choice in CHOICES if choice.column)
# Lists that no search proposes: a grid makes them, or they are found for a layout apart.
APART: frozenset[str] = frozenset(choice.name for choice in CHOICES if not choice.in_grid)
# What a search asks for only where it is held, and which are numbers that double.
ON_REQUEST: tuple[str, ...] = tuple(choice.name for choice in CHOICES if choice.on_request)
COUNTS: tuple[str, ...] = tuple(choice.name for choice in CHOICES if choice.is_count)


def index_of(choice: str, word: object) -> int:
    """The number that stands for a word of a choice in a grid."""
    return CHOICE[choice].index(word)


def field(choice: str) -> Any:
    """The pydantic field of a choice: its default and bounds."""
    row = CHOICE[choice]
    least, most = row.bounds or (None, None)
    # above 0 reads better to a person than at least 1
    return Field(default=row.default, le=most, **({"gt": 0} if row.is_count else {"ge": least}))
