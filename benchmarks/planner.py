"""Speed of the planner: layouts ranked and simulated a second, how far the two are apart, wall time and memory.

Run by `make bench`; writes benchmarks/results/planner.md.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from trimaran.api import workload_of
from trimaran.cost.calibration import resolve_calibration
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate_many, simulated_many
from trimaran.cost.grid import LayoutGrid
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.planner.planner import SIMULATED, plan, searched
from trimaran.planner.search.settings import settings_from

REPEATS = 5
RESULTS = Path(__file__).parent / "results" / "planner.md"
COMMANDS = {
    "BLOOM 176B on 384 A100": [
        "--model",
        "bloom-176b",
        "--cluster",
        "jean-zay-a100-80gb",
        "--gbs",
        "2048",
        "--devices",
        "384",
    ],
    "GPT 1T on 25,600 H100": ["--model", "gpt-1t", "--cluster", "dgx-h100", "--gbs", "3072", "--devices", "25600"],
}
MIXTURES = {
    "DeepSeek-V3 on 2,048 H100": ["--model", "deepseek-v3", "--cluster", "dgx-h100", "--gbs", "15360", "--seq-len",
                                  "4096", "--devices", "2048"],
    "Qwen3-235B on 256 H100": ["--model", "qwen3-235b-a22b", "--cluster", "dgx-h100", "--gbs", "2048", "--seq-len",
                               "4096", "--devices", "256"],
    "Qwen3-235B on 256 H100, 131,072 tokens": ["--model", "qwen3-235b-a22b", "--cluster", "dgx-h100", "--gbs", "64",
                                               "--seq-len", "131072", "--devices", "256"],
}  # fmt: skip
_GOALS = ("1 s", "3 s, 500 MB")


def layouts_a_second() -> list[str]:
    """The closed form on one core, on layouts that all differ and are in random order."""
    workload = workload_of("bloom-176b", 2048)
    cluster, stack = load_cluster("jean-zay-a100-80gb"), load_stack("megatron")
    known = resolve_calibration(cluster, stack, None)
    random = np.random.default_rng(0)
    count = 300_000
    grid = LayoutGrid.build(
        workload, stack, dp=random.integers(1, 65, count), tp=random.choice([1, 2, 4, 7, 8, 14, 16], count),
        pp=random.integers(1, 71, count), mbs=random.integers(1, 33, count), zero_stage=random.integers(0, 2, count),
        recompute=random.integers(0, 3, count), placement=random.integers(0, 6, count),
        precision="bf16",
    )  # fmt: skip
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        estimate_many(Case.of(workload, cluster, stack, known), grid)
        seconds.append(time.perf_counter() - start)
    rate = count / float(np.median(seconds))
    return [f"| layouts predicted a second, closed form, every effect, one core | {rate:,.0f} | 300,000 |"]


def simulated() -> list[str]:
    """The best thousand by the closed form, simulated: seconds, and how far the closed form's time is from it."""
    rows = []
    questions = (("bloom-176b", "jean-zay-a100-80gb", 2048, 384), ("gpt-1t", "dgx-h100", 3072, 25_600))
    for model, cluster_name, gbs, devices in questions:
        for stack_name in ("trimaran", "megatron"):
            workload, stack = workload_of(model, gbs), load_stack(stack_name)
            settings = settings_from(devices=devices, top=SIMULATED)
            search, ranking = searched(Case.of(workload, load_cluster(cluster_name), stack), settings)
            case, grid = search.case, search.proposer.grid(ranking.rows)
            closed = estimate_many(case, grid)
            seconds = []
            for _ in range(REPEATS):
                start = time.perf_counter()
                played = simulated_many(case, grid, closed)
                seconds.append(time.perf_counter() - start)
            apart = np.abs(closed.sec_per_it / played.sec_per_it - 1.0)
            rows.append(
                f"| best {len(grid):,} simulated, {model}, stack {stack_name}: seconds; closed form apart from it, "
                f"median, largest | {np.median(seconds):.2f} s; {np.median(apart):.2%}, {apart.max():.1%} | 1 s; 3% |"
            )
    return rows


def wall_from_the_shell() -> list[str]:
    """Median wall seconds and peak memory of the command, started afresh, of a program that was compiled before."""
    rows = []
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    asked: list[tuple[str, list[str], str, tuple[str, ...]]] = [
        (*each, goal, ("trimaran", "megatron")) for each, goal in zip(COMMANDS.items(), _GOALS, strict=True)
    ]
    asked += [(*each, _GOALS[1], ("megatron-core",)) for each in MIXTURES.items()]
    for name, options, goal, stacks in asked:
        for stack in stacks:
            command = [sys.executable, "-m", "trimaran", "plan", *options, "--stack", stack, "--format", "json"]
            seconds = []
            for _ in range(REPEATS):
                start = time.perf_counter()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
                seconds.append(time.perf_counter() - start)
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
            rows.append(
                f"| `trimaran plan`, {name}, stack {stack}: wall; peak memory so far | "
                f"{np.median(seconds):.2f} s; {peak:.0f} MB | {goal} |"
            )
    return rows


def growth() -> list[str]:
    """Seconds of one plan as the cluster grows."""
    rows = ["", "| devices | model | seconds of one plan | layouts evaluated |", "| --: | --- | --: | --: |"]
    for devices in (1, 10, 100, 1_000, 10_000, 100_000):
        model = "gpt3-1b3" if devices < 100 else "gpt3-175b" if devices < 10_000 else "gpt-1t"
        workload = workload_of(model, 6144)
        seconds = []
        evaluated = 0
        for _ in range(3):
            start = time.perf_counter()
            cluster, stack = load_cluster("dgx-h100"), load_stack("megatron")
            evaluated = plan(workload, cluster, stack, devices=devices).evaluated
            seconds.append(time.perf_counter() - start)
        rows.append(f"| {devices:,} | {model} | {np.median(seconds):.3f} | {evaluated:,} |")
    return rows


def main() -> None:
    # One core, as the goals are stated.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    lines = ["# Speed of the planner", "", "| what | measured | goal |", "| --- | --: | --: |"]
    # The shell's part comes first: a child's peak memory counts the parent's at the fork.
    lines += [*wall_from_the_shell(), *layouts_a_second(), *simulated(), *growth()]
    text = "\n".join(lines)
    print(text)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
