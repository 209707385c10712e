"""What counts as a sign of a rank's life, by a clock that the test sets."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from trimaran.bench.watch import pulse as pulses
from trimaran.bench.watch.limits import Limits
from trimaran.bench.watch.pulse import Pulse
from trimaran.protocol.phases import Heartbeat, RankPhase


@pytest.mark.parametrize("phase", ["build", "resume"])
def test_ranks_wait_for_the_one_that_still_builds_or_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """Stages of a mixture of experts differ in how long their first weights take; all meet once they have them."""
    now = 0.0
    monkeypatch.setattr(pulses, "time", SimpleNamespace(monotonic=lambda: now))
    pulse, ranks, limits = Pulse(tmp_path, 2), [0, 1], Limits(start_s=180)
    for rank in ranks:
        (tmp_path / f"heartbeat.{rank}").write_text(phase)
    for now in (0.0, 170.0, 340.0, 510.0):
        os.utime(tmp_path / "heartbeat.1", (now, now))
        pulse.observe()
        assert pulse.silent(ranks, limits) is None
    now = 691.0
    pulse.observe()
    told = pulse.silent(ranks, limits)
    assert told is not None and told.rank == 0
    assert f"gave no sign for 181.0 s before its first step, since it began to {phase}" in told.sentence


def test_what_was_profiled_is_written_down_in_peace_and_is_no_measure_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(pulses, "time", SimpleNamespace(monotonic=lambda: now))
    pulse, ranks, limits = Pulse(tmp_path, 2), [0, 1], Limits(start_s=180, hang_s=10, hang_steps=3)
    hearts = [Heartbeat(tmp_path / f"heartbeat.{rank}") for rank in ranks]

    def enter(phase: RankPhase) -> None:
        for rank, heart in enumerate(hearts):
            heart.enter(phase)
            os.utime(tmp_path / f"heartbeat.{rank}", (now, now))
        pulse.observe()

    for now in (1.0, 2.0, 3.0, 4.0):  # noqa: B007 - the clock that is set
        enter(RankPhase.STEP)
        with (tmp_path / "log.jsonl").open("a") as log:
            log.write("{}\n")
    now = 5.0
    enter(RankPhase.PROFILE)
    now = 184.0
    assert pulse.silent(ranks, limits) is None
    now = 186.0
    assert (told := pulse.silent(ranks, limits)) is not None and "180.0 s are allowed" in told.sentence
    enter(RankPhase.STEP)
    now = 197.0
    assert (told := pulse.silent(ranks, limits)) is not None and "10.0 s are allowed" in told.sentence


def test_a_rank_that_is_stopped_as_it_begins_is_no_slow_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it, silent too; ranks that are not stopped may take their time."""
    now = 0.0
    monkeypatch.setattr(pulses, "time", SimpleNamespace(monotonic=lambda: now))
    pulse, ranks, limits = Pulse(tmp_path, 3), [0, 1, 2], Limits(start_s=180, hang_s=10)
    (tmp_path / "heartbeat.0").write_text("connect")
    (tmp_path / "heartbeat.1").write_text("import_torch")
    for now in (5.0, 14.0):  # noqa: B007 - the clock that is set
        pulse.observe()
        assert pulse.silent(ranks, limits, lambda: (1,)) is None
    now = 16.0
    pulse.observe()
    assert pulse.silent(ranks, limits) is None
    silence = pulse.silent(ranks, limits, lambda: (1,))
    assert silence is not None and "rank 1 gave no sign for 11.0 s before its first step" in silence.sentence
    unheard = pulse.silent(ranks, limits, lambda: (2,))
    assert unheard is not None and unheard.rank == 2 and "10.0 s are allowed" in unheard.sentence


def test_lines_of_the_log_before_are_no_steps_of_a_training_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first step makes kernels and connections ready as any first step does."""
    now = 0.0
    monkeypatch.setattr(pulses, "time", SimpleNamespace(monotonic=lambda: now))
    pulse, ranks, limits = Pulse(tmp_path, 2), [0, 1], Limits(start_s=180, hang_s=10, hang_steps=3)
    for rank in ranks:
        (tmp_path / f"heartbeat.{rank}").write_text("resume")
    pulse.observe()
    (tmp_path / "log.jsonl").write_text("{}\n" * 7)
    for now, rank in ((20.0, 0), (21.0, 1)):  # noqa: B007 - the clock that is set
        pulse.observe()
        (tmp_path / f"heartbeat.{rank}").write_text("step")
    pulse.observe()
    now = 60.0
    pulse.observe()
    assert pulse.steps == 7 and pulse.silent(ranks, limits) is None
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write("{}\n" * 2)
    pulse.observe()
    silence = pulse.silent(ranks, limits)
    assert silence is not None and "after step 9; 10.0 s are allowed" in silence.sentence
