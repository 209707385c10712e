"""Programs that `benchmarks/training.py` sets beside our trainer, of those that need PyTorch alone: each trains."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SMALL = {
    "layers": 2, "hidden": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, "ffn_hidden": 128, "vocab": 300,
    "max_positions": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def training() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
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
            training.run(contender, dataclasses.replace(part, workload=workload), data_dir, folder, 4)
            losses = json.loads((folder / "result.json").read_text())["losses"]
            assert len(losses) == 4 and 0 < losses[-1] < losses[0] < 1.1 * math.log(SMALL["vocab"]), contender.name
            ran.add(key)
    assert {(program, precision) for program, _, precision in ran} >= {
        (program, precision)
        for program in (training.PLAIN, training.NATIVE_PIPELINE)
        for precision in ("fp32", "bf16_pure")
    }
