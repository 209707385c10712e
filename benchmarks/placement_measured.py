"""Found placements against random ones, on the networks of DT-FM scaled down to this machine: predicted and measured.

    python benchmarks/placement_measured.py [--runs FOLDER] [--cases NAME ...] [--turns 2]

Needs root on Linux (network namespaces), and a machine that does nothing else. Of each cluster of the catalogue eight
nodes are taken, as many of each group; they are network namespaces of this machine with the cluster's own delay
between every two, and its rates divided as the payload is, or further where all are fast: packets pass through the
cores that the ranks compute with, and the ways have to be what sets the pace. One layout is placed there by the
planner's search and at random, and trained in each place in turn. Also trains a pipeline of two nodes of which one has
half the other's speed, split evenly and by speed. Writes benchmarks/results/placement_measured.md; about 50 minutes, or
25 with one turn.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median

from trimaran.bench.sweep import Prediction, run_sweep
from trimaran.bench.trial.machine import hardware
from trimaran.cost.calibration import prior
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.score import mape
from trimaran.files.catalogue import load_cluster
from trimaran.files.recipe_file import load_recipe
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.node_group import ways_between
from trimaran.nouns.shaped_network import ShapedNetwork, ShapedNode, ShapedPair
from trimaran.planner.placement.place import place
from trimaran.recipe.recipe import Recipe
from trimaran.store import Store
from trimaran.study.workspace import Workspace

RECIPE = Path(__file__).parents[1] / "recipes" / "network-laptop.toml"
RESULTS = Path(__file__).parent / "results" / "placement_measured.md"
CASES = ("dtfm-on-demand", "dtfm-spot", "dtfm-two-universities", "dtfm-four-regions", "dtfm-world")
NODES, SCALE, RANDOM = 8, 64.0, 2
SLOWEST_GBPS = 0.02  # of the slowest way of a network at most
PLACED = "dp2,pp4,mbs1,gpipe,recompute-full"
# A stage on a node of half the speed takes a third of the layers where both are to take as long.
SPLITS = ("pp2,mbs1,gpipe,recompute-full,split8-4", "pp2,mbs1,gpipe,recompute-full,split6-6")
GOAL = 0.12


def shaped_like(cluster: Cluster) -> ShapedNetwork:
    """Eight nodes of a cluster, as many of each of its groups, as a network of this machine."""
    of_node = [group for group in cluster.groups for _ in range(NODES // len(cluster.groups))]
    ways = ways_between(cluster.groups, cluster.links)
    pairs = []
    for one, other in combinations(range(NODES), 2):
        link = cluster.inter
        if of_node:
            names = of_node[one].name, of_node[other].name
            link = of_node[one].inter if names[0] == names[1] else ways[names]
        pairs.append(
            ShapedPair(nodes=(one, other), latency_ms=link.latency_us * 1e-3, bandwidth_gbps=link.bandwidth_gbps)
        )
    rates = [pair.bandwidth_gbps for pair in pairs]
    scale = max(SCALE, min(rates) / SLOWEST_GBPS)
    return ShapedNetwork(
        name=cluster.name, latency_ms=pairs[0].latency_ms, bandwidth_gbps=max(rates), scale=scale, pairs=tuple(pairs)
    )


def scaled(recipe: Recipe, layers: int, steps: int) -> Recipe:
    """GPT-3 XL's micro-batches of one sequence, 8 MiB, are 128 KiB here: divided as the rates are."""
    model = recipe.workload.model.model_copy(
        update={"name": "gpt3-xl-64th", "layers": layers, "hidden": 256, "ffn_hidden": 1024}
    )
    workload = recipe.workload.model_copy(update={"model": model, "global_batch": 16})
    sweep = recipe.sweep.model_copy(update={"networks": (), "steps": steps, "warmup_steps": 1, "timeout_s": 400.0})
    return recipe.model_copy(update={"workload": workload, "sweep": sweep})


def predicted_s(recipe: Recipe, shaped: Cluster, layout: Layout) -> Prediction:
    """By what the probe alone says: no fit."""
    one = estimate(Case.of(recipe.workload, shaped, recipe.stack, prior(shaped, recipe.stack)), layout)
    return Prediction(sec_per_it=one.sec_per_it, mem_gib=one.reported_mem_gib)


