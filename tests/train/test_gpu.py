"""On a CUDA device the trainer does what it does on the CPU. Skipped where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trimaran.recipe import TrainJob

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
on_a_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is at hand")


def losses(job: TrainJob) -> list[float]:
    path = Path(job.out_dir) / "job.json"
    path.write_text(job.model_dump_json())
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, "-m", "trimaran.train.worker", str(path)]
    subprocess.run(command, env={**os.environ, **place}, check=True, timeout=250)
    return json.loads((path.parent / "result.json").read_text())["losses"]


@pytest.mark.gpu
@on_a_device
@pytest.mark.parametrize("layout", ["dp1,mbs24", "dp1,mbs8,recompute-full", "dp1,mbs24,zero1"])
def test_a_device_s_loss_is_the_cpu_s(make_job: Callable[..., TrainJob], layout: str) -> None:
    on_cpu = losses(make_job(layout))
    assert losses(make_job(layout).model_copy(update={"device": "cuda"})) == pytest.approx(on_cpu, rel=1e-4)


@pytest.mark.gpu
@on_a_device
def test_a_checkpoint_of_a_device_goes_on_there_and_on_the_cpu(
    make_job: Callable[..., TrainJob], tmp_path: Path
) -> None:
    job = make_job("dp1,mbs24", steps=6, checkpoint_every=3).model_copy(update={"device": "cuda"})
    undisturbed = losses(job)
    first = job.model_copy(update={"steps": 3, "checkpoint_dir": str(tmp_path)})
    losses(first)
    resumed = first.model_copy(update={"steps": 6, "resume": True})
    on_cpu = resumed.model_copy(update={"device": "cpu"})
    assert losses(on_cpu) == pytest.approx(undisturbed[3:], rel=1e-4)


def test_the_benchmark_s_program_runs_at_a_small_size_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--smoke", "--steps", "6", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.iterdir()
    rows = [line for line in written.read_text().splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[0] for row in rows[1:]] == [
        "| plain PyTorch", "| plain PyTorch, torch.compile", "| Trimaran", "| Trimaran, recompute",
    ]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_benchmark_says_so_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "no CUDA device is at hand: nothing is measured\n"
    assert not list(tmp_path.iterdir())
