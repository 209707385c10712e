"""What the harness adds to a trial: its wall time beside a bare torchrun of the same ranks and steps.

    python benchmarks/harness.py

Both train the same few steps of a tiny model, in turns, on 2, 4 and 8 ranks; sweeps of one trial and of three show
what a further trial takes. The rest of the time is taken apart by the phases that rank 0 writes down. Writes
benchmarks/results/harness.md.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _others import others_since
from trimaran.bench.sweep import run_sweep
from trimaran.bench.trial.machine import hardware
from trimaran.bench.trial.trial import prepare_trial
from trimaran.files.catalogue import load_stack, write_atomically
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.device import Device
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.model import Model
from trimaran.nouns.workload import Workload
from trimaran.protocol.host import Work
from trimaran.recipe.data_settings import DataSettings
from trimaran.recipe.recipe import Recipe
from trimaran.recipe.sweep_settings import SweepSettings
from trimaran.report.tables import Field, render
from trimaran.store import Store
from trimaran.study.workspace import Workspace

RESULTS = Path(__file__).parent / "results" / "harness.md"
RANKS = (2, 4, 8)
REPEATS = 3
FIELDS = (
    Field("ranks", "Ranks"), Field("bare", "torchrun", ".2f", " s"), Field("harness", "Harness", ".2f", " s"),
    Field("added", "Added", "+.2f", " s"), Field("further", "A further trial", ".2f", " s"),
    Field("connect", "Connect", ".2f", " s"), Field("build", "Build", ".2f", " s"),
    Field("steps", "Steps", ".2f", " s"), Field("rest", "Start, leave, look, store", ".2f", " s"),
)  # fmt: skip


def recipe_and_cluster(folder: Path) -> tuple[Recipe, Cluster]:
    text = folder / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 2000)
    model = Model(layers=2, hidden=64, heads=4, vocab=384, max_positions=64)
    recipe = Recipe(
        name="harness",
        workload=Workload(model=model, seq_len=32, global_batch=8),
        stack=load_stack("trimaran"),
        data=DataSettings(paths=(str(text),)),
        sweep=SweepSettings(steps=3, warmup_steps=1),
    )
    link = Link(bandwidth_gbps=10, latency_us=10)
    device = Device(kind="cpu", peak_tflops={"fp32": 0.1}, mem_gib=4, mem_bandwidth_gb_s=10, cores=1)
    return recipe, Cluster(nodes=1, device=device, devices_per_node=max(RANKS), intra=link, inter=link)


def bare_s(job: Path, ranks: int) -> float:
    """Seconds of torchrun with the trainer's own worker, from start to end."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    began = time.perf_counter()
    subprocess.run(
        [*torchrun, "-m", "trimaran.train.process.worker", str(job)], env=environment, check=True, capture_output=True
    )  # fmt: skip
    return time.perf_counter() - began


def look(ranks: int, folder: Path) -> dict[str, float]:
    """Medians of both, in turns, and where the harness's trial spent its time."""
    recipe, cluster = recipe_and_cluster(folder)
    place = Workspace(folder / "place")
    data, layout = place.data(recipe), Layout(dp=ranks)
    further = [layout, *(layout.model_copy(update={"recompute": way}) for way in ("selective", "full"))]
    trial = prepare_trial(recipe, cluster, layout, data_dir=data, work_dir=folder / "bare")
    Path(trial.job.out_dir).mkdir(parents=True)
    job = Path(trial.job.out_dir) / "job.json"
    job.write_text(trial.job.model_dump_json())
    seen: list[dict[str, float]] = []
    for number in range(REPEATS + 1):
        bare = bare_s(job, ranks)
        began = time.perf_counter()
        with Store(folder / f"{ranks}-{number}.sqlite") as store:
            work = folder / f"{ranks}-{number}"
            (row,) = run_sweep(recipe, cluster, [layout], store, data_dir=data, work_dir=work)
        wall = time.perf_counter() - began
        if row.status != "ok":
            sys.exit(row.evidence)
        began = time.perf_counter()
        with Store(folder / f"{ranks}-{number}-further.sqlite") as store:
            run_sweep(recipe, cluster, further, store, data_dir=data, work_dir=folder / f"{ranks}-{number}-further")
        three = time.perf_counter() - began
        phases = json.loads(next(work.glob("*/result.json")).read_text())["startup_s"]
        steps = sum(row.step_times_s)
        if number:  # the first look of each warms the disk's cache
            seen.append(
                {"bare": bare, "harness": wall, "added": wall - bare, "further": (three - wall) / (len(further) - 1),
                 "connect": phases["connect"], "build": phases["build"], "steps": steps,
                 "rest": wall - sum(phases.values()) - steps}
            )  # fmt: skip
    return {name: statistics.median(one[name] for one in seen) for name in seen[0]}


def main() -> None:
    lines = []
    began = Work.so_far()
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            lines.append({"ranks": ranks, **look(ranks, Path(folder))})
        print(lines[-1], flush=True)
    report = "\n".join(
        [
            "# What the harness adds to a trial\n",
            f"`python benchmarks/harness.py` on {hardware()}; medians of {REPEATS} trials of 3 steps, in turns. "
            f"{others_since(began)}\n",
            render(lines, FIELDS, "markdown"),
            "\nA sweep imports PyTorch once, in a process that runs nothing and from which the ranks of all its trials "
            "are forked: the first trial pays for it, a further one takes what its own column says. Connections are "
            "made anew each time. Ranks themselves are not kept: what a trial leaves in a process (allocator, caches, "
            "a broken communicator, a variable of its variant) would be the next trial's, and a trial that is killed "
            "would take the warm ranks with it.",
        ]
    )
    write_atomically(RESULTS, report + "\n")
    print(report)


if __name__ == "__main__":
    main()
