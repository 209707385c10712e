"""Four replicas that a network of 0.3 Gbps joins: exact sums beside compressed ones and local steps, measured.

    python benchmarks/slow_network.py [--times N] [--runs FOLDER]

Needs root on Linux (network namespaces). Probes the machine, predicts every layout of recipes/slow-network-laptop.toml
by what the probe alone says (no fit), and trains each of them N times, one after the other in turns, with the same
tokens at every step, from the same weights: those that BEGIN_STEPS steps of exact sums have made, at a higher rate, as
DiLoCo's authors begin (arXiv 2311.08105, section 3.1).
Writes losses, wall times and predicted times to benchmarks/results/slow_network.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from trimaran.bench.sweep import Prediction, run_sweep
from trimaran.bench.trial.machine import hardware
from trimaran.bench.trial.trial import prepare_trial
from trimaran.cost.calibration import prior
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.rank_work import rank_work
from trimaran.files.recipe_file import load_recipe
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.protocol.files import CHECKPOINT, CHECKPOINTS, RunFile
from trimaran.protocol.result import RunResult
from trimaran.recipe.recipe import Recipe
from trimaran.store import Store
from trimaran.study.stated import stated_layouts
from trimaran.study.training.run import run_training
from trimaran.study.workspace import Workspace

RECIPE = Path(__file__).parents[1] / "recipes" / "slow-network-laptop.toml"
RESULTS = Path(__file__).parent / "results" / "slow_network.md"
GOAL = 0.02
TIMES, TRIES = 1, 8
# What all layouts begin from, and the learning rates from there on.
BEGIN_STEPS, BEGIN_ON = 800, "dp2,mbs8"
RATE, LEAST_RATE = 3e-4, 3e-5
# DiLoCo's own outer optimizer, beside that of the recipe.
OUTER = {"outer_learning_rate": 0.7, "outer_momentum": 0.9}


@dataclass
class Trained:
    """What a layout was predicted to take, what a rank of it sends a step, and what its trainings showed."""

    layout: Layout
    recipe: Recipe
    predicted_s: float
    sent_mb: float
    step_s: list[float] = field(default_factory=list)
    all_steps_s: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    validation: float = 0.0
    evidence: str = ""

    @property
    def name(self) -> str:
        """The layout, and of local steps the outer optimizer's learning rate and momentum."""
        train = self.recipe.train
        outer = f", outer {train.outer_learning_rate:g}, {train.outer_momentum:g}" if self.layout.local_steps else ""
        return f"{self.layout}{outer}"


def begun(recipe: Recipe, workspace: Workspace) -> Recipe:
    """The recipe, from weights that were trained on this machine without a network between its ranks."""
    train = recipe.train.model_copy(
        update={"steps": BEGIN_STEPS, "eval_every": BEGIN_STEPS, "checkpoint_every": BEGIN_STEPS}
    )
    out = workspace.folder / "begun" / "train"
    checkpoints = out.with_name(CHECKPOINTS)
    if not any(checkpoints.glob(CHECKPOINT)):
        run_training(
            recipe.model_copy(update={"train": train}), workspace.cluster(recipe), parse_layout(BEGIN_ON),
            data_dir=workspace.data(recipe), out_dir=out,
        )  # fmt: skip
    update = {
        "init_from": str(next(checkpoints.glob(CHECKPOINT))),
        "learning_rate": RATE,
        "min_learning_rate": LEAST_RATE,
    }
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=update)})


def train_in_turns(recipe: Recipe, workspace: Workspace, times: int) -> list[Trained]:
    """Train every layout of the recipe so many times, in turns, and local steps by DiLoCo's optimizer too."""
    cluster = workspace.cluster(recipe).on(recipe.sweep.networks[0])
    case = Case.of(recipe.workload, cluster, recipe.stack, prior(cluster, recipe.stack))
    data = workspace.data(recipe)
    found = []
    by_paper = recipe.model_copy(update={"train": recipe.train.model_copy(update=OUTER)})
    layouts = stated_layouts(recipe)
    of_paper = next(layout for layout in layouts if layout.local_steps)
    for layout, made_by in (*((layout, recipe) for layout in layouts), (of_paper, by_paper)):
        work = rank_work(case, layout, 0)
        sums = max(layout.local_steps, 1)
        found.append(Trained(layout, made_by, estimate(case, layout).sec_per_it, work.sent["dp"] / sums / 1e6))
    for turn, (number, one) in product(range(times), enumerate(found)):
        # a store of its own: what a recipe says of the optimizers makes no other trial of a layout
        train_once(one, cluster, data, workspace.folder / f"turn-{turn}" / str(number))
    return found


