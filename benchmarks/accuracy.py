"""Predicted beside measured on this machine: 30 layouts of the laptop recipe on 1, 2 and 4 ranks.

    python benchmarks/accuracy.py [--folder runs/accuracy]

Probes the machine twice, once without and once with the recipe's model, predicts all layouts from either with no fit,
measures each in a random order twice by real trials, and scores. Then fits on 5 of them and scores the
other 25: on five stated ones, one of each kind, and on random fives. Wants a machine that does nothing else.
Interrupted, it goes on where it was; a new folder begins anew. Writes benchmarks/results/accuracy.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from _others import others_since
from trimaran.bench.sweep import Progress, run_sweep
from trimaran.bench.trial.machine import hardware
from trimaran.cost.calibration import Calibration
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.fit.fit_rows import fit_observations
from trimaran.cost.fit.solve import Observation
from trimaran.cost.score import Score, score
from trimaran.files.catalogue import load_cluster, write_atomically
from trimaran.files.recipe_file import load_recipe
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.variant import Variant
from trimaran.protocol.host import Work
from trimaran.recipe.recipe import Recipe
from trimaran.report.tables import Field, render
from trimaran.store import Store
from trimaran.study.torch_programs import run_program
from trimaran.study.workspace import Workspace

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "accuracy.md"
LAYOUTS = (
    "dp1,mbs1", "dp1,mbs2", "dp1,mbs4", "dp1,mbs8", "dp1,mbs4,recompute-full", "dp1,mbs8,recompute-full",
    "dp2,mbs1", "dp2,mbs2", "dp2,mbs4", "dp2,mbs4,recompute-full", "tp2,mbs1", "tp2,mbs2", "tp2,mbs4", "tp2,mbs8",
    "pp2,mbs1", "pp2,mbs2", "pp2,mbs4", "pp2,mbs2,gpipe", "pp2,mbs1,recompute-full",
    "dp4,mbs1", "dp4,mbs2", "tp4,mbs2", "tp4,mbs8", "pp4,mbs1", "dp2,tp2,mbs1", "dp2,tp2,mbs4", "dp2,pp2,mbs1",
    "dp2,pp2,mbs2", "tp2,pp2,mbs1", "tp2,pp2,mbs2",
)  # fmt: skip
# One of each kind of parallelism, and one with recompute: what a person would measure first.
FIRST_FIVE = ("dp1,mbs4", "dp2,mbs2", "tp2,mbs4", "pp2,mbs1", "dp2,tp2,mbs4")
RANDOM_FIVES = 50
ROUNDS = 2
STEPS, WARMUP_STEPS = 6, 2
MOST_RANKS = 4
SCORES = (
    Field("what", "What", left=True), Field("rows", "Layouts"), Field("mape", "MAPE", ".1f", "%"),
    Field("tau", "tau", ".2f"), Field("regret", "Regret", ".1f", "%"), Field("goal", "Goal", left=True),
)  # fmt: skip
LINES = (
    Field("layout", "Layout", left=True), Field("measured", "Measured", ".3f", " s"),
    Field("repeat", "Repeats", ".1f", "%"), Field("plain", "After probe", ".3f", " s"),
    Field("plain_off", "Off", "+.1f", "%"), Field("predicted", "After probe --model", ".3f", " s"),
    Field("off", "Off", "+.1f", "%"),
)  # fmt: skip


def extended(recipe: Recipe) -> Recipe:
    sweep = recipe.sweep.model_copy(update={"steps": STEPS, "warmup_steps": WARMUP_STEPS, "layouts": LAYOUTS})
    return recipe.model_copy(update={"sweep": sweep, "name": "accuracy"})


def probed(recipe: Recipe, place: Workspace) -> tuple[Cluster, Cluster]:
    """The machine as the full probe sees it: without a model, and with the recipe's at every micro-batch."""
    plain = place.folder / "plain.toml"
    slots = ["--slots", str(MOST_RANKS)]
    if not plain.exists():
        run_program("trimaran.probe", [*slots, "-o", str(plain)], "probe")
    if not place.cluster_file.exists():
        model = place.folder / "model.json"
        write_atomically(model, recipe.workload.model.model_dump_json())
        arguments = [*slots, "--model", str(model), "--seq-len", str(recipe.workload.seq_len)]
        for mbs in sorted({parse_layout(text).mbs for text in LAYOUTS}):
            arguments += ["--mbs", str(mbs)]
        run_program("trimaran.probe", [*arguments, "-o", str(place.cluster_file)], "probe")
    return load_cluster(str(plain)), load_cluster(str(place.cluster_file))


def measured(recipe: Recipe, cluster: Cluster, place: Workspace) -> dict[str, list[Measurement]]:
    """Rows of every layout, one a round. A round is a variant of its own, so that each is kept and none repeated."""
    order = list(recipe.sweep.layouts)
    data = place.data(recipe)
    rows: dict[str, list[Measurement]] = {text: [] for text in order}
    with Store(place.store) as store:
        for number in range(ROUNDS):
            np.random.default_rng(number).shuffle(order)
            # a variable that nothing reads tells the rounds apart
            variant = Variant(environment={"OMP_ROUND": str(number)})
            found = run_sweep(
                recipe, cluster, [parse_layout(text) for text in order], store, data_dir=data,
                work_dir=place.trials, variants=(variant,), on_progress=tell,
            )  # fmt: skip
            for text, row in zip(order, found, strict=True):
                rows[text].append(row)
    return rows


