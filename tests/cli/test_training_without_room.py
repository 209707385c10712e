"""A training whose disk is full for a while goes on, and saves again once there is room."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from command import TRIMARAN, tiny_recipe
from small_disk import mounted

STEPS = 100


def wait_until_told(notices: Path, kind: str, running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while not (notices.exists() and f'"{kind}"' in notices.read_text()) and running.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.proof
def test_a_disk_that_is_full_while_a_checkpoint_is_written_does_not_end_the_training(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    text = recipe.read_text().replace("steps = 12\n", f"steps = {STEPS}\ncheckpoint_every = 5\nkeep_checkpoints = 1\n")
    recipe.write_text(text.replace("hidden = 32", "hidden = 128"))
    # a checkpoint has 5 MiB, and two lie there while the older one is not removed yet
    with mounted(tmp_path / "disk", "16m") as disk:
        filler = disk / "filler"
        command = [TRIMARAN, "train", str(recipe), "--layout", "dp2,mbs2", "--runs", str(disk / "runs")]
        running = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        checkpoints, notices = disk / "runs/tiny/checkpoints", disk / "runs/tiny/train/notices.jsonl"
        wait_until_told(notices, "saved", running)
        with filler.open("wb", buffering=0) as file:
            while (free := os.statvfs(disk).f_bavail * 4096) > 1 << 20:
                file.write(bytes(min(free - (1 << 19), 1 << 20)))
        wait_until_told(notices, "not_saved", running)
        filler.unlink()
        told = running.communicate(timeout=200)[1]
        assert running.returncode == 0, told
        assert "could not be written: rank" in told and "No space left on device; the training goes on" in told
        assert [folder.name for folder in checkpoints.iterdir()] == [f"step-{STEPS:08d}"]
        log = [json.loads(line) for line in (disk / "runs/tiny/train/log.jsonl").read_text().splitlines()]
        assert [line["iteration"] for line in log] == list(range(1, STEPS + 1)), "no line is lost"
