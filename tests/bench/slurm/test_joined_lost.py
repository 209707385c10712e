"""Ranks that srun has started lose a node: their job is told to run again, and its next run goes on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from virtual_cluster import killed_node

from command import tiny_recipe
from trimaran.protocol.files import RunFile

STEPS = 150
# A job script as docs/training.md has it, which keeps the status of srun for the test to read.
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --exclusive --no-kill --open-mode=append
srun --ntasks-per-node=1 --kill-on-bad-exit {python} -m trimaran train {recipe} --layout dp2,mbs2 --resume
echo $? >> statuses
"""


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 250
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_a_job_whose_node_dies_is_to_run_again_and_goes_on(tmp_path: Path, slurm_conf: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("steps = 12", f"steps = {STEPS}\ncheckpoint_every = 10"))
    script, statuses, log = (tmp_path / name for name in ("job.sh", "statuses", "log"))
    script.write_text(SCRIPT.format(python=sys.executable, recipe=recipe))
    submit = ["sbatch", "--parsable", f"--output={log}", str(script)]
    train = tmp_path / "runs/tiny/train"
    notices = RunFile.NOTICES.of(train)

    subprocess.run(submit, check=True, cwd=tmp_path, capture_output=True)
    wait_until(lambda: notices.exists() and '"saved"' in notices.read_text())
    with killed_node(slurm_conf, "n2"):
        wait_until(statuses.exists)
    assert "the same command with --resume goes on from step " in log.read_text()
    subprocess.run(submit, check=True, cwd=tmp_path, capture_output=True)
    wait_until(lambda: len(statuses.read_text().split()) == 2)
    assert statuses.read_text().split() == ["75", "0"], log.read_text()
    assert len(RunFile.LOG.of(train).read_text().splitlines()) == STEPS
    assert json.loads(notices.read_text().splitlines()[0])["step"] >= 10, "it went on from a checkpoint"