def tell(event: Progress) -> None:
    if event.measurement is not None:
        row = event.measurement
        left = f", {event.remaining_s:.0f} s left in this round" if event.remaining_s is not None else ""
        print(f"{event.done} of {event.total}: {event.layout}: {row.sec_per_it} s/it ({row.status}){left}", flush=True)


def predictions(
    recipe: Recipe, cluster: Cluster, layouts: Sequence[Layout], known: Calibration | None = None
) -> list[float]:
    return [estimate(Case.of(recipe.workload, cluster, recipe.stack, known), layout).sec_per_it for layout in layouts]


def after_fit(
    recipe: Recipe, cluster: Cluster, layouts: Sequence[Layout], seconds: Sequence[float], gib: Sequence[float | None],
    chosen: Sequence[int],
) -> Score:  # fmt: skip
    """Score of the layouts that the fit has not seen."""
    seen = [
        Observation(Case.of(recipe.workload, cluster, recipe.stack), layouts[i], seconds[i], gib[i], "") for i in chosen
    ]  # fmt: skip
    fitted = fit_observations(seen, [one.layout.label() for one in seen]).calibration
    others = [i for i in range(len(layouts)) if i not in set(chosen)]
    predicted = predictions(recipe, cluster, [layouts[i] for i in others], fitted)
    return score(predicted, [seconds[i] for i in others])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/accuracy"), help="where the study is kept")
    parser.add_argument("--results", type=Path, default=RESULTS, help="page to write")
    options = parser.parse_args()
    place = Workspace(options.folder)
    recipe = extended(load_recipe(str(HERE.parent / "recipes" / "laptop.toml")))
    started, began = time.monotonic(), Work.so_far()
    place.folder.mkdir(parents=True, exist_ok=True)
    plain, cluster = probed(recipe, place)
    rows = measured(recipe, cluster, place)
    wall_min, others = (time.monotonic() - started) / 60, others_since(began)

    texts = [text for text in LAYOUTS if all(row.status == "ok" for row in rows[text])]
    layouts = [parse_layout(text) for text in texts]
    seconds = [statistics.median(row.sec_per_it or 0.0 for row in rows[text]) for text in texts]
    repeat = [max(r.sec_per_it or 0 for r in rows[t]) / min(r.sec_per_it or 1 for r in rows[t]) - 1 for t in texts]
    gib = [rows[text][-1].mem_gib for text in texts]
    unshaped, whole = (predictions(recipe, known, layouts) for known in (plain, cluster))
    products = predictions(recipe, cluster.model_copy(update={"models": ()}), layouts)
    first = after_fit(recipe, cluster, layouts, seconds, gib, [texts.index(t) for t in FIRST_FIVE if t in texts])
    draw = np.random.default_rng(0)
    fives = [
        after_fit(recipe, cluster, layouts, seconds, gib, draw.choice(len(texts), 5, replace=False).tolist())
        for _ in range(RANDOM_FIVES)
    ]

    scores = [
        {"what": "after probe, no fit", **_cells(score(unshaped, seconds)), "goal": "MAPE 4.0%, tau 0.8, regret 3%"},
        {"what": "after probe --model, without its whole layers and head", **_cells(score(products, seconds)),
         "goal": ""},
        {"what": "after probe --model, no fit", **_cells(score(whole, seconds)), "goal": "MAPE 3.5%"},
        {"what": f"after it and a fit on {', '.join(FIRST_FIVE)}", **_cells(first), "goal": "MAPE 5%"},
        {"what": f"after it and a fit on a random five, median of {RANDOM_FIVES}",
         **_cells(sorted(fives, key=lambda s: s.mape)[len(fives) // 2]), "goal": "MAPE 5%"},
        {"what": "after it and a fit on a random five, worst in ten",
         **_cells(sorted(fives, key=lambda s: s.mape)[9 * len(fives) // 10]), "goal": ""},
    ]  # fmt: skip
    lines = [
        {
            "layout": text,
            "measured": s,
            "repeat": 100 * again,
            "plain": u,
            "plain_off": 100 * (u / s - 1),
            "predicted": p,
            "off": 100 * (p / s - 1),
        }
        for text, s, again, u, p in zip(texts, seconds, repeat, unshaped, whole, strict=True)
    ]
    failed = [text for text in LAYOUTS if text not in texts]
    report = "\n".join(
        [
            "# Predicted beside measured on one machine\n",
            f"`python benchmarks/accuracy.py` on {hardware()}; {len(texts)} layouts, {ROUNDS} trials each of {STEPS} "
            f"steps, {wall_min:.0f} min in all. The two trials of a layout differ by {statistics.median(repeat):.1%} "
            f"(median). {others}\n",
            render(scores, SCORES, "markdown"),
            "",
            render(lines, LINES, "markdown"),
            *([f"\nDid not run: {', '.join(failed)}"] if failed else []),
        ]
    )
    write_atomically(options.results, report + "\n")
    print(report)
    if failed:
        sys.exit(f"{len(failed)} layouts did not run")


def _cells(found: Score) -> dict[str, float | int | None]:
    return {
        "rows": found.rows,
        "mape": 100 * found.mape,
        "tau": found.tau,
        "regret": None if found.regret is None else 100 * found.regret,
    }


if __name__ == "__main__":
    main()
