"""A plan counts a restart and a checkpoint as the recipe's own training has measured them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from command import tiny_recipe
from trained_folder import DOWN_S, LOST, SAVE_S, SAVES, WAITED_S, trained_folder
from trimaran.cli.app import app
from trimaran.nouns.faults import Faults
from trimaran.planner.goodput.recovery import Recovery, with_measured
from trimaran.study.training.events import EVENTS, events_of
from trimaran.study.training.recovered import recovery_of


def test_a_training_tells_how_soon_faults_are_noticed_and_how_long_restarts_and_saves_take(tmp_path: Path) -> None:
    text = trained_folder(tmp_path).with_name(EVENTS).read_text()
    events, _ = events_of(text, EVENTS)
    found = recovery_of(events, "there")
    assert found is not None and (found.restarts, found.saves) == (1, SAVES)
    assert found.restart_s is not None and found.detect_s is not None
    went_on = next(event for event in events if event.event == "went_on")
    assert went_on.seconds is not None
    assert found.restart_s + found.detect_s == pytest.approx(went_on.seconds - WAITED_S) and found.save_s == SAVE_S
    assert DOWN_S <= went_on.seconds - WAITED_S <= DOWN_S + LOST, "the queue is no part of a restart"
    # of two faults in a row none says how long a restart takes
    crash = next(line for line in text.splitlines(keepends=True) if ",crash," in line)
    twice = recovery_of(events_of(text.replace(crash, crash * 2), EVENTS)[0], "there")
    assert twice is not None and twice.restart_s is None and twice.save_s == SAVE_S
    assert recovery_of(events[:1], "there") is None


def test_what_is_stated_stands() -> None:
    known = Recovery(source="there", restarts=3, detect_s=2.0, restart_s=5.0, saves=4, save_s=0.5)
    stated = Faults(faults=1, days=1, devices=1, restart_s=60, save_s=1)
    assert with_measured(stated, known) == (stated, ())
    half, told = with_measured(Faults(faults=1, days=1, devices=1, detect_s=30, load_s=7), known)
    assert (half.detect_s, half.restart_s, half.load_s, half.save_s) == (30, 5.0, 0.0, 0.5)
    assert len(told) == 2 and "the median of 3 in there" in told[0] and "the median of 4 in there" in told[1]


@pytest.mark.proof
def test_a_plan_counts_what_its_recipe_s_training_measured(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    faults = tmp_path / "mine.toml"
    faults.write_text("faults = 10\ndays = 1\ndevices = 2\n")
    asked = ["plan", str(recipe), "--runs", str(tmp_path / "runs"), "--tokens", "1e12", "--faults", str(faults)]

    def answer(*more: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, [*asked, "--format", "json", *more])
        assert done.exit_code == 0, done.output
        found: dict[str, Any] = json.loads(done.stdout)["goodput"]
        return found

    before = answer()
    assert before["measured"] == [] and any("a restart takes 15 minutes" in told for told in before["assumptions"])
    folder = trained_folder(tmp_path / "runs/tiny")
    after = answer()
    assert after["restarts"] < before["restarts"] / 5 and not any("15 min" in told for told in after["assumptions"])
    assert after["measured"][0].startswith("a restart takes ") and "the median of 1 in " in after["measured"][0]
    told = CliRunner().invoke(app, asked).stdout
    assert f"  measured: a checkpoint stops the training for {SAVE_S} s, the median of {SAVES} in " in told
    # of another cluster or model nothing was measured there, and what cannot be read says nothing
    assert answer("--cluster", str(tmp_path / "machine.toml"))["measured"] == []
    assert answer("--model", "gpt3-125m", "--gbs", "8")["measured"] == []
    folder.with_name(EVENTS).write_text("no,events\n1,2\n")
    assert answer()["measured"] == []
