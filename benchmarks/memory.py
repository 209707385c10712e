"""Peak memory of the trainer's ranks beside the estimate, on this machine, over layouts of every kind.

    python benchmarks/memory.py [LAYOUT ..] [--runs DIR]

Each layout is a trial as `trimaran bench` runs it, of a model large enough that weights, optimizer state and
activations are most of a rank's memory. `--runs` keeps the probe's cluster file and finished trials for the next
time. Predicted and measured are the largest over the ranks. Writes benchmarks/results/memory.md, unless layouts are
named.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from pathlib import Path

from trimaran.bench.launch.local import LocalLauncher
from trimaran.bench.trial.trial import finished_before, prepare_trial, run_trial
from trimaran.bench.watch.limits import Limits
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.files.catalogue import load_stack
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import violations
from trimaran.nouns.model import Model
from trimaran.nouns.workload import Workload
from trimaran.protocol.host import processor_name
from trimaran.recipe.recipe import Recipe
from trimaran.recipe.sweep_settings import SweepSettings
from trimaran.study.workspace import Workspace

HERE = Path(__file__).parent
LAYOUTS = (
    "dp1,mbs1", "dp1,mbs4", "dp1,mbs8", "dp1,mbs8,recompute-full", "dp1,mbs8,recompute-selective", "dp1,mbs8,bf16",
    "dp1,mbs8,bf16_pure", "dp2,mbs1", "dp2,mbs4", "dp2,mbs4,recompute-full", "dp2,mbs4,zero1", "dp2,mbs2,zero2",
    "dp2,mbs2,fsdp", "dp2,mbs4,bf16,fsdp", "tp2,mbs4", "tp2,mbs8,sp", "tp2,mbs4,bf16", "pp2,mbs1", "pp2,mbs2,gpipe",
    "pp2,mbs4,bf16", "pp2,vpp2,mbs1", "pp2,mbs2,recompute-full", "dp2,mbs4,bf16,zero1",
)  # fmt: skip
GOAL = 0.10
RECIPE = Recipe(
    name="memory",
    workload=Workload(
        model=Model(layers=8, hidden=512, heads=8, vocab=8192, max_positions=256, activation="gelu"),
        seq_len=256,
        global_batch=8,
    ),
    stack=load_stack("trimaran"),
    sweep=SweepSettings(steps=3, warmup_steps=1),
)


def measured_gib(recipe: Recipe, place: Workspace, launcher: LocalLauncher, layout: str) -> tuple[float, float]:
    """Predicted and measured peak of the largest rank."""
    cluster = place.cluster(recipe)
    parsed = parse_layout(layout)
    trial = prepare_trial(recipe, cluster, parsed, data_dir=place.data(recipe), work_dir=place.trials)
    row = finished_before(trial) or run_trial(trial, launcher, Limits(timeout_s=600, hang_s=120))
    if row.mem_gib is None:
        raise SystemExit(f"{layout} ended as {row.status}: {row.evidence}")
    return estimate(Case.of(recipe.workload, cluster, recipe.stack), parsed).mem_gib, row.mem_gib


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("layouts", nargs="*", help="these alone; nothing is written down")
    arguments.add_argument("--runs", type=Path, default=None, help="folder of studies whose probe is to be used")
    options = arguments.parse_args()
    lines = ["| layout | predicted GiB | measured GiB | error |", "| --- | --: | --: | --: |"]
    errors = []
    with tempfile.TemporaryDirectory() as name, contextlib.closing(LocalLauncher()) as launcher:
        place = Workspace((options.runs or Path(name)) / RECIPE.name)
        cluster = place.cluster(RECIPE)
        for layout in options.layouts or LAYOUTS:
            if broken := next(violations(parse_layout(layout), RECIPE.workload, cluster, RECIPE.stack), None):
                raise SystemExit(f"{layout}: {broken.sentence}")
            predicted, measured = measured_gib(RECIPE, place, launcher, layout)
            errors.append(predicted / measured - 1)
            lines.append(f"| {layout} | {predicted:.3f} | {measured:.3f} | {errors[-1]:+.1%} |")
            print(lines[-1], flush=True)
    within = sum(abs(error) <= GOAL for error in errors)
    mean, model = statistics.mean(map(abs, errors)), RECIPE.workload.model
    text = "\n\n".join(
        (
            f"# Memory of the largest rank, predicted and measured\n\nOn {processor_name()}; {model.layers} layers, "
            f"hidden {model.hidden}, vocabulary {model.vocab}, sequence {RECIPE.workload.seq_len}, "
            f"{RECIPE.workload.global_batch} sequences a step. Made by `python benchmarks/memory.py`.",
            "\n".join(lines),
            f"{within} of {len(errors)} layouts are within {GOAL:.0%}; mean error {mean:.1%}.",
        )
    )
    if not options.layouts:
        (HERE / "results" / "memory.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
