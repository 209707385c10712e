"""Document 003's network tables, scaled down to this machine: predicted beside measured.

    python benchmarks/network.py [--runs FOLDER]

Needs root on Linux (network namespaces), and a machine that does nothing else. Probes the machine, predicts every
trial of recipes/network-laptop.toml (GPipe) and recipes/network-ps-laptop.toml (parameter server) by what the probe
alone says (no fit), then measures it on a network that is shaped, and measured itself, before each trial. Also
measures what the switch carries of the same networks without scaling. Writes benchmarks/results/network.md.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from trimaran.bench.launch.network.measure import measure_links
from trimaran.bench.launch.network.switched import SwitchedNetwork
from trimaran.bench.sweep import Prediction, run_sweep
from trimaran.bench.trial.machine import hardware
from trimaran.cost.calibration import prior
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.score import mape
from trimaran.files.recipe_file import load_recipe
from trimaran.files.row_table import packaged_table
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.shaped_network import ShapedNetwork
from trimaran.recipe.recipe import Recipe
from trimaran.store import Store
from trimaran.study.stated import stated_layouts
from trimaran.study.workspace import Workspace

RECIPES = tuple(
    Path(__file__).parents[1] / "recipes" / name for name in ("network-laptop.toml", "network-ps-laptop.toml")
)
RESULTS = Path(__file__).parent / "results" / "network.md"
GOAL = 0.10
MEASURED_LINK = re.compile(r"link measured ([\d.e+-]+) ms, ([\d.e+-]+) Gbit/s")


def published(network: ShapedNetwork, row: Measurement) -> float | None:
    """Seconds of the document's row of the same network, replicas and way of summing gradients, if it has one."""
    for known in packaged_table("seeds").measurements:
        same_network = (known.network_delay_ms, known.network_gbps) == (network.latency_ms, network.bandwidth_gbps)
        replicated = ((known.dp or 1) > 1) == ((row.dp or 1) > 1)
        if (known.source or "").startswith("003_") and known.stack == "gpipe" and same_network and replicated:
            return known.sec_per_it
    return None


def measure(recipe: Recipe, workspace: Workspace) -> list[tuple[ShapedNetwork, Measurement]]:
    """Every layout of the recipe on every network of it."""
    cluster = workspace.cluster(recipe)
    data = workspace.data(recipe)
    layouts = stated_layouts(recipe)
    found = []
    with Store(workspace.store) as store:
        for network in recipe.sweep.networks:
            shaped = cluster.on(network)
            known = prior(shaped, recipe.stack)
            case = Case.of(recipe.workload, shaped, recipe.stack, known)
            estimates = {layout: estimate(case, layout) for layout in layouts}
            predictions = {
                layout: Prediction(sec_per_it=one.sec_per_it, mem_gib=one.reported_mem_gib)
                for layout, one in estimates.items()
            }
            rows = run_sweep(
                recipe, shaped, layouts, store, data_dir=data, work_dir=workspace.trials, predictions=predictions
            )
            found += [(network, row) for row in rows]
    return found


def unscaled(networks: Sequence[ShapedNetwork]) -> str:
    """What two nodes see of each network at its full rate, as Markdown."""
    lines = [
        "",
        "The same networks between two nodes at full rate, as the switch carries them:",
        "",
        "| network | asked for | measured | within 10% |",
        "| --- | --: | --: | :-- |",
    ]
    for network in networks:
        full = network.model_copy(update={"scale": 1.0})
        with closing(SwitchedNetwork(full, 2)) as switched:
            check = measure_links(switched)
        asked = f"{full.latency_ms:g} ms, {full.bandwidth_gbps:g} Gbit/s"
        found = f"{check.delay_ms:.3g} ms, {check.gbps:.3g} Gbit/s"
        lines.append(f"| {full.name} | {asked} | {found} | {'yes' if check.refusal is None else 'no'} |")
    return "\n".join(lines) + "\n"


def link_of(row: Measurement) -> str:
    """Delay and rate as they were measured before the trial."""
    told = MEASURED_LINK.search(row.notes or "")
    return f"{float(told[1]):.3g} ms, {float(told[2]) * 1e3:.4g} Mbit/s" if told else "-"


def report(found: list[tuple[ShapedNetwork, Measurement]]) -> str:
    """The table and its mean error, as Markdown."""
    lines = [
        "# Document 003's network tables, scaled down to one machine",
        "",
        f"{hardware()}. Recipes {' and '.join(path.name for path in RECIPES)}, after a probe, no fit.",
        f"Rates and payload are the document's divided by {found[0][0].scale:g}; delays are the document's.",
        "",
        "| network | layout | link asked for | link measured | predicted | measured | off | document 003 |",
        "| --- | --- | --: | --: | --: | --: | --: | --: |",
    ]
    predicted, measured = [], []
    for network, row in found:
        document = published(network, row)
        asked = f"{network.latency_ms:g} ms, {network.port_gbps * 1e3:.4g} Mbit/s"
        cells = [network.name, row.layout_label or "", asked, link_of(row)]
        if row.status == "ok" and row.sec_per_it and row.predicted_sec_per_it:
            predicted.append(row.predicted_sec_per_it)
            measured.append(row.sec_per_it)
            off = row.predicted_sec_per_it / row.sec_per_it - 1
            cells += [f"{row.predicted_sec_per_it:.2f} s", f"{row.sec_per_it:.2f} s", f"{off:+.1%}"]
        else:
            cells += ["-", f"{row.status}: {(row.evidence or '').splitlines()[0]}", "-"]
        cells.append("-" if document is None else f"{document:.2f} s")
        lines.append(f"| {' | '.join(cells)} |")
    if measured:
        lines += ["", f"Mean error of {len(measured)} rows: {mape(predicted, measured):.1%} (goal {GOAL:.0%})."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="keep cluster file and store here, and go on from them")
    folder = parser.parse_args().runs
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        print("network namespaces need root on Linux and /dev/net/tun: nothing was measured")
        return
    with tempfile.TemporaryDirectory() as fresh:
        recipes = [load_recipe(str(path)) for path in RECIPES]
        found = [
            pair for recipe in recipes for pair in measure(recipe, Workspace((folder or Path(fresh)) / recipe.name))
        ]
        text = report(found) + unscaled(recipes[0].sweep.networks)
    RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
