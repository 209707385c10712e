"""From a killed rank to the next step: `trimaran train` beside torchrun's restart of the same training.

    python benchmarks/recovery.py

Eight ranks train a tiny model; one of them is killed by signal 9 once a checkpoint is there. Timed is, in turns, from
the kill to the next new line of the log: on the same layout; on another, planned for seven devices after the same rank
was killed twice; and under `torchrun --max-restarts`, whose agent starts all ranks anew, which go on from the newest
checkpoint too. A further training shows what its checkpoints stop it for. Writes
benchmarks/results/recovery.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _others import others_since
from trimaran.bench.trial.machine import hardware
from trimaran.files.catalogue import dump_toml, load_stack, write_atomically
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.device import Device
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.model import Model
from trimaran.nouns.workload import Workload
from trimaran.protocol.files import RunFile
from trimaran.protocol.host import Work
from trimaran.recipe.data_settings import DataSettings
from trimaran.recipe.recipe import Recipe
from trimaran.recipe.train_settings import TrainSettings
from trimaran.report.tables import Field, render
from trimaran.study.train_recipe import layout_on
from trimaran.study.training.run import run_training
from trimaran.study.training.stopping import TrainingStoppedError
from trimaran.study.workspace import Workspace

RESULTS = Path(__file__).parent / "results" / "recovery.md"
RANKS, REPEATS = 8, 3
TEXT = "To be, or not to be, that is the question. " * 2000
# What `recipe_in` says, as a file.
RECIPE = """
name = "recovery"
stack = "trimaran"
cluster = "machine.toml"
[model]
layers = 2
hidden = 64
heads = 8
vocab = 384
max_positions = 64
[workload]
seq_len = 32
global_batch = 56
[data]
paths = ["text.txt"]
[train]
steps = 1000000
checkpoint_every = 20
track = []
"""
FIELDS = (
    Field("what", "From a killed rank to the next step", left=True), Field("seconds", "Median", ".2f", " s"),
    Field("least", "Least", ".2f", " s"), Field("most", "Most", ".2f", " s"),
)  # fmt: skip


def recipe_in(folder: Path, **train: object) -> Recipe:
    text = folder / "text.txt"
    text.write_text(TEXT)
    model = Model(layers=2, hidden=64, heads=8, vocab=384, max_positions=64)
    return Recipe(
        name="recovery",
        workload=Workload(model=model, seq_len=32, global_batch=56),
        stack=load_stack("trimaran"),
        data=DataSettings(paths=(str(text),)),
        train=TrainSettings.model_validate({"steps": 1_000_000, "checkpoint_every": 20, "track": (), **train}),
    )


def machine() -> Cluster:
    link = Link(bandwidth_gbps=10, latency_us=10)
    device = Device(kind="cpu", peak_tflops={"fp32": 0.1}, mem_gib=4, mem_bandwidth_gb_s=10, cores=1)
    return Cluster(nodes=1, device=device, devices_per_node=RANKS, intra=link, inter=link)


def ranks_in(folder: Path) -> dict[int, int]:
    """Process ids by rank of those whose error output goes to a file in `folder`."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            opened = (process / "fd" / "2").readlink()
            if opened.parent == folder and opened.name.startswith("stderr."):
                found[int(opened.name.removeprefix("stderr."))] = int(process.name)
    return found


class Kills:
    """Kills ranks of a training at stated moments and times how long the next step takes."""

    def __init__(self, out_dir: Path, kills: int, stop: Callable[[], None]) -> None:
        self._out_dir, self._left, self._stop = out_dir, kills, stop
        self._killed_at: float | None = None
        self._seen = 0
        self.seconds: list[float] = []

    def __call__(self, line: dict[str, object]) -> None:
        """Take a line of the log."""
        if self._killed_at is not None:
            if time.monotonic() - self._killed_at < 0.2:
                return  # a line from before the kill
            self.seconds.append(time.monotonic() - self._killed_at)
            self._killed_at = None
            self._seen = 0
            if not self._left:
                self._stop()
        self._seen += 1
        if self._left and self._seen == 30:
            self._left -= 1
            os.kill(ranks_in(self._out_dir)[RANKS - 1], signal.SIGKILL)
            self._killed_at = time.monotonic()