def in_turns(
    recipe: Recipe, shaped: Cluster, layouts: Sequence[Layout], folder: Path, turns: int
) -> list[tuple[Layout, float, list[float]]]:
    """Each layout's predicted seconds, and those measured in every turn; a trial that failed adds none."""
    workspace = Workspace(folder)
    predictions = {layout: predicted_s(recipe, shaped, layout) for layout in layouts}
    data = workspace.data(recipe)
    measured: defaultdict[Layout, list[float]] = defaultdict(list)
    for turn in range(turns):
        with Store(folder / f"turn{turn}.sqlite") as store:
            rows = run_sweep(
                recipe, shaped, layouts, store,
                data_dir=data, work_dir=workspace.trials / f"turn{turn}", predictions=predictions,
            )  # fmt: skip
        for layout, row in zip(layouts, rows, strict=True):
            print(f"  {layout}: {row.status} {row.sec_per_it} {row.evidence or ''} {row.notes or ''}", flush=True)
            if row.status == "ok" and row.sec_per_it:
                measured[layout].append(row.sec_per_it)
    return [(layout, predictions[layout].sec_per_it or 0.0, measured[layout]) for layout in layouts]


def placements(recipe: Recipe, shaped: Cluster) -> list[Layout]:
    """The layout as the search places it, and at random."""
    layout = parse_layout(PLACED)
    found = place(Case.of(recipe.workload, shaped, recipe.stack, prior(shaped, recipe.stack)), layout)
    others = []
    for seed in range(RANDOM):
        devices = list(range(NODES))
        random.Random(seed).shuffle(devices)
        others.append(layout.model_copy(update={"placed": tuple(devices)}))
    return [found.layout, *others]


def table(found: Sequence[tuple[str, str, Layout, float, list[float]]]) -> str:
    """Every layout with what was predicted and measured of it, and the errors, as Markdown."""
    lines = [
        "# Placements on scaled networks, predicted and measured",
        "",
        f"{hardware()}. GPT-3 XL's shape, micro-batches and rates divided by {SCALE:g}, rates further where the "
        f"slowest would be above {SLOWEST_GBPS:g} Gbit/s, delays as they are, after a probe, no fit.",
        "",
        "| network | placement or split | layout | predicted | measured | off |",
        "| --- | --- | --- | --: | --: | --: |",
    ]
    known: list[tuple[float, float]] = []
    for network, kind, layout, predicted, measured in found:
        cells = [network, kind, f"`{layout}`", f"{predicted:.2f} s"]
        if measured:
            known.append((predicted, median(measured)))
            cells += [f"{median(measured):.2f} s", f"{predicted / median(measured) - 1:+.1%}"]
        else:
            cells += ["-", "-"]
        lines.append(f"| {' | '.join(cells)} |")
    if known:
        error = mape([p for p, _ in known], [m for _, m in known])
        lines += ["", f"Mean error of {len(known)} layouts: {error:.1%} (goal {GOAL:.0%})."]
    for network in dict.fromkeys(name for name, *_ in found):
        first, *others = [one for one in found if one[0] == network]
        if first[4] and all(one[4] for one in others):
            ahead = median(m for one in others for m in one[4]) / median(first[4])
            foreseen = median(one[3] for one in others) / first[3]
            lines += [
                "",
                f"{network}: {first[1]} is {ahead:.2f} times as fast as the others, predicted {foreseen:.2f}.",
            ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="keep the probed cluster and the stores here, and go on from them")
    parser.add_argument("--cases", nargs="*", default=CASES, help="clusters of the catalogue")
    parser.add_argument("--turns", type=int, default=2, help="how often each layout is trained")
    asked = parser.parse_args()
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        print("network namespaces need root on Linux and /dev/net/tun: nothing was measured")
        return
    with tempfile.TemporaryDirectory() as fresh:
        folder = asked.runs or Path(fresh)
        stated = load_recipe(str(RECIPE))
        recipe, halves = scaled(stated, 8, steps=3), scaled(stated, 12, steps=12)
        machine = Workspace(folder).cluster(halves, [parse_layout(text) for text in SPLITS])
        found = []
        for name in asked.cases:
            shaped = machine.model_copy(update={"devices_per_node": NODES}).on(shaped_like(load_cluster(name)))
            kinds = ["found", *(f"random {seed}" for seed in range(RANDOM))]
            trained = in_turns(recipe, shaped, placements(recipe, shaped), folder / name, asked.turns)
            found += [(name, kind, *one) for kind, one in zip(kinds, trained, strict=True)]
        slow = ShapedNetwork(
            name="half speed", latency_ms=1, bandwidth_gbps=1, nodes=(ShapedNode(node=1, cpu_share=0.5),)
        )
        splits = in_turns(
            halves, machine.on(slow), [parse_layout(text) for text in SPLITS], folder / "halves", asked.turns
        )
        kinds = ["split by speed", "split evenly"]
        found += [(slow.name, kind, *one) for kind, one in zip(kinds, splits, strict=True)]
    text = table(found)
    RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
