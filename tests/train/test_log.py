"""The log of a training that goes on: no line that an earlier start has written is lost, whatever its disk did."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from small_disk import mounted
from trimaran.protocol.files import RunFile
from trimaran.protocol.job import TrainJob
from trimaran.store.importers.event_file import event_files, event_text
from trimaran.train.run.log import Iteration, Log
from trimaran.train.run.trackers import figures_of

JobMaker = Callable[..., TrainJob]


def iteration(step: int, lm_loss: float = 5.5) -> Iteration:
    return Iteration(
        iteration=step, iterations=100, consumed_samples=24 * step, consumed_tokens=384 * step, sec_per_it=0.1,
        learning_rate=1e-4, global_batch=24, lm_loss=lm_loss, loss_scale=1.0, grad_norm=1.0 / step, num_zeros=0,
        skipped_iterations=0, nan_iterations=0, samples_per_s=240.0, tflops=0.1, tokens_per_s=3840.0, mfu=None,
        peak_mem_gib=0.25, own_s=0.09, slowest_own_s=0.1, slowest_rank=1, validation_loss=6.0 if step == 2 else None,
        expert_load=((0.5, 1.5), (1.25, 0.75)),
    )  # fmt: skip


@pytest.fixture
def job(make_job: JobMaker) -> TrainJob:
    return make_job("dp1,mbs1", steps=100)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "64k") as disk:
        yield disk


def start(job: TrainJob, folder: Path, step: int, *earlier: Path) -> Log:
    """The log of a start in `folder` that goes on from `step`."""
    folder.mkdir(exist_ok=True)
    logs = tuple(str(RunFile.LOG.of(each)) for each in earlier)
    return Log(job.model_copy(update={"out_dir": str(folder), "earlier_logs": logs}), step)


def steps_of(folder: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in RunFile.LOG.of(folder).read_text().splitlines()]


def text_of(folder: Path) -> list[str]:
    return RunFile.LOG_TEXT.of(folder).read_text().splitlines()


def test_an_iteration_is_read_back_as_it_was_written() -> None:
    whole = iteration(2)
    assert Iteration.of(json.loads(json.dumps(whole.record()))).line() == whole.line()
    lost = Iteration.of(json.loads(json.dumps(iteration(3, lm_loss=math.inf).record())))
    assert math.isnan(lost.lm_loss) and lost.mfu is None


def test_lines_that_only_the_log_for_programs_holds_are_not_lost(job: TrainJob, tmp_path: Path) -> None:
    """A disk that is full as one of the two files is written, and a kill, leave the other longer."""
    first = start(job, tmp_path / "first", 0)
    for step in (1, 2, 3, 4, 3, 4, 5):  # it went back once
        first.write(iteration(step))
    whole = text_of(tmp_path / "first")
    RunFile.LOG_TEXT.of(tmp_path / "first").write_text("\n".join(whole[:2]))

    second = start(job, tmp_path / "second", 4, tmp_path / "first")
    assert [line.iteration for line in second.earlier] == steps_of(tmp_path / "second") == [1, 2, 3, 4]
    assert text_of(tmp_path / "second") == [whole[place] for place in (0, 1, 4, 5)]


def test_loads_of_experts_are_copied_from_an_earlier_log_and_not_held(job: TrainJob, tmp_path: Path) -> None:
    """A line of thousands of experts has a hundred kilobytes; those of a long training filled the memory of rank 0."""
    first = start(job, tmp_path / "first", 0)
    for step in (1, 2, 3):
        first.write(iteration(step))
    second = start(job, tmp_path / "second", 3, tmp_path / "first")
    assert [line.expert_load for line in second.earlier] == [None] * 3
    first_lines, second_lines = (RunFile.LOG.of(tmp_path / name).read_text() for name in ("first", "second"))
    assert first_lines == second_lines and "1.25" in second_lines


def test_telling_trackers_of_earlier_steps_gives_signs_of_life(job: TrainJob, tmp_path: Path) -> None:
    """TensorBoard takes a millisecond for each of them, and the other ranks wait meanwhile."""
    first = start(job, tmp_path / "first", 0)
    for step in (1, 2, 3, 4):
        first.write(iteration(step))
    (tmp_path / "second").mkdir()
    logs, signs = (str(RunFile.LOG.of(tmp_path / "first")),), list[str]()
    tracked = {"out_dir": str(tmp_path / "second"), "earlier_logs": logs, "track": True}
    Log(job.model_copy(update=tracked), 4, lambda: signs.append("alive"))
    assert len(signs) == 4


def test_all_figures_of_a_step_are_one_event_of_tensorboard(job: TrainJob, tmp_path: Path) -> None:
    tracked = job.model_copy(update={"out_dir": str(tmp_path), "track": True})
    log = Log(tracked, 0)
    for step in (1, 2, 3):
        log.write(iteration(step))
    (tracker,) = log._trackers
    tracker._writer.close()  # type: ignore[attr-defined]
    events = [json.loads(line) for line in event_text(event_files(tmp_path / "tensorboard")).splitlines()]
    assert [event["_step"] for event in events] == [1, 2, 3]
    expected = figures_of(iteration(2).record())
    assert {name: events[1][name] for name in expected} == pytest.approx(expected)


def test_a_tracker_whose_server_is_away_ends_no_training(job: TrainJob, tmp_path: Path) -> None:
    """MLflow's errors are Exceptions of its own, those of a full disk under its database too."""
    log, told = start(job, tmp_path / "first", 0), list[int]()

    class AwayAtTwo:
        def write(self, step: int, figures: object) -> None:
            if step == 2:
                raise Exception("API request to http://127.0.0.1:9/api/2.0/mlflow/runs/log-batch failed")
            told.append(step)

    log._trackers = (AwayAtTwo(),)
    for step in (1, 2, 3):
        log.write(iteration(step))
    assert told == [1, 3] and steps_of(tmp_path / "first") == [1, 2, 3]


def test_a_log_that_was_begun_on_a_full_disk_is_not_the_only_one_that_is_gone_on_from(
    job: TrainJob, tmp_path: Path, small_disk: Path
) -> None:
    first = start(job, tmp_path / "first", 0)
    for step in range(1, 11):
        first.write(iteration(step))
    filler = small_disk / "filler"
    second_folder = small_disk / "second"
    second_folder.mkdir()
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    with filler.open("r+b") as file:
        file.truncate(filler.stat().st_size - 4096)
    start(job, second_folder, 8, tmp_path / "first")  # and is killed before there is room again
    cut = tmp_path / "cut"
    shutil.copytree(second_folder, cut)
    assert RunFile.LOG.of(cut).stat().st_size < RunFile.LOG.of(tmp_path / "first").stat().st_size / 2

    start(job, tmp_path / "third", 8, cut, tmp_path / "first")
    assert steps_of(tmp_path / "third") == list(range(1, 9))
    assert len(text_of(tmp_path / "third")) == 8


def test_where_no_log_has_all_lines_those_of_the_fullest_are_kept(job: TrainJob, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("newest", "older", "gone")]
    for folder, last in zip(folders[:2], (2, 5), strict=True):
        log = start(job, folder, 0)
        for step in range(1, last + 1):
            log.write(iteration(step))
    log = start(job, tmp_path / "on", 7, *folders)
    log.write(iteration(8))
    assert steps_of(tmp_path / "on") == [1, 2, 3, 4, 5, 8]