def train_once(one: Trained, cluster: Cluster, data: Path, folder: Path) -> None:
    """Train a layout as its recipe says, in a folder of its own."""
    say = {one.layout: Prediction(sec_per_it=one.predicted_s, mem_gib=0.0)}
    with Store(folder / "store.db") as store:
        for _ in range(TRIES):
            # a network that is not as asked for while other programs run may be so a moment later
            (row,) = run_sweep(
                one.recipe, cluster, [one.layout], store, data_dir=data, work_dir=folder, predictions=say,
                retry=frozenset({"not_run"}),
            )  # fmt: skip
            if row.status != "not_run":
                break
    if row.status != "ok" or row.sec_per_it is None:
        one.evidence = f"{row.status}: {(row.evidence or '').splitlines()[0]}"
        return
    trial = prepare_trial(one.recipe, cluster, one.layout, data_dir=data, work_dir=folder)
    result = RunResult.model_validate_json(RunFile.RESULT.of(trial.job.out_dir).read_text())
    one.step_s.append(row.sec_per_it)
    one.others.append(row.others_share or 0.0)
    one.all_steps_s.append(sum(row.step_times_s))
    # the same each time: a training repeats bit for bit
    one.validation = result.validations[-1]["loss"] or 0.0
    print(f"{one.name}: {row.sec_per_it:.3f} s a step, validation loss {one.validation:.4f}", flush=True)


def report(recipe: Recipe, found: Iterable[Trained]) -> str:
    """The table, as Markdown."""
    exact, *rest = found
    network, train = recipe.sweep.networks[0], recipe.train
    others = [share for one in (exact, *rest) for share in one.others]
    tokens = train.steps * recipe.workload.tokens_per_step
    lines = [
        "# Four replicas on a slow network",
        "",
        f"{hardware()}. Recipe {RECIPE.name}: {recipe.workload.model.name}, {train.steps} steps, {tokens:,} tokens for "
        f"each layout, from weights that {BEGIN_STEPS} exact steps have made; every replica is a node on a switch of "
        f"{network.port_gbps:g} Gbit/s and {network.latency_ms:g} "
        f"ms. Each layout was trained {len(exact.step_s)} times, in turns; times are medians. Predicted after a probe, "
        f"no fit. Other programs took up to {max(others, default=0.0):.0%} of the cores' time beside them.",
        "",
        "`sent` is what a rank sends for a step's sums, in all-reduces. A step of local ones is the mean of a round's.",
        "",
        "| layout | sent a step | predicted | measured | off | all steps | of exact | validation loss | off exact |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for one in (exact, *rest):
        if one.evidence or not one.step_s:
            lines.append(f"| {one.name} | {one.sent_mb:.2f} MB | {one.predicted_s:.3f} s | {one.evidence} | | | | | |")
            continue
        step, whole = statistics.median(one.step_s), statistics.median(one.all_steps_s)
        share = whole / statistics.median(exact.all_steps_s) if exact.all_steps_s else 0.0
        off = one.validation / exact.validation - 1.0 if exact.validation else 0.0
        lines.append(
            f"| {one.name} | {one.sent_mb:.2f} MB | {one.predicted_s:.3f} s | {step:.3f} s | "
            f"{one.predicted_s / step - 1.0:+.0%} | {whole:.0f} s | {share:.0%} | {one.validation:.4f} | {off:+.2%} |"
        )
    outer = recipe.train.outer_momentum
    apart = [one for one in rest if one.layout.local_steps and one.recipe.train.outer_momentum == outer]
    apart = [one for one in apart if one.validation]
    worst = max((one.validation / exact.validation - 1.0 for one in apart), default=0.0)
    lines += [
        "",
        f"The recipe's local steps: validation loss at most {worst:+.2%} off that of exact sums (goal {GOAL:.0%}).",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=TIMES, help="trainings of each layout")
    parser.add_argument("--runs", type=Path, help="keep cluster file and trainings here, and go on from them")
    given = parser.parse_args()
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        print("network namespaces need root on Linux and /dev/net/tun: nothing was measured")
        return
    recipe = load_recipe(str(RECIPE))
    with tempfile.TemporaryDirectory() as fresh:
        workspace = Workspace((given.runs or Path(fresh)).resolve())
        found = train_in_turns(begun(recipe, workspace), workspace, given.times)
        text = report(recipe, found)
    RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
