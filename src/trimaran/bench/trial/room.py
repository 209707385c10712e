"""Whether ranks find room: what they are predicted to hold, beside what their machine or their device has."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from trimaran.cost.calibration import Calibration
from trimaran.cost.case import Case
from trimaran.cost.estimate import memory_per_stage
from trimaran.cost.estimates import MemoryParts
from trimaran.cost.grid import LayoutGrid
from trimaran.layout.layout import Layout
from trimaran.layout.places import places
from trimaran.protocol.host import GIB, free_memory_bytes, memory_gib, swap_bytes

# Standard errors of a prediction below which what ranks hold is as good as never: one of 740 runs.
CERTAIN = 3.0


@dataclass(frozen=True)
class Shortage:
    """Ranks that are predicted to hold more than there is; `certain`: ever, and however far the prediction is off."""

    sentence: str
    certain: bool


def shortage(case: Case, layout: Layout, *, here: bool) -> Shortage | None:
    """What the ranks of a layout lack; None where they find room.

    `here`: all of them run on this machine, whose memory then counts, and what is left of it now: of that the lack is
    never certain, since other programs may end. Of other machines counts what the cluster states, and of GPUs the
    memory of each. At the least ranks hold their states and activations, less three standard errors: buffers and
    libraries may be guessed. A prediction errs as its calibration says, but no less than one that was fitted to
    nothing: a few rows that were alike say little of others.
    """
    if case.cluster.groups:  # whose memories differ, so that the smallest says nothing of the others
        return None
    grid = LayoutGrid.from_layouts([layout], case.workload, case.stack)
    (stages,) = memory_per_stage(case, grid)
    if case.on_cpu:
        held = _by_machine(case, layout, stages, here=here)
        who = "the ranks of a machine are"
        limits = list(_of_machine(case, here=here))
    else:
        held, who = [_Held.by(stage) for stage in stages], "a rank is"
        limits = [_Limit("device.mem_gib", case.cluster.device.mem_gib)]
    error = max(case.calibration.mem_error, float(Calibration.model_fields["mem_error"].default))
    needed = max(one.own + one.besides for one in held)
    least = max(one.own for one in held) * math.exp(-CERTAIN * error)
    lacking = [limit for limit in limits if needed > limit.gib]
    if not lacking:
        return None
    limit = min(lacking, key=lambda one: (not (one.lasting and least > one.gib), one.gib))
    certain = limit.lasting and least > limit.gib
    ways = [*([] if limit.lasting else ["end other programs"]), *_ways_out(layout)]
    return Shortage(
        f"layout {layout}: {who} predicted to hold {needed:.1f} GiB, {least:.1f} at the least, but {limit.name} is "
        f"{limit.gib:.1f} GiB{'' if certain else ', so that they may fail'}: {', or '.join(ways)}",
        certain,
    )


@dataclass(frozen=True)
class _Limit:
    """GiB that ranks may hold, by whose word; `lasting`: nothing but another machine would change it."""

    name: str
    gib: float
    lasting: bool = True


@dataclass
class _Held:
    """GiB that ranks hold: their `own` states and activations, and `besides` buffers and libraries."""

    own: float = 0.0
    besides: float = 0.0

    @classmethod
    def by(cls, stage: MemoryParts) -> _Held:
        """What a rank of a stage holds."""
        besides = stage.buffers + stage.context
        return cls(stage.total - besides, besides)


def _by_machine(case: Case, layout: Layout, stages: tuple[MemoryParts, ...], *, here: bool) -> list[_Held]:
    """What the ranks of each machine hold together, their libraries once, which they share."""
    cluster = case.cluster
    held: dict[int, _Held] = {}
    for rank, place in enumerate(places(layout, cluster)):
        machine = 0 if here else place.device // (cluster.devices_per_host or cluster.devices_per_machine)
        stage = stages[layout.coordinate("pp", rank)]
        together = held.setdefault(machine, _Held(besides=stage.context))
        together.own += _Held.by(stage).own
        together.besides += stage.buffers
    return list(held.values())


def _of_machine(case: Case, *, here: bool) -> Iterator[_Limit]:
    """What a machine has for its ranks."""
    if case.cluster.host_mem_gib:
        yield _Limit("host_mem_gib", case.cluster.host_mem_gib)
    if here:
        yield _Limit("this machine's memory with its swap", memory_gib() + swap_bytes() / GIB)
        left = (free_memory_bytes() + swap_bytes(free=True)) / GIB
        yield _Limit("what is left of this machine's memory now", left, lasting=False)


def _ways_out(layout: Layout) -> list[str]:
    """What would have a layout's ranks hold less."""
    ways = []
    if layout.recompute != "full":
        ways.append("recompute more (recompute-full)")
    if layout.zero_stage < 3 and layout.fold("replicate", "shard", "cp") > 1:
        ways.append(f"share states out (ZeRO stage {layout.zero_stage}: fsdp)")
    if layout.mbs > 1:
        ways.append(f"lower mbs {layout.mbs}")
    return [*ways, "take more devices or a smaller model"]
