"""What counts as a sign of a rank's life, by a clock that the test sets."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from trimaran.bench.watch import pulse as pulses
from trimaran.bench.watch.limits import Limits
from trimaran.bench.watch.pulse import Pulse


def test_ranks_that_resume_wait_for_the_one_that_still_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(pulses, "time", SimpleNamespace(monotonic=lambda: now))
    pulse, ranks, limits = Pulse(tmp_path, 2), [0, 1], Limits(start_s=180)
    for rank in ranks:
        (tmp_path / f"heartbeat.{rank}").write_text("resume")
    for now in (0.0, 170.0, 340.0, 510.0):
        os.utime(tmp_path / "heartbeat.1", (now, now))
        pulse.observe()
        assert pulse.silent(ranks, limits) is None
    now = 691.0
    pulse.observe()
    told = pulse.silent(ranks, limits)
    assert told is not None and told.rank == 0
    assert "gave no sign for 181.0 s before its first step, since it began to resume" in told.sentence
