"""Time and memory of mixtures, long contexts and hybrid sharding, predicted beside measured on this machine.

    python benchmarks/accuracy_cp_ep.py [--folder runs/accuracy_cp_ep]

Two models: a mixture of 8 experts, 2 of them a token, and a Llama at 4,096 tokens. The machine is probed once, without
a model; layouts of 1 to 4 ranks are predicted with no fit and measured twice by real trials in a random order. A router
that is not trained sends some experts several times the mean: what the log of one process says of their loads is stated
for the layouts that deal experts out (`expert_imbalance`). A row's memory is that of its largest rank. Wants a machine
that does nothing else. Interrupted, it goes on where it was; a new folder begins anew. Writes
benchmarks/results/accuracy_cp_ep.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from accuracy import MOST_RANKS, measured
from trimaran.bench.trial.machine import hardware
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.score import score
from trimaran.files.catalogue import load_cluster, load_stack, write_atomically
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import violations
from trimaran.nouns.model import Model
from trimaran.nouns.workload import Workload
from trimaran.recipe.recipe import Recipe
from trimaran.recipe.sweep_settings import SweepSettings
from trimaran.report.tables import Field, render
from trimaran.study.torch_programs import run_program
from trimaran.study.workspace import Workspace

RESULTS = Path(__file__).parent / "results" / "accuracy_cp_ep.md"
MOST_OFF = 0.10
_LLAMA = {"layers": 4, "positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "vocab": 4096}
_MIXTURE = {"kv_heads": 2, "max_positions": 256, "experts": 8, "top_k": 2, "moe_ffn_hidden": 512}
_SWEEP = SweepSettings(steps=6, warmup_steps=2)


def _recipe(name: str, model: Model, global_batch: int, *layouts: str) -> Recipe:
    workload = Workload(model=model, seq_len=model.max_positions, global_batch=global_batch)
    sweep = _SWEEP.model_copy(update={"layouts": layouts})
    return Recipe(name=name, workload=workload, stack=load_stack("trimaran"), sweep=sweep)


RECIPES = (
    _recipe(
        "mixture",
        Model(hidden=384, heads=6, **_LLAMA, **_MIXTURE),
        8,
        "dp1,mbs4", "dp2,mbs4", "dp2,mbs4,ep2", "dp2,mbs2,ep2,zero1", "dp2,mbs4,ep2,recompute-full", "dp2,mbs4,etp2",
        "tp2,mbs4,sp,ep2,etp1", "pp2,mbs2", "dp2,pp2,mbs2,ep2", "dp4,mbs2,ep2,etp2", "dp4,mbs2,ep4",
        "dp4,shard2,mbs2,fsdp",
    ),
    _recipe(
        "long",
        Model(hidden=256, heads=4, ffn_hidden=704, max_positions=4096, **_LLAMA),
        4,
        "cp2,mbs1", "cp2,mbs1,cp-all_gather", "cp2,mbs1,cp-ulysses", "cp2,mbs2,recompute-full", "dp2,cp2,mbs1",
        "tp2,cp2,mbs1,sp", "cp2,pp2,mbs1", "cp4,mbs1", "dp2,cp2,mbs1,fsdp", "dp4,shard2,mbs1,zero2",
    ),
)  # fmt: skip
COLUMNS = (
    Field("of", "Model", left=True), Field("layout", "Layout", left=True), Field("seconds", "Measured", ".3f", " s"),
    Field("repeat", "Repeats", ".1f", "%"), Field("predicted", "Predicted", ".3f", " s"),
    Field("off", "Off", "+.1f", "%"), Field("gib", "Measured", ".3f", " GiB"),
    Field("predicted_gib", "Predicted", ".3f", " GiB"), Field("gib_off", "Off", "+.1f", "%"),
)  # fmt: skip


def imbalance(place: Workspace, ep: int) -> float:
    """What the busiest of `ep` ranks' experts are sent over the mean, by the logs of trials of one process."""
    lines = (line for log in place.trials.glob("dp1,tp1,pp1,*/log.jsonl") for line in log.read_text().splitlines())
    loads = np.array([load for line in lines if (load := json.loads(line)["expert_load"])])
    if not loads.size:
        return 1.0
    of_ranks = loads.reshape(*loads.shape[:2], ep, -1).mean(axis=3)
    return float(of_ranks.max(axis=2).mean())


