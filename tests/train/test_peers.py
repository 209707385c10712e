"""What benchmarks set beside our trainer: peers that need PyTorch alone train; others that are missing are named."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
NEED_PEERS = sorted(file for file in BENCHMARKS.rglob("*.py") if "Needs `make peers`" in file.read_text())
SMALL = {
    "layers": 2, "hidden": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, "ffn_hidden": 128, "vocab": 300,
    "max_positions": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def training() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("training")


@pytest.mark.proof
def test_every_peer_of_pytorch_alone_trains_the_layouts_of_its_page(
    training: ModuleType, data_dir: Path, tmp_path: Path
) -> None:
    ran = set()
    for part in training.PARTS.values():
        model = part.workload.model.model_copy(update=SMALL)
        workload = part.workload.model_copy(update={"model": model, "seq_len": 32})
        for contender in part.contenders:
            key = contender.program, contender.layout, part.precision
            if contender.program == training.TRIMARAN or contender.package != "torch" or key in ran:
                continue
            folder = tmp_path / str(len(ran))
            training.run(contender, dataclasses.replace(part, workload=workload), data_dir, folder, 8)
            losses = json.loads((folder / "result.json").read_text())["losses"]
            # batches differ, so that one step's loss says little
            assert len(losses) == 8 and 0 < fmean(losses[4:]) < fmean(losses[:4]), contender.name
            assert losses[0] < 1.1 * math.log(SMALL["vocab"]), contender.name
            ran.add(key)
    assert {(program, precision) for program, _, precision in ran} >= {
        (program, precision)
        for program in (training.PLAIN, training.NATIVE_PIPELINE)
        for precision in ("fp32", "bf16_pure")
    }


def one_line_of(file: Path, tmp_path: Path) -> None:
    """Run a benchmark of a checkout in which but one of the packages that it needs is installed."""
    copied = shutil.copytree(BENCHMARKS, tmp_path / "benchmarks", ignore=shutil.ignore_patterns("results"))
    (tmp_path / ".peers" / "megatron").mkdir(parents=True)
    program = [sys.executable, str(copied / file.relative_to(BENCHMARKS))]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=200, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"torchtitan: not installed in {tmp_path / '.peers'}; run `make peers` first\n"


def test_what_make_bench_begins_with_says_in_one_line_how_to_install_what_is_missing(tmp_path: Path) -> None:
    one_line_of(BENCHMARKS / "_peers.py", tmp_path)


@pytest.mark.proof  # each imports PyTorch anew
@pytest.mark.parametrize("file", NEED_PEERS, ids=lambda file: file.stem)
def test_so_does_each_benchmark_that_needs_peers(file: Path, tmp_path: Path) -> None:
    one_line_of(file, tmp_path)
