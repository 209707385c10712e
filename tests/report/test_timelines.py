"""Timelines as trace and picture, simulated beside what two real ranks recorded."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from command import tiny_recipe
from trimaran.bench.recorded import read_timeline
from trimaran.cli.app import app
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.timeline import Event, Timeline
from trimaran.report.timelines import bubble_share, chrome_trace, write_timelines

QUESTION = ("--model", "gpt3-1b3", "--cluster", "dgx-h100", "--gbs", "8", "--runs", "unused")


def test_the_bubble_is_what_no_rank_works_in() -> None:
    events = (
        Event(rank=0, kind="forward", start_s=0, end_s=1, micro_batch=0, stage=0),
        Event(rank=1, kind="forward", start_s=1, end_s=2, micro_batch=0, stage=1),
        Event(rank=0, kind="wait", start_s=1, end_s=2),
    )
    assert bubble_share(Timeline(events=events, origin="simulated")) == 0.5


def test_a_trace_holds_every_event_once_in_microseconds(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    done = CliRunner().invoke(app, ["timeline", *QUESTION, "--layout", "pp4,mbs1", "-o", str(out)])
    assert done.exit_code == 0, done.output
    events = [event for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]
    for kind in ("forward", "backward"):
        seen = [(e["tid"], e["args"]["micro_batch"]) for e in events if e["cat"] == kind]
        assert sorted(seen) == [(2 * rank, m) for rank in range(4) for m in range(8)]
    for lane in {event["tid"] for event in events}:
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == lane)
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(mine)), "one rank does one thing at a time"


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_is_drawn(ending: str, tmp_path: Path) -> None:
    out = tmp_path / f"t.{ending}"
    layout = "pp4,mbs1,zero_bubble"
    done = CliRunner().invoke(app, ["timeline", *QUESTION, "--stack", "trimaran", "--layout", layout, "-o", str(out)])
    assert done.exit_code == 0, done.output
    start = out.read_bytes()[:100]
    assert start.startswith(b"\x89PNG") if ending == "png" else b"<?xml" in start


def test_two_real_ranks_record_what_they_do(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    out, runs = tmp_path / "t.json", tmp_path / "runs"
    arguments = ["timeline", str(recipe), "--runs", str(runs), "--layout", "pp2,mbs1", "--measure", "-o", str(out)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    measured = read_timeline(sorted(runs.glob("tiny/timelines/*/timeline.*.json")))
    done_by = {(e.rank, e.kind, e.micro_batch) for e in measured.events if e.kind in ("forward", "backward")}
    assert done_by == {(rank, kind, m) for rank in (0, 1) for kind in ("forward", "backward") for m in range(4)}
    assert {event.kind for event in measured.events} >= {"send", "wait", "reduce", "step"}
    ends = {(e.rank, e.kind, e.micro_batch): e for e in measured.events}
    for m in range(4):
        # what the second stage works on has left the first
        assert ends[1, "forward", m].start_s >= ends[0, "forward", m].end_s
    names = [e["args"]["name"] for e in json.loads(out.read_text())["traceEvents"] if e["name"] == "process_name"]
    assert names == ["simulated", "measured"]


def test_mistakes_are_told(tmp_path: Path) -> None:
    one = Timeline(events=(Event(rank=0, kind="forward", start_s=0, end_s=1),), origin="simulated")
    assert chrome_trace({"a": one})["traceEvents"]
    with pytest.raises(TrimaranError, match=r"\.png, \.svg, \.pdf"):
        write_timelines({"a": one}, tmp_path / "t.gif")
    (tmp_path / "timeline.0.json").write_text("{")
    with pytest.raises(TrimaranError, match="cannot be read"):
        read_timeline([tmp_path / "timeline.0.json"])
    done = CliRunner().invoke(app, ["timeline", *QUESTION, "--layout", "pp2,mbs1", "--measure"])
    assert "needs a recipe" in str(done.exception)


def test_a_timeline_is_of_the_run_that_the_recipe_states(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("[sweep]", '[sweep]\nfixed = { precision = "bf16" }'))
    asked = ["timeline", str(recipe), "--layout", "pp2,mbs1", "-o", str(tmp_path / "t.json")]
    assert CliRunner().invoke(app, asked).stderr.startswith("dp1,tp1,pp2,mbs1,bf16: simulated")
    done = CliRunner().invoke(app, [*asked, "--measure", "--gbs", "8"])
    assert "--gbs 8 simulates another run than the recipe's" in str(done.exception)
