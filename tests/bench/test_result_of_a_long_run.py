"""The result of a training of half a million steps is believed, and a file that no run can have left is not."""

from __future__ import annotations

import json
from pathlib import Path

from trimaran.bench.trial.trial_figures import read_result
from trimaran.protocol.result import RunResult


def test_a_long_trainings_result_is_read_whole(tmp_path: Path) -> None:
    steps = 400_000
    seconds, losses = tuple(0.1234567890123 + n * 1e-9 for n in range(steps)), (3.14159265358979,) * steps
    result = RunResult(
        steps=steps, sec_per_it=seconds, losses=losses, grad_norms=losses, mem_gib_per_rank=(1.0,)
    )  # fmt: skip
    file = tmp_path / "result.json"
    file.write_text(json.dumps(result.model_dump(mode="json")))
    assert file.stat().st_size > 16 * 2**20
    assert read_result(file, steps) == result
    said = read_result(file, 100)
    assert said == "result.json is garbage: of 100 steps it is larger than 1.0 MiB"
