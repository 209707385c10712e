"""Under torchrun and Slurm the started processes are the ranks, and rank 0 alone speaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from command import run, tiny_recipe
from trimaran.bench.launch.joined import first_host, joined

PYTHON = (sys.executable, "-P", "-m")


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["lm_loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def torchrun(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    start = [*PYTHON, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trimaran", *command]
    return subprocess.run(start, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)


def test_torchrun_s_processes_are_the_ranks(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    done = torchrun("train", str(recipe), "--layout", "dp2,mbs2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("12 steps with dp2") == 1 and done.stderr.count("step 1 of 12") == 1
    assert run("train", str(recipe), "--layout", "dp2,mbs2", "--runs", "own", cwd=tmp_path).returncode == 0
    assert losses(tmp_path / "runs/tiny/train") == losses(tmp_path / "own/tiny/train")

    refused = torchrun("train", str(recipe), "--layout", "dp1,mbs4", cwd=tmp_path)
    assert refused.returncode
    assert refused.stderr.count("layout dp1,tp1,pp1,mbs4 needs 1 ranks, but 2 were started") == 1


def test_srun_s_processes_are_the_ranks(tmp_path: Path) -> None:
    """The variables are those that srun sets; the port follows from the job's number."""
    command = [*PYTHON, "trimaran", "train", str(tiny_recipe(tmp_path)), "--layout", "tp2,mbs4"]
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "node1",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in (1, 0)
    ]  # fmt: skip
    (silent, _), (told, errors) = (rank.communicate(timeout=200) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    assert silent == "" and told.startswith("12 steps with dp1,tp2")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node1", "node1"), ("a,b", "a"), ("gpu[003-007,009],login1", "gpu003"), ("r[1-2]n,x", "r1n")],
)
def test_ranks_meet_at_the_first_node(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_a_batch_script_without_srun_starts_its_own_ranks() -> None:
    assert joined({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None
