"""Choices: one row for each field of a layout, from which all that lists a layout's fields is made.

The grid, the sieve, the search's space, the surrogate, the notation, the table columns, the printed tables and the
page iterate over CHOICES, so a further choice is a further row here, a field of Layout and one of LayoutGrid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import Field

from trimaran.layout.axes import (
    AXES,
    PLACEMENTS,
    PROPOSED_PLACEMENTS,
    USUAL_PLACEMENT,
    Axis,
    places_so,
)
from trimaran.layout.choice import Choice, Heading
from trimaran.layout.distances import (
    SMALL_SWITCH,
    SWITCH,
    doublings,
    places,
    recomputed,
    stated,
    steps,
    switches,
    unevenness,
    unlikeness,
)
from trimaran.layout.words import (
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
from trimaran.nouns.columns import BY_NAME
from trimaran.nouns.dispatcher import DispatcherName
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.precision import PRECISIONS, PrecisionName
from trimaran.nouns.recompute import RECOMPUTES, modules_of
from trimaran.nouns.stack import (
    FOLDED,
    Compression,
    ContextParallelKind,
    DataParallelKind,
    ExpertOverlap,
    Offload,
    Schedule,
    Stack,
)
from trimaran.nouns.workload import Workload
from trimaran.operators.modules import covers


def usual_precision(cluster: Cluster, stack: Stack) -> PrecisionName:
    """What a layout trains in when nobody says: 16 bit where device and stack have it; fp32 on a CPU.

    Raises TrimaranError where the two share no precision.
    """
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
        coordinates=doublings(axis.scale),
    )  # fmt: skip


_SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


def _shards(cluster: Cluster, stack: Stack, devices: int) -> Sequence[int]:
    """All replicas, or parts of them that can fill 1, 4, 16, ... nodes with what shares out each replica.

    Parts where the stack shards so and there are nodes to stay inside.
    """
    filled = cluster.devices_per_node
    if not stack.hybrid_zero_stages or cluster.nodes == 1 or filled > devices:
        return (0,)
    while 4 * filled <= devices:
        filled *= 4
    small = [part for part in range(1, math.isqrt(filled) + 1) if filled % part == 0]
    return (0, *sorted({part for each in small for part in (each, filled // each) if 1 < part < devices}))


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
            coordinates=stated(SMALL_SWITCH, 0.2),
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
            coordinates=switches(SMALL_SWITCH, get_args(ContextParallelKind)[1:]),
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
            coordinates=doublings(0.5),
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
            coordinates=stated(SMALL_SWITCH, 0.5),
        ),
        Choice(
            name="dispatcher",
            default="alltoall",
            words=get_args(DispatcherName),
            word=prefixed("dispatcher", "dispatch", get_args(DispatcherName), "alltoall"),
            column=BY_NAME["dispatcher"],
            heading=Heading("Dispatcher", blank="row"),
            proposes=lambda workload, cluster, stack, devices: (
                stack.dispatchers if workload.model.experts and stack.dispatchers else ("alltoall",)
            ),
            coordinates=switches(SMALL_SWITCH, ("allgather", "deepep", "hybridep")),
        ),
        Choice(
            name="ep_overlap",
            default="none",
            words=get_args(ExpertOverlap),
            word=prefixed("ep_overlap", "overlap", get_args(ExpertOverlap), "none"),
            column=BY_NAME["ep_overlap"],
            heading=Heading("EP overlap", blank="row"),
            proposes=lambda workload, cluster, stack, devices: _overlaps(workload, stack),
            coordinates=switches(SMALL_SWITCH, ("shared", "batch")),
        ),
    ),
}

CHOICES: tuple[Choice, ...] = (
    *(choice for axis in AXES for choice in (_degree(axis), *_WITH_AXIS.get(axis.name, ()))),
    Choice(
        name="vpp", default=1, word=numbered("vpp", "vpp"), column=BY_NAME["vpp"],
        heading=Heading("VPP", blank="table", dull=True), proposes=None, plain=(1,),
        coordinates=doublings(0.5),
    ),
    Choice(
        name="mbs", default=1, word=numbered("mbs", "mbs", usual=None), column=BY_NAME["mbs"], heading=Heading("MBS"),
        proposes=lambda workload, cluster, stack, devices: range(1, workload.global_batch + 1),
        coordinates=doublings(0.4),
    ),
    Choice(
        name="zero_stage", short="zero", default=0, word=numbered("zero_stage", "zero", usual=0),
        column=BY_NAME["zero_stage"], heading=Heading("ZeRO", dull=True),
        proposes=lambda workload, cluster, stack, devices: stack.zero_stages,
        coordinates=steps(SWITCH / 2, (0, 1, 2, 3)),
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
        coordinates=switches(SWITCH, ("parameter_server",)),
    ),
    Choice(
        name="sequence_parallel", short="sp", default=False, words=(False, True),
        word=flagged("sequence_parallel", {"sp": {"sequence_parallel": True}}),
        column=None, heading=Heading("SP", key="sp", blank="row"),
        proposes=lambda workload, cluster, stack, devices: (False, True) if stack.sequence_parallel else (False,),
        coordinates=switches(SWITCH, (True,)),
    ),
    Choice(
        name="recompute", default="none", words=RECOMPUTES, word=recomputing(),
        column=BY_NAME["recompute"], heading=Heading("Recompute"),
        proposes=lambda workload, cluster, stack, devices: [
            word for word in stack.recomputes if all(covers(module, workload.model) for module in modules_of(word))
        ],
        plain=("none",),
        coordinates=recomputed,
    ),
    Choice(
        name="recompute_every", default=1, word=beside("recompute"), column=None, heading=None,
        proposes=lambda workload, cluster, stack, devices: stack.recompute_every, coordinates=doublings(0.4),
    ),
    Choice(
        name="offload", default="none", words=get_args(Offload),
        word=prefixed("offload", "offload", get_args(Offload), "none"),
        column=BY_NAME["offload"], heading=Heading("Offload", blank="row"),
        # a search that finds nothing that fits asks again with what the stack can offload
        on_request=True,
        proposes=lambda workload, cluster, stack, devices: ("none",),
        coordinates=switches(SWITCH, ("optimizer", "weights", "activations")),
    ),
    Choice(
        name="compression", default="none", words=get_args(Compression),
        word=prefixed("compression", "compress", get_args(Compression), "none"),
        column=BY_NAME["compression"], heading=Heading("Compression", blank="row"),
        proposes=lambda workload, cluster, stack, devices: ("none",), exact=False, on_request=True,
        coordinates=switches(SWITCH, ("fp16", "int8", "powersgd")),
    ),
    Choice(
        name="local_steps", short="local", default=0, word=numbered("local_steps", "local", usual=0),
        column=BY_NAME["local_steps"], heading=Heading("Local steps", blank="row"),
        proposes=lambda workload, cluster, stack, devices: (0,), exact=False, on_request=True,
        coordinates=stated(SWITCH, 0.4),
    ),
    Choice(
        name="fragments", default=1, word=numbered("fragments", "fragments"), column=None,
        heading=Heading("Fragments", blank="row"),
        proposes=lambda workload, cluster, stack, devices: (1,), exact=False, on_request=True,
        coordinates=doublings(SMALL_SWITCH),
    ),
    Choice(
        name="outer_delay", short="delay", default=0, word=numbered("outer_delay", "delay", usual=0), column=None,
        heading=Heading("Outer delay", blank="row"),
        proposes=lambda workload, cluster, stack, devices: (0,), exact=False, on_request=True,
        coordinates=stated(SMALL_SWITCH, 0.1),
    ),
    Choice(
        name="precision", default="fp32", words=tuple(PRECISIONS),
        word=spelled("precision", tuple(PRECISIONS), lambda fields: "fp32"),
        column=BY_NAME["precision"], heading=Heading("Precision", dull=True),
        proposes=lambda workload, cluster, stack, devices: (usual_precision(cluster, stack),),
        # two precisions differ in two of these coordinates, and so by one switch
        coordinates=switches(SWITCH / math.sqrt(2), tuple(PRECISIONS)),
    ),
    Choice(
        name="schedule", default="none", words=_SCHEDULES,
        word=spelled("schedule", _SCHEDULES, lambda fields: usual_schedule(fields["pp"], fields["vpp"])),
        column=BY_NAME["schedule"], heading=Heading("Schedule", dull=True),
        proposes=lambda workload, cluster, stack, devices: ("none", *stack.schedules),
        # an interleaved one shows in vpp, and so does what is folded
        plain=("none", "1f1b", "interleaved", *FOLDED),
        # beside 1F1B; interleaved shows in vpp
        coordinates=switches(SWITCH, ("gpipe", "zero_bubble", *FOLDED)),
    ),
    Choice(
        name="stage_split", default=(), word=shared_out("stage_split", "split", "stages"), column=None, heading=None,
        proposes=None, fixable=False, distinct=False, coordinates=unevenness,
    ),
    Choice(
        name="replica_batches", default=(), word=shared_out("replica_batches", "batches", "replicas"), column=None,
        heading=None, proposes=None, fixable=False, distinct=False, coordinates=unlikeness,
    ),
    Choice(
        name="placement", default=USUAL_PLACEMENT, words=PLACEMENTS, word=ordered("placement", USUAL_PLACEMENT),
        column=None, heading=None, proposes=lambda workload, cluster, stack, devices: _placements(stack),
        distinct=False, coordinates=places,
    ),
    Choice(
        name="placed", default=(), word=listed_in_runs("placed", "on"), column=None, heading=None,
        proposes=None, fixable=False, distinct=False,
        # layouts that stand elsewhere are a switch apart, by whichever of two places
        coordinates=lambda placed: (SWITCH * (len(placed) > 0), SMALL_SWITCH * (hash(placed) % 997) / 997),
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
