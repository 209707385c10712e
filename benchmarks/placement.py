"""Placements on the five clusters that DT-FM states, against its objective, the order of devices and random ones.

DT-FM (Yuan et al., arXiv 2206.01288, section 3) weighs a placement by communication alone: of the devices of each stage
the one that takes longest to exchange gradients with the others, and the shortest path over all stages, whose steps
cost the slowest pair of the best matching between two stages. It is searched by an evolutionary search. Here that
objective's best placement is found so, and judged by this project's own simulator beside the one that `place` finds.

    python benchmarks/placement.py            # writes benchmarks/results/placement.md
    python benchmarks/placement.py --quick    # one shape, one batch, prints
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from trimaran.cost.case import Case
from trimaran.cost.placed.topology import Topology
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.node_group import GroupLink, NodeGroup
from trimaran.nouns.workload import Workload
from trimaran.planner.placement.place import Placing
from trimaran.planner.planner import plan

CASES = ("dtfm-on-demand", "dtfm-spot", "dtfm-two-universities", "dtfm-four-regions", "dtfm-world")
LAYERS, BATCHES = (24, 32, 40), (1024, 2048, 4096)
LAYOUT = parse_layout("dp8,pp8,mbs1,fp16,recompute-full,gpipe")
RESULTS = Path(__file__).parent / "results" / "placement.md"
POPULATION, OFFSPRING = 30, 500
Floats = NDArray[np.floating]


class Objective:
    """DT-FM's objective over a split of devices into stages, and the placement that it means."""

    def __init__(self, topology: Topology, message_bits: float, gradient_bits: float) -> None:
        group, node = topology.group_of[topology.node_of], topology.node_of
        gbps, delay = topology.gbps[np.ix_(group, group)], topology.delay_us[np.ix_(group, group)] * 1e-6
        ports = np.array([kind.inter.bandwidth_gbps / kind.devices_per_node for kind in topology.kinds])[group]
        gbps = np.minimum(gbps, np.minimum.outer(ports, ports))
        inside = np.array([kind.intra.bandwidth_gbps for kind in topology.kinds])[group]
        same = node[:, None] == node[None, :]
        gbps = np.where(same, inside[:, None], gbps)
        delay = np.where(same, 0.0, delay)
        self.sends = 2.0 * (delay + message_bits / (gbps * 1e9))
        self.exchanges = 2.0 * (delay + gradient_bits / LAYOUT.dp / (gbps * 1e9))
        np.fill_diagonal(self.exchanges, 0.0)
        # devices alone on nodes of one group are alike, and so are those of one node
        alone = np.bincount(node)[node] == 1
        kinds = np.where(alone, -1 - group, node)
        self.kind = kinds.tolist()
        self.of_kind = {int(kind): int(np.flatnonzero(kinds == kind)[0]) for kind in np.unique(kinds)}
        self.known: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, tuple[int, ...]]] = {}

    def value(self, stages: Sequence[tuple[int, ...]]) -> float:
        """Seconds of communication: the slowest stage's exchange, and the path over the stages."""
        exchange = max(float(self.exchanges[np.ix_(stage, stage)].sum(axis=1).max()) for stage in stages)
        return exchange + self.path(stages)[0]

    def path(self, stages: Sequence[tuple[int, ...]]) -> tuple[float, list[int]]:
        """The shortest path over all stages, exactly, by Held and Karp's recurrence."""
        n = len(stages)
        step = np.zeros((n, n))
        for one in range(n):
            for other in range(one):
                step[one, other] = step[other, one] = self.matched(stages[one], stages[other])[0]
        best = {(1 << end, end): (0.0, -1) for end in range(n)}
        for seen in range(1, 1 << n):
            for end in range(n):
                if (seen, end) not in best:
                    continue
                length = best[seen, end][0]
                for after in range(n):
                    if seen >> after & 1:
                        continue
                    key = seen | 1 << after, after
                    there = length + step[end, after]
                    if key not in best or there < best[key][0]:
                        best[key] = there, end
        whole = (1 << n) - 1
        end = min(range(n), key=lambda last: best[whole, last][0])
        length, order, seen = best[whole, end][0], [], whole
        while end >= 0:
            order.append(end)
            seen, end = seen ^ 1 << end, best[seen, end][1]
        return length, order

    def matched(self, one: tuple[int, ...], other: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        """The matching of two stages whose slowest pair is fastest: its seconds, and whom each of `one` sends to."""
        kinds = tuple(self.kind[device] for device in one), tuple(self.kind[device] for device in other)
        if kinds not in self.known:
            sends = np.array([[self._send(first, second) for second in kinds[1]] for first in kinds[0]])
            levels = np.unique(sends)
            least, most = 0, len(levels) - 1
            while least < most:
                middle = (least + most) // 2
                rows, columns = linear_sum_assignment(sends > levels[middle])
                fits = not (sends > levels[middle])[rows, columns].any()
                least, most = (least, middle) if fits else (middle + 1, most)
            _, columns = linear_sum_assignment(sends > levels[least])
            self.known[kinds] = float(levels[least]), tuple(columns.tolist())
        seconds, places = self.known[kinds]
        return seconds, tuple(other[place] for place in places)

    def _send(self, one: int, other: int) -> float:
        """Seconds of a send between devices of two kinds, which are never the same device."""
        if one == other and one < 0:
            group = self.of_kind[one], next(d for d, k in enumerate(self.kind) if k == one and d != self.of_kind[one])
            return float(self.sends[group])
        return float(self.sends[self.of_kind[one], self.of_kind[other]])

    def devices(self, stages: Sequence[tuple[int, ...]]) -> NDArray[np.int64]:
        """The device of each replica's stage, shape (replicas, stages): along the path, each with its partner."""
        _, order = self.path(stages)
        columns = [list(stages[order[0]])]
        for before, after in pairwise(order):
            _, partners = self.matched(stages[before], stages[after])
            to = dict(zip(stages[before], partners, strict=True))
            columns.append([to[device] for device in columns[-1]])
        return np.array(columns).T


def evolve(objective: Objective, devices: int, seed: int = 0) -> list[tuple[int, ...]]:
    """The best split of an evolutionary search: children take stages of both parents and are improved by swaps."""
    random = np.random.default_rng(seed)
    stages, size = LAYOUT.pp, LAYOUT.dp

    def stage_of(some: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(some, key=lambda device: (objective.kind[device], device)))

    def split(order: NDArray[np.int64]) -> list[tuple[int, ...]]:
        return [stage_of(order[stage * size : (stage + 1) * size].tolist()) for stage in range(stages)]

    members = [split(random.permutation(devices)) for _ in range(POPULATION - 1)] + [split(np.arange(devices))]
    values = [objective.value(member) for member in members]
    for _ in range(OFFSPRING):
        one, other = (members[index] for index in random.choice(len(members), 2, replace=False))
        kept = [one[stage] for stage in random.choice(stages, stages // 2, replace=False)]
        taken = {device for stage in kept for device in stage}
        rest = [device for stage in other for device in stage if device not in taken]
        child = [*kept, *(stage_of(rest[at : at + size]) for at in range(0, len(rest), size))]
        value = objective.value(child)
        for _ in range(2):
            first, second = random.choice(stages, 2, replace=False)
            a, b = int(random.choice(child[first])), int(random.choice(child[second]))
            swapped = list(child)
            swapped[first] = stage_of({*child[first], b} - {a})
            swapped[second] = stage_of({*child[second], a} - {b})
            if (after := objective.value(swapped)) < value:
                child, value = swapped, after
        worst = int(np.argmax(values))
        if value < values[worst]:
            members[worst], values[worst] = child, value
    return members[int(np.argmin(values))]


def row(name: str, layers: int, batch: int, known: dict[tuple[str, int], NDArray[np.int64]]) -> list[str]:
    """One line of the table: a cluster, a shape and a batch."""
    model = load_model("gpt3-xl").model_copy(update={"layers": layers})
    workload = Workload(model=model, global_batch=batch, seq_len=2048)
    case = Case.of(workload, load_cluster(name), load_stack("gpipe"))
    began = time.process_time()
    placing = Placing(case, LAYOUT)
    placing.improve()
    found = placing.placed()
    took = time.process_time() - began
    cost = placing.cost
    if (name, layers) not in known:
        objective = Objective(cost.topology, cost.message_bits, cost.ring_bits / 2.0)
        known[name, layers] = objective.devices(evolve(objective, cost.topology.devices))
    theirs = cost.seconds(cost.topology.node_of[known[name, layers]])
    return [
        name, str(layers), str(batch), f"{found.seconds:.2f}", f"{theirs:.2f}", f"{found.in_order_s:.2f}",
        f"{found.random_s:.2f}", f"{found.random_s / found.seconds:.2f}", f"{found.least_s:.2f}", f"{took:.1f}",
    ]  # fmt: skip


def sixteen_sites() -> Cluster:
    """4,096 H100 on 16 sites of 32 nodes, links between the sites drawn from 25 to 200 Gbit/s and 0.5 to 40 ms."""
    like, random = load_cluster("dgx-h100"), np.random.default_rng(0)
    names = [f"site {index}" for index in range(16)]
    fields = {"device": like.device, "nodes": 32, "devices_per_node": 8, "intra": like.intra, "inter": like.inter}
    groups = [NodeGroup(name=name, **fields) for name in names]
    links = [
        GroupLink(
            between=pair,
            bandwidth_gbps=float(random.choice([25, 50, 100, 200])),
            latency_us=random.uniform(500, 40_000),
        )
        for pair in combinations(names, 2)
    ]
    return Cluster.of_groups(groups, links, name="sixteen sites")


def planned() -> list[list[str]]:
    """Whole plans, layouts and placements: cluster, what is planned, processor seconds, and what is said of it."""
    gpt = Workload(model=load_model("gpt3-xl"), global_batch=1024, seq_len=2048)
    llama = Workload(model=load_model("llama3-70b"), global_batch=2048, seq_len=8192)
    rows = []
    for workload, cluster, stack in (
        (gpt, load_cluster("dtfm-world"), "gpipe"),
        (llama, sixteen_sites(), "megatron-core"),
    ):
        began = time.process_time()
        found = plan(workload, cluster, load_stack(stack))
        took = time.process_time() - began
        note = next(note for note in found.notes if "a search put them" in note)
        rows.append([cluster.name, f"{workload.model.name} on {cluster.devices}", f"{took:.1f}", note])
        print(" | ".join(rows[-1]), flush=True)
    return rows


HEAD = (
    "cluster", "layers", "batch", "found, s", "DT-FM's objective, s", "in order, s", "random, s", "random / found",
    "no placement below, s", "searched, s",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape, one batch and the plans, printed")
    quick = parser.parse_args().quick
    known: dict[tuple[str, int], NDArray[np.int64]] = {}
    rows = []
    for name in CASES:
        for layers in LAYERS[:1] if quick else LAYERS:
            for batch in BATCHES[:1] if quick else BATCHES:
                rows.append(row(name, layers, batch, known))
                print(" | ".join(rows[-1]), flush=True)
    plans = planned()
    if quick:
        return
    lines = [f"| {' | '.join(cells)} |" for cells in (HEAD, ("--", *["--:"] * (len(HEAD) - 1)), *rows)]
    heads = ("cluster", "plan", "processor seconds", "found"), ("--", "--", "--:", "--")
    whole = [f"| {' | '.join(cells)} |" for cells in (*heads, *plans)]
    RESULTS.write_text(
        "# Placements on five clusters of 64 V100\n\n"
        "GPT-3 XL shapes of so many layers, 8 replicas of 8 stages, GPipe with micro-batches of 1 in fp16. Seconds of "
        "an iteration by this project's simulator: of the placement that it finds, of the best by DT-FM's objective "
        f"(an evolutionary search of {OFFSPRING} children), of ranks on the devices in their order, and of the median "
        "of 21 random placements. Written by `benchmarks/placement.py`.\n\n" + "\n".join(lines) + "\n\n"
        "## Whole plans\nLayouts and their placements, on one core.\n\n" + "\n".join(whole) + "\n"
    )


if __name__ == "__main__":
    main()