def ours(folder: Path, recipe: Recipe, kills: int) -> list[float]:
    """Seconds of each recovery of a training, whose last rank is killed `kills` times."""
    workspace, cluster, first = Workspace(folder), machine(), Layout(dp=RANKS)
    course = Kills(workspace.training, kills, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with contextlib.suppress(TrainingStoppedError):
        run_training(
            recipe, cluster, first, data_dir=workspace.data(recipe), out_dir=workspace.training, on_step=course,
            layout_on=lambda devices: layout_on(recipe, workspace, cluster, first, devices),
        )  # fmt: skip
    return course.seconds


def theirs(folder: Path) -> float:
    """Seconds that torchrun's agent takes, whose processes are the ranks and go on from the newest checkpoint."""
    folder.mkdir()
    (folder / "text.txt").write_text(TEXT)
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE)
    dump_toml(machine(), folder / "machine.toml")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command = [*torchrun, "--max-restarts=3", "-m", "trimaran", "train", str(recipe), "--layout", str(Layout(dp=RANKS))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    out_dir = folder / "runs" / "recovery" / "train"
    log, notices = RunFile.LOG.of(out_dir), RunFile.NOTICES.of(out_dir)
    with (folder / "torchrun.log").open("wb") as told:
        running = subprocess.Popen(command, cwd=folder, env=environment, stdout=told, stderr=told)
    try:
        _wait_for(lambda: notices.exists() and '"saved"' in notices.read_text(), running)
        os.kill(ranks_in(out_dir)[RANKS - 1], signal.SIGKILL)
        killed_at = time.monotonic()
        # the training that goes on begins a folder anew, and its log with the lines of the one before
        _wait_for(lambda: notices.exists() and '"resumed"' in notices.read_text(), running)
        begins = json.loads(notices.read_text().splitlines()[0])["step"]
        _wait_for(lambda: log.exists() and log.read_text().count("\n") > begins, running)
        return time.monotonic() - killed_at
    finally:
        running.terminate()
        running.wait()


def _wait_for(happened: Callable[[], bool], running: subprocess.Popen[bytes]) -> None:
    while not happened():
        if running.poll() is not None:
            sys.exit(f"torchrun has ended with {running.returncode}")
        time.sleep(0.01)


def stall(folder: Path) -> str:
    """What checkpoints stop a larger model's training for, at an interval of a second and of the default minutes."""
    recipe = recipe_in(folder, checkpoint_every=None, checkpoint_minutes=1 / 60, steps=400, restarts=0)
    model = Model(layers=4, hidden=512, heads=8, vocab=384, max_positions=64)
    recipe = recipe.model_copy(update={"workload": Workload(model=model, seq_len=32, global_batch=8)})
    told: list[str] = []
    workspace, seconds = Workspace(folder), list[float]()
    run_training(
        recipe, machine(), Layout(dp=2), data_dir=workspace.data(recipe), out_dir=workspace.training,
        on_step=lambda line: seconds.append(line["sec_per_it"]), on_notice=told.append,
    )  # fmt: skip
    saved = [json.loads(line) for line in RunFile.NOTICES.of(workspace.training).read_text().splitlines()]
    blocked = [notice["blocked_s"] for notice in saved if notice["kind"] == "saved"][:-1]
    writing = [notice["write_s"] for notice in saved if notice["kind"] == "saved"][:-1]
    share = sum(blocked) / (sum(blocked) + sum(seconds))
    mib = model.parameters * 12 / 2**20
    return (
        f"Checkpoints of {mib:.0f} MiB on two ranks, due every second: {len(blocked)} in {sum(seconds):.0f} s of "
        f"steps; each stopped it for {statistics.median(blocked):.3f} s in the median and was written beside the "
        f"steps in {statistics.median(writing):.2f} s: {share:.2%} of the time. At the default of 10 minutes that is "
        f"{statistics.median(blocked) / 600:.4%}."
    )


def main() -> None:
    began = Work.so_far()
    seen: dict[str, list[float]] = {}
    for number in range(REPEATS):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (same,) = ours(folder / "same", recipe_in(folder), kills=1)
            seldom = recipe_in(folder, checkpoint_every=1_000_000)
            _, another = ours(folder / "another", seldom, kills=2)
            restarted = theirs(folder / "theirs")
        for what, seconds in (("same", same), ("another", another), ("torchrun", restarted)):
            seen.setdefault(what, []).append(seconds)
        print(number, same, another, restarted, flush=True)
    with tempfile.TemporaryDirectory() as name:
        stalled = stall(Path(name))
    titles = {"same": "Trimaran, same layout", "another": "Trimaran, another layout, planned for 7 devices",
              "torchrun": "torchrun --max-restarts, same layout"}  # fmt: skip
    rows = [
        {"what": title, "seconds": statistics.median(seen[what]), "least": min(seen[what]), "most": max(seen[what])}
        for what, title in titles.items()
    ]
    report = "\n".join(
        [
            "# Recovery from a fault\n",
            f"`python benchmarks/recovery.py` on {hardware()}: {RANKS} ranks, one killed by signal 9; medians of "
            f"{REPEATS}, in turns. {others_since(began)}\n",
            render(rows, FIELDS, "markdown"),
            "\nRanks that lost another notice within a second; torchrun's agent looks every 0.1 s (its default) and "
            "starts all ranks with PyTorch to import again, where Trimaran forks them.\n",
            stalled,
        ]
    )
    write_atomically(RESULTS, report + "\n")
    print(report)


if __name__ == "__main__":
    main()
