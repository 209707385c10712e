"""The life of a training: where its time went adds up, its page is read whole, and mistakes are told."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trained_folder import (
    DOWN_S,
    LOST,
    OTHER_S,
    QUEUE_S,
    SAVE_S,
    SAVES,
    STEP_S,
    STEPS,
    UNNOTICED_S,
    WAITED_S,
    trained_folder,
)
from trimaran.cli.app import app
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.files import RunFile
from trimaran.recipe.train_settings import TrainSettings
from trimaran.report.life.goodput import LEGEND, measured, predicted
from trimaran.report.life.life_page import life_page
from trimaran.report.life.record import life_of
from trimaran.study.training.events import EVENTS, Event, EventKind, EventLog, set_events_aside
from trimaran.study.training.folders import set_aside
from trimaran.study.training.lasting import WAITS_S
from watched_page import Watched
from whole_text import SCHEMES, SIZES, unreadable


def test_the_parts_of_the_time_add_up_to_the_whole_life(tmp_path: Path) -> None:
    life = life_of(trained_folder(tmp_path))
    assert life.measured == pytest.approx(
        {"work": STEPS * STEP_S, "checkpoints": SAVES * SAVE_S, "lost": (LOST + 5) * STEP_S, "restarts": DOWN_S,
         "waiting": WAITED_S, "other": OTHER_S}
    )  # fmt: skip
    assert [step for step, _ in life.losses] == list(range(1, STEPS + 1)), "steps that were made again stand once"
    # one fault, which loses half of what lies between two checkpoints in the mean, and starts the ranks anew
    between_s = life.measured["work"] / SAVES
    start_s = OTHER_S / 2 - QUEUE_S
    assert life.predicted == pytest.approx(
        {"work": STEPS * STEP_S, "checkpoints": SAVES * SAVE_S, "lost": between_s / 2,
         "restarts": UNNOTICED_S + start_s, "waiting": 0.0, "other": OTHER_S / 2}, rel=0.05,
    )  # fmt: skip


@pytest.fixture
def crashed(tmp_path: Path) -> Callable[..., dict[str, float]]:
    """What is expected of the training where rows follow that of its crash."""

    def expected(*rows: str, crash: str = "", first: bool = True) -> dict[str, float]:
        folder = trained_folder(tmp_path / f"study-{len(list(tmp_path.iterdir()))}")
        path = folder.with_name(EVENTS)
        lines = path.read_text().splitlines(keepends=True)
        place = next(place for place, line in enumerate(lines) if ",crash," in line)
        lines[place : place + 1] = [lines[place].replace(",crash,", f",{kind or 'crash'},") for kind in (crash, *rows)]
        path.write_text("".join(line for line in lines if first or ",first_step," not in line))
        return life_of(folder).predicted

    return expected


def test_a_fault_that_strikes_a_start_costs_half_of_it(crashed: Callable[..., dict[str, float]]) -> None:
    once, twice, thrice = crashed(), crashed("crash"), crashed("crash", "crash")
    assert twice == pytest.approx({**once, "restarts": once["restarts"] + UNNOTICED_S + (OTHER_S / 2 - QUEUE_S) / 2})
    assert thrice["waiting"] == twice["waiting"] + WAITS_S[1], "the second start in vain is waited for"


def test_a_lost_node_has_its_place_in_the_queue_again(crashed: Callable[..., dict[str, float]]) -> None:
    assert crashed(crash="lost") == {**crashed(), "waiting": QUEUE_S}


def test_checkpoints_that_are_refused_have_more_to_lose(tmp_path: Path) -> None:
    folder = trained_folder(tmp_path)
    before = life_of(folder).predicted
    path = folder.with_name(EVENTS)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line.replace(",saved,", ",not_saved,") if ",100," in line else line for line in lines))
    refused = life_of(folder).predicted
    # 7 stretches of a seventh more, and of those that a fault strikes one in eight has another before it
    assert refused["lost"] == pytest.approx(before["lost"] * 8 / 7 * (1 + 1 / 8), rel=0.05)


def test_snapshots_that_nodes_hold_leave_less_to_lose(tmp_path: Path) -> None:
    folder = trained_folder(tmp_path)
    path = folder.with_name(EVENTS)
    # of the 30 steps since the checkpoint 4 are lost: a snapshot was newer
    path.write_text(path.read_text().replace(f",{LOST},{LOST * STEP_S},", f",4,{4 * STEP_S},"))
    held_s = TrainSettings().snapshot_seconds
    assert life_of(folder).predicted["lost"] == pytest.approx(held_s / 2, rel=0.05)


def test_starts_that_were_killed_before_a_step_are_expected_to_take_what_they_took(tmp_path: Path) -> None:
    folder = trained_folder(tmp_path)
    before = life_of(folder)
    path = folder.with_name(EVENTS)
    heading, began, *rows = path.read_text().splitlines(keepends=True)
    # five commands were killed with all that they had started, and left the one row that they began with
    path.write_text("".join([heading, *[began] * 6, *rows]))
    assert life_of(folder).measured == before.measured and life_of(folder).predicted == before.predicted


def test_nothing_is_expected_where_no_first_start_is_known(crashed: Callable[..., dict[str, float]]) -> None:
    assert crashed(first=False) == {}


def test_steps_that_no_checkpoint_kept_are_lost_and_no_work() -> None:
    """Until ranks go on they stand in the log: a training whose one checkpoint found no room has kept nothing."""

    def event(second: int, kind: EventKind, **fields: object) -> Event:
        at = f"2026-03-02T12:00:{second:02}+00:00"
        return Event.model_validate({"at": at, "event": kind, "step": 10, "saved_step": 0, "layout": "dp2", **fields})

    begun = [event(0, EventKind.BEGAN), event(5, EventKind.FIRST_STEP, seconds=5.0)]
    ended = event(20, EventKind.FAIL, lost_steps=10, lost_s=13.0)
    stopped = measured([*begun, ended, event(21, EventKind.STOPPED)], [1.3] * 10, "")
    assert (stopped.work, stopped.lost, stopped.total_s) == (pytest.approx(0.0), 13.0, pytest.approx(21.0))
    assert predicted(begun, stopped.model_copy(update={"work": 4e-4}), [1.3] * 10, 0.0) is None
    # made again, they are work too
    again = [*begun, ended, event(30, EventKind.WENT_ON, seconds=8.0), event(45, EventKind.FINISHED)]
    gone_on = measured(again, [1.3] * 10, "")
    assert (gone_on.work, gone_on.lost, gone_on.total_s) == (pytest.approx(13.0), 13.0, pytest.approx(45.0))


@pytest.mark.proof
def test_the_page_of_a_training_is_read_whole(watched: Watched, tmp_path: Path, picture: Callable[[str], Path]) -> None:
    out = tmp_path / "life.html"
    folder = trained_folder(tmp_path / "study")
    done = CliRunner().invoke(app, ["report", str(folder.parent), "-o", str(out)])
    assert done.exit_code == 0, done.output
    opened = watched.open(out)
    assert [told for width in SIZES for scheme in SCHEMES for told in unreadable(opened, width, scheme)] == []
    asked = opened.locator("figure:visible h2").all_inner_texts()
    assert asked == [
        "Does it learn?", "How fast is it?", "What interrupted it, and what is saved?", "Where did the time go?",
    ]  # fmt: skip
    said = opened.locator("#goodput-said").inner_text()
    assert "work 83.9%" in said and "predicted for as many faults" in said
    assert opened.locator("#progress .scatterlayer .trace").count() == 3
    names = opened.locator("#goodput").locator("..").locator(".legend li").all_inner_texts()
    assert names == list(LEGEND)
    events = opened.locator("tbody tr th").all_inner_texts()
    assert events == ["began", "first_step", "bad_loss", "slow", "crash", "went_on", "finished"]
    for width, scheme in ((400, "dark"), (1400, "light")):
        opened.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        opened.set_viewport_size({"width": width, "height": 900})
        opened.screenshot(path=picture(f"training-{width}"), animations="disabled", full_page=True)
        assert picture(f"training-{width}").stat().st_size > 30_000


@pytest.mark.proof
def test_the_first_step_of_a_training_is_seen(watched: Watched, tmp_path: Path) -> None:
    folder = trained_folder(tmp_path)
    for path, kept in ((RunFile.LOG.of(folder), 1), (folder.with_name(EVENTS), 2)):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:kept]))
    (tmp_path / "life.html").write_text(life_page(life_of(folder)))
    opened = watched.open(tmp_path / "life.html")
    for name in ("losses", "speed"):
        assert opened.locator(f"#{name} .points path").count() == 1


def test_losses_none_of_which_is_finite_are_told_of(tmp_path: Path) -> None:
    folder = trained_folder(tmp_path)
    log = RunFile.LOG.of(folder)
    log.write_text(re.sub(r'"lm_loss": [\d.-]+', '"lm_loss": null', log.read_text()))
    life = life_of(folder)
    assert life.losses == () and life.sentences[1].startswith("No step has a finite loss")


def test_a_terminal_is_told_the_same(tmp_path: Path) -> None:
    folder = trained_folder(tmp_path)
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    assert "Training of" in done.output and "Faults: 1 crash" in done.output
    lines = {line.split()[0]: line for line in done.output.splitlines() if line.split()[0] in LEGEND}
    assert list(lines) == list(LEGEND)
    assert "83.9%" in lines["work"] and lines["lost"].count("%") == 2
    assert "at step 230 on node gpu-node-17: rank 3 was killed by SIGKILL" in done.output


def test_what_is_no_training_is_told_in_one_line(tmp_path: Path) -> None:
    folder = trained_folder(tmp_path)
    done = CliRunner().invoke(app, ["report", str(folder), "-o", str(tmp_path / "rows.csv")])
    assert isinstance(done.exception, TrimaranError) and "is a training" in str(done.exception)
    RunFile.LOG.of(folder).write_text('{"iteration": 1}\n')
    with pytest.raises(TrimaranError, match=r"line 1 is not of a training's log"):
        life_of(folder)
    RunFile.LOG.of(folder).write_text("")
    with pytest.raises(TrimaranError, match="has no step yet"):
        life_of(folder)
    RunFile.LOG.of(folder).unlink()
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert isinstance(done.exception, TrimaranError) and "is a folder without log.jsonl" in str(done.exception)


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        (RunFile.LOG, '"sec_per_it": 2.0', '"sec_per_it": NaN', "line 1 is not"),
        (RunFile.LOG, '"sec_per_it": 2.0', '"sec_per_it": 1e308', "line 1 is not"),
        (RunFile.LOG, '"iteration": 7', '"iteration": ' + "9" * 400, "line 7 is not"),
        (RunFile.LOG, '"validation_loss": null', '"validation_loss": "x"', "line 1 is not"),
        (EVENTS, "2026-03-01T12:00:00.000+00:00", "yesterday", "line 2: at: a time with its zone"),
        (EVENTS, "2026-03-01T12:00:00.000+00:00", "2026-03-01T12:00:00", "line 2: at: a time with its zone"),
        (EVENTS, ",0.5,", ",-5000,", "line 5: seconds"),
        (EVENTS, ",0.5,", ",1e308,", "line 5: seconds"),
        (EVENTS, "at,event", "when,what", "line 1 does not have the columns"),
    ],
)
def test_what_no_training_writes_is_told_by_its_line(tmp_path: Path, name: str, old: str, new: str, says: str) -> None:
    folder = trained_folder(tmp_path)
    path = folder / name if name == RunFile.LOG else folder.with_name(name)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(TrimaranError, match=says):
        life_of(folder)


@pytest.mark.parametrize("name", [RunFile.JOB, RunFile.LOG])
@pytest.mark.parametrize("special", ["/dev/zero", "pipe"])
def test_what_is_no_file_is_not_read_for_ever(tmp_path: Path, name: RunFile, special: str) -> None:
    folder = trained_folder(tmp_path)
    path = name.of(folder)
    path.unlink()
    if special == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(special)
    with pytest.raises(TrimaranError, match="not a regular file"):
        life_of(folder)


def test_lines_that_were_cut_off_are_left_out_and_counted(tmp_path: Path) -> None:
    whole = trained_folder(tmp_path)
    log, events = RunFile.LOG.of(whole), whole.with_name(EVENTS)
    log.write_text(log.read_text().replace('{"iteration": 200,', '\0\0\0{"iteration": 200,') + '{"iteration": 40')
    text = events.read_text()
    events.write_text(text[: text.index("gpu-node-17")] + text[text.index("\n2026-03-01", 700) :] + "2026-03-01T")
    life = life_of(whole)
    assert len(life.losses) == STEPS - 1 and life.losses[-1][0] == STEPS
    assert life.sentences[-2].startswith("Lines of the log that cannot be read: 1;")
    assert life.sentences[-1].startswith("Rows of events.csv that cannot be read: 1;")


@pytest.mark.parametrize("there", ["", "at,event,st", "whole", "cut"])
def test_a_row_is_whole_whatever_a_full_disk_left_of_the_file(tmp_path: Path, there: str) -> None:
    folder = trained_folder(tmp_path)
    path = folder.with_name(EVENTS)
    rows = path.read_text().splitlines(keepends=True)
    path.write_text({"whole": "".join(rows), "cut": "".join(rows)[:-9]}.get(there, there))
    event = Event(at="2026-03-02T12:00:00+00:00", event=EventKind.BEGAN, step=0, saved_step=0, layout="dp2", why="a\nb")
    log = EventLog(path)
    log.add(event)
    log.add(event)
    life = life_of(folder)
    assert [mark["why"] for mark in life.marks[-2:]] == ["a b", "a b"]
    assert path.read_text().count("saved_step") == 1


def test_a_training_that_was_set_aside_is_reported_with_its_own_events(tmp_path: Path) -> None:
    folder = trained_folder(tmp_path / "study")
    whole = life_of(folder)
    (tmp_path / "study/events-3.csv").write_text("of a training whose folder was removed\n")
    kept = set_aside([folder])[folder]
    set_events_aside(folder.with_name(EVENTS), kept)
    assert kept.name == "train-4", "a folder and its events have one number, which no other has"
    begun_anew = trained_folder(tmp_path / "study/other")
    shutil.copytree(begun_anew, folder)
    # of the training begun anew only its beginning is told
    rows = begun_anew.with_name(EVENTS).read_text().splitlines(keepends=True)
    folder.with_name(EVENTS).write_text("".join(rows[:2]))
    assert life_of(kept).marks == whole.marks and life_of(kept).measured == whole.measured
    assert len(life_of(folder).marks) == 1


def test_what_one_start_of_a_training_left_is_not_taken_for_a_training(tmp_path: Path) -> None:
    folder = trained_folder(tmp_path / "study")
    start = set_aside([folder])[folder]
    shutil.copytree(start, folder)
    with pytest.raises(TrimaranError, match=rf"train-1 is what one start of a training left.*report {folder}$"):
        life_of(start)
    set_events_aside(folder.with_name(EVENTS), set_aside([folder])[folder])
    with pytest.raises(TrimaranError, match=r"report .*train-2$"):
        life_of(start)


def test_a_training_is_reported_from_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained_folder(tmp_path / "study"))
    done = CliRunner().invoke(app, ["report", "."])
    assert done.exit_code == 0 and "Training of study" in done.output
