"""The weights that a training begins with, and that one which goes on has no use for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from shapes import SMALL
from test_worker import run_ranks
from trimaran.protocol.job import TrainJob

MODEL = SMALL.model_copy(update={"layers": 2})


def test_a_training_goes_on_where_the_weights_that_it_began_with_are_gone(
    make_job: Callable[..., TrainJob], tmp_path: Path
) -> None:
    def train(steps: int, folder: str, **changes: object) -> list[tuple[int, str]]:
        job = make_job("dp2,mbs12", model=MODEL, steps=2, checkpoint_every=1, **changes)
        goes_on = {"checkpoint_dir": str(tmp_path / folder), "steps": steps, "resume": True}
        return [(run.returncode, run.stderr) for run in run_ranks(job.model_copy(update=goes_on), 2)]

    weights = tmp_path / "weights"
    assert [status for status, _ in train(1, "weights")] == [0, 0]
    assert [status for status, _ in train(1, "checkpoints", init_from=str(weights))] == [0, 0]
    shutil.rmtree(weights)
    assert train(2, "checkpoints", init_from=str(weights)) == [(0, ""), (0, "")]
    # where nothing was saved yet it begins with them all the same
    assert all(
        status == 2 and "does not exist: name a checkpoint" in told
        for status, told in train(1, "nothing", init_from=str(weights))
    )