@dataclass(frozen=True)
class Line:
    """One layout of a model: seconds, GiB of its largest rank, and by how many per cent its two trials differ."""

    of: str
    layout: str
    seconds: float
    repeat: float
    predicted: float
    gib: float
    predicted_gib: float

    def record(self) -> dict[str, object]:
        """The line as COLUMNS show it."""
        off, gib_off = self.predicted / self.seconds - 1, self.predicted_gib / self.gib - 1
        return {**asdict(self), "off": 100 * off, "gib_off": 100 * gib_off}


def lines_of(recipe: Recipe, folder: Path, plain: Path) -> list[Line]:
    """One line a layout, predicted from the probe alone."""
    place, cluster = Workspace(folder / recipe.name), load_cluster(str(plain))
    place.folder.mkdir(parents=True, exist_ok=True)
    for text in recipe.sweep.layouts:
        if broken := next(violations(parse_layout(text), recipe.workload, cluster, recipe.stack), None):
            raise SystemExit(f"{recipe.name}, {text}: {broken.sentence}")
    lines = []
    for text, trials in measured(recipe, cluster, place).items():
        seconds = [row.sec_per_it for row in trials if row.sec_per_it is not None]
        gib = [row.mem_gib for row in trials if row.mem_gib is not None]
        if len(seconds) < len(trials) or not gib:
            raise SystemExit(f"{recipe.name}, {text}: a trial ended as {', '.join(row.status for row in trials)}")
        layout = parse_layout(text)
        workload = recipe.workload.model_copy(update={"expert_imbalance": imbalance(place, layout.ep)})
        said = estimate(Case.of(workload, cluster, recipe.stack), layout)
        middle, repeat = statistics.median(seconds), 100 * (max(seconds) / min(seconds) - 1)
        lines.append(Line(recipe.name, text, middle, repeat, said.sec_per_it, max(gib), said.mem_gib))
    return lines


def summary(lines: list[Line]) -> str:
    """What all layouts together, and those of each model, say."""
    sentences = []
    for name in ("all", *(recipe.name for recipe in RECIPES)):
        some = [line for line in lines if name in ("all", line.of)]
        time = score([line.predicted for line in some], [line.seconds for line in some])
        memory = [abs(line.predicted_gib / line.gib - 1) for line in some]
        within = sum(off <= MOST_OFF for off in memory)
        sentences.append(
            f"* {name}, {len(some)} layouts: time {time.mape:.1%}, tau {time.tau:.2f} (goal 8%, 0.8); memory "
            f"{statistics.mean(memory):.1%}, {within} within {MOST_OFF:.0%} (goal 4%, all)"
        )
    return "\n".join(sentences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/accuracy_cp_ep"), help="where the studies are kept")
    options = parser.parse_args()
    plain = options.folder / "plain.toml"
    options.folder.mkdir(parents=True, exist_ok=True)
    if not plain.exists():
        run_program("trimaran.probe", ["--slots", str(MOST_RANKS), "-o", str(plain)], "probe")
    lines = [line for recipe in RECIPES for line in lines_of(recipe, options.folder, plain)]
    text = "\n\n".join(
        (
            "# Mixtures, long contexts and hybrid sharding: predicted beside measured",
            f"`python benchmarks/accuracy_cp_ep.py` on {hardware()}.",
            summary(lines),
            render([line.record() for line in lines], COLUMNS, "markdown"),
        )
    )
    write_atomically(RESULTS, text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
