"""Two launched ranks on nodes of two names: one is killed, all that its node held is lost, and the training goes on."""

from __future__ import annotations

import hashlib
import shutil
import signal
import time
from pathlib import Path

import pytest

from command import tiny_recipe
from test_joining import PYTHON, losses, started_by_srun

SAVED_AT, MORE = 10, 10


@pytest.mark.proof
def test_a_lost_node_costs_the_steps_since_the_newest_snapshot(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    text = recipe.read_text()
    every = "decay_steps = 1000\ncheckpoint_every = 1000000\nsnapshot_seconds = 1e-6"

    def start(steps: int, runs: str, step: str, *options: str) -> tuple[tuple[int, int], str]:
        recipe.write_text(text.replace("steps = 12", f"steps = {steps}\n{every}"))
        command = [*PYTHON, "trimaran", "train", str(recipe), "--layout", "dp2,mbs2,zero1", "--runs", runs, *options]
        leader, other = started_by_srun(command, tmp_path, step, SLURMD_NODENAME="n2")
        if steps > 1000:
            deadline = time.monotonic() + 200
            # what nodes hold is of these ranks, and so are the notices then
            while not (held.exists() and '"held"' in notices.read_text()) and time.monotonic() < deadline:
                time.sleep(0.02)
            other.send_signal(signal.SIGKILL)
        _, errors = leader.communicate(timeout=200)
        other.communicate(timeout=200)
        return (leader.returncode, other.returncode), errors

    training = tmp_path / "runs/tiny"
    notices = training / "train/notices.jsonl"
    name = hashlib.sha256(str((training / "checkpoints").resolve()).encode()).hexdigest()[:16]
    held = Path("/dev/shm") / f"trimaran-held-{name}"
    codes, told = start(SAVED_AT, "runs", "1")
    assert codes == (0, 0) and not held.exists(), told
    codes, told = start(100_000, "runs", "2", "--resume")
    assert codes == (75, -signal.SIGKILL), told
    assert "is held in memory, by each node its own part" in told
    shutil.rmtree(held / "n2")
    step = newest(held)
    assert step > SAVED_AT and [path.name for path in (training / "checkpoints").iterdir()] == [f"step-{SAVED_AT:08d}"]
    codes, told = start(step + MORE, "runs", "3", "--resume")
    assert codes == (0, 0) and not held.exists(), told
    assert f"snapshot of step {step}, held in memory by" in told and f"going on from step {step} of" in told
    assert start(step + MORE, "own", "4")[0] == (0, 0)
    assert losses(training / "train") == losses(tmp_path / "own/tiny/train")


def newest(held: Path) -> int:
    """The newest step that a node still holds."""
    return max(int(path.name.removeprefix("step-")) for path in held.glob("*/step-*"))
