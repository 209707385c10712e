"""What a sweep says of the time that is left."""

from __future__ import annotations

import pytest

from trimaran.bench.sweep import Progress
from trimaran.cli.live_progress import TrialProgress
from trimaran.layout.notation import parse_layout
from trimaran.nouns.measurement import Measurement

ROW = Measurement.model_validate(
    {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 32, "vocab": 256, "mbs": 1, "gbs": 8, "wall_s": 10.0}
)


@pytest.mark.parametrize(("at_once", "left"), [(1, "about 40 s left"), (4, "about 10 s left"), (3, "about 20 s left")])
def test_trials_that_run_side_by_side_are_over_sooner(
    at_once: int, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four at once were said to take four times as long as they do."""
    event = Progress(
        "finished", parse_layout("dp1,mbs1"), "", done=1, total=5, steps_done=6, steps=6, measurement=ROW,
        remaining_s=None, at_once=at_once,
    )  # fmt: skip
    TrialProgress(5)(event)
    assert left in capsys.readouterr().err
