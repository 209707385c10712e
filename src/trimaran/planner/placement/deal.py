"""Deal: the micro-batches of each replica by the speed of the nodes and links that its pipeline stands on."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from trimaran.cost.case import Case
from trimaran.cost.grid import Ints
from trimaran.cost.placed.placed_cost import PlacedCost
from trimaran.layout.layout import Layout
from trimaran.layout.rules import violations
from trimaran.layout.schedule import NEEDS

# What a deal may break: the other rules do not read it.
_RULES = {"replica_batches", "unlike_replicas", "micro_batches"}


def may_be_dealt(case: Case, layout: Layout) -> bool:
    """Whether replicas of a layout may take unlike numbers of micro-batches, and there is something to deal out."""
    workload = case.workload
    if layout.dp == 1 or layout.replica_batches or workload.global_batch % (layout.dp * layout.mbs):
        return False
    as_many = layout.model_copy(update={"replica_batches": (layout.micro_batches(workload.global_batch),) * layout.dp})
    return not _RULES.intersection(broken.rule for broken in violations(as_many, workload, case.cluster, case.stack))


def dealt(cost: PlacedCost, nodes: Ints) -> tuple[int, ...]:
    """The micro-batches of each replica such that the last to be done is so as early as can be, cells on `nodes`.

    A turn more goes each time to the replica that is then done first, which is best for pipelines whose time grows with
    their micro-batches; how it grows is taken from two counts near those of an equal share. A turn is one micro-batch,
    of chunks in turns as many as there are stages.
    """
    layout, total = cost.layout, int(cost.batches.sum())
    needs = NEEDS[layout.schedule]
    turn, least = needs.turn(layout.pp), needs.least(layout.pp)
    share = total // layout.dp // turn * turn
    here, there = (_seconds(cost, nodes, count) for count in (share, share + turn))
    pace = [later - now for now, later in zip(here, there, strict=True)]
    none = [now - each * share / turn for now, each in zip(here, pace, strict=True)]
    turns = [least // turn] * layout.dp
    queue = [(none[replica] + (turns[replica] + 1) * pace[replica], replica) for replica in range(layout.dp)]
    heapq.heapify(queue)
    for _ in range(total // turn - sum(turns)):
        seconds, replica = queue[0]
        turns[replica] += 1
        heapq.heapreplace(queue, (seconds + pace[replica], replica))
    return tuple(turn * each for each in turns)


def pipeline_seconds(cost: PlacedCost, nodes: Ints, batches: Sequence[int]) -> float:
    """Seconds until the last replica has done its last backward, each with so many micro-batches."""
    return float(cost.replica_seconds(nodes, batches).max())


def _seconds(cost: PlacedCost, nodes: Ints, count: int) -> list[float]:
    each: list[float] = cost.replica_seconds(nodes, [count] * len(nodes)).tolist()
    return each
