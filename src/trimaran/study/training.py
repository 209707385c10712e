"""Training for real: the ranks of a recipe's training, watched like a trial, to its last step."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

from trimaran.bench.launch.contract import Launch, Launcher, Ranks
from trimaran.bench.launch.joined import Joined, JoinedLauncher
from trimaran.bench.launchers import launcher_of
from trimaran.bench.trial.trial import Trial, finished_row, prepare_trial, run_trial
from trimaran.bench.watch.limits import Limits
from trimaran.bench.watch.verdict import is_consequence
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.exits import STOP_SIGNALS, STOPPED
from trimaran.protocol.files import CHECKPOINT, CHECKPOINTS, RunFile
from trimaran.protocol.job import TrainJob, read_job
from trimaran.protocol.notices import Notice
from trimaran.recipe.recipe import Recipe

# A training has no time limit; what stops it early is silence.
NO_TIMEOUT_S = 10 * 365 * 86400.0
# Silence of 3 of the longest gaps between signs of life is a hang; of less than this it never is, since a file system
# may stall for a while, and a training is worth more patience than a trial.
HANG_FLOOR_S = 30.0
_GO_ON = "the same command with --resume goes on"


class TrainingStoppedError(TrimaranError):
    """A training that was told to leave, and did; the same command with --resume goes on."""

    exit_status = STOPPED


def run_training(
    recipe: Recipe,
    cluster: Cluster,
    layout: Layout,
    *,
    data_dir: Path,
    out_dir: Path,
    resume: bool = False,
    among: Joined | None = None,
    trace_steps: int = 0,
    on_step: Callable[[dict[str, Any]], None] = lambda line: None,
    on_notice: Callable[[str], None] = lambda text: None,
) -> Measurement:
    """Train all of the recipe's steps on `layout`; the row of the whole training.

    Checkpoints lie in the folder `checkpoints` beside `out_dir`; `resume` goes on from the newest, where there is
    one. `on_step` gets each new line of the trainer's log.jsonl, `on_notice` sentences for the user. The log of an
    earlier training, and its checkpoints unless they are gone on from, are kept in folders beside these. `among`
    says that other ranks are started already, and that this process leads them. `trace_steps` are profiled. Raises
    TrimaranError, naming the evidence, when the training does not end well, and TrainingStoppedError where SIGTERM,
    SIGUSR1 or Ctrl-C ended it.
    """
    sweep = recipe.sweep.model_copy(update={"steps": recipe.train.steps})
    whole = recipe.model_copy(update={"sweep": sweep})
    trial = prepare_trial(whole, cluster, layout, data_dir=data_dir, work_dir=out_dir.parent, variant=recipe.variant)
    checkpoints = out_dir.with_name(CHECKPOINTS)
    if resume and among is None and (row := _finished(trial, out_dir)):
        on_notice(f"all {recipe.train.steps} steps were made before; raise train.steps to go on")
        return row
    kept = _set_aside([out_dir] if resume else [out_dir, checkpoints])
    if checkpoints in kept:
        on_notice(f"checkpoints of an earlier training are kept in {kept[checkpoints]}; --resume would have gone on")
    update: dict[str, Any] = {"out_dir": str(out_dir.resolve()), "resume": resume, "track": True}
    update |= {"trace_steps": trace_steps, "checkpoint_dir": str(checkpoints.resolve())}
    if resume and (earlier := _newest_log(out_dir)):
        update["earlier_log"] = str(earlier.resolve())
    teller = Teller(out_dir, on_step, on_notice)
    with contextlib.ExitStack() as stack:
        launcher: Launcher = (
            JoinedLauncher(among) if among else stack.enter_context(launcher_of(recipe.sweep, cluster, on_notice))
        )
        stoppable = StoppableLauncher(launcher)
        try:
            with stoppable.passing_on_signals():
                row = run_trial(
                    replace(trial, recipe=whole, job=trial.job.model_copy(update=update)),
                    stoppable,
                    Limits(timeout_s=NO_TIMEOUT_S, hang_s=HANG_FLOOR_S, memory_gib=cluster.host_mem_gib or None),
                    on_step=lambda step: teller.tell(),
                )
        except _StoppedEarly:
            raise TrainingStoppedError(f"stopped before its ranks were started; {_GO_ON}") from None
    teller.tell()
    if teller.stopped_at is not None:
        saved = "and saved" if teller.saved_at == teller.stopped_at else "and could not save"
        raise TrainingStoppedError(f"stopped at step {teller.stopped_at} {saved}; {_GO_ON}")
    if row.status != "ok":
        first = (row.evidence or "no evidence").strip().splitlines()[0]
        # whoever starts ranks stops all of them when one has failed, which is then the reason to give
        if stoppable.stopping and is_consequence(first):
            raise TrainingStoppedError(f"stopped before it could save; {_GO_ON} from what was saved")
        raise TrimaranError(f"training on {layout} ended as {row.status}: {first}; see {out_dir}")
    return row


def _finished(trial: Trial, out_dir: Path) -> Measurement | None:
    """The row of the training that `out_dir` holds, where it is this one, on whatever layout, and was finished."""
    try:
        job = read_job(TrainJob, RunFile.JOB.of(out_dir))
    except TrimaranError:
        return None
    asked = trial.job
    if (job.workload, job.train, job.data_dir) != (asked.workload, asked.train, asked.data_dir):
        return None
    return finished_row(replace(trial, job=job))


def _set_aside(folders: Sequence[Path]) -> dict[Path, Path]:
    """Rename folders of an earlier training to NAME-1, or the first number that is free for all; old to new name."""
    kept = [folder for folder in folders if folder.is_dir() and any(_worth_keeping(folder))]

    def numbered(folder: Path, number: int) -> Path:
        return folder.with_name(f"{folder.name}-{number}")

    free = next(n for n in count(1) if not any(numbered(folder, n).exists() for folder in folders))
    for folder in kept:
        try:
            folder.rename(numbered(folder, free))
        except OSError as error:
            raise TrimaranError(
                f"training folder {folder} cannot be kept as {numbered(folder, free).name}: {error.strerror}; "
                f"check its permissions"
            ) from None
    return {folder: numbered(folder, free) for folder in kept}


def _worth_keeping(folder: Path) -> Iterator[Path]:
    """Logs with lines, and checkpoints; a training that was killed before its first step leaves neither."""
    log = RunFile.LOG.of(folder)
    if log.exists() and log.stat().st_size:
        yield log
    yield from folder.glob(CHECKPOINT)


def _newest_log(out_dir: Path) -> Path | None:
    """The log of the last training that was set aside."""
    numbers = [path.name.removeprefix(f"{out_dir.name}-") for path in out_dir.parent.glob(f"{out_dir.name}-*")]
    newest = max((int(number) for number in numbers if number.isdecimal()), default=None)
    log = RunFile.LOG.of(out_dir.with_name(f"{out_dir.name}-{newest}"))
    return log if log.exists() else None


class _StoppedEarly(BaseException):
    """A signal to leave, before there are ranks to pass it on to, as while they wait in a queue."""


class StoppableLauncher:
    """A launcher whose ranks are asked to leave when this process is; what goes on, goes on from a checkpoint."""

    at_once = 1
    restarts = 0  # a start anew would begin at step 1
    on_this_machine = True

    def __init__(self, inner: Launcher) -> None:
        self._inner = inner
        self._ranks: Ranks | None = None
        self.stopping = False

    def expect(self, nodes: int) -> None:
        """Tell the launcher."""
        self._inner.expect(nodes)

    def start(self, launch: Launch) -> Ranks:
        """Start the ranks, and remember them."""
        self._ranks = self._inner.start(launch)
        return self._ranks

    def close(self) -> None:
        """Give back what the launcher holds."""
        self._inner.close()

    @contextlib.contextmanager
    def passing_on_signals(self) -> Iterator[None]:
        """Send the ranks SIGTERM on SIGTERM, SIGUSR1 or Ctrl-C; a second one does here what it did before.

        Raises _StoppedEarly where no ranks have been started yet.
        """
        before: dict[int, Any] = {}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def pass_on(_number: int, _frame: FrameType | None) -> None:
            restore()
            self.stopping = True
            if self._ranks is None:
                raise _StoppedEarly
            self._ranks.ask_to_leave()

        if threading.current_thread() is threading.main_thread():
            before.update({number: signal.signal(number, pass_on) for number in STOP_SIGNALS})
        try:
            yield
        finally:
            restore()


class Teller:
    """Passes on what a training writes down while it runs: lines of its log, and notices as sentences."""

    def __init__(
        self, out_dir: Path, on_step: Callable[[dict[str, Any]], None], on_notice: Callable[[str], None]
    ) -> None:
        self._log, self._notices = LogTail(RunFile.LOG.of(out_dir)), LogTail(RunFile.NOTICES.of(out_dir))
        self._on_step, self._on_notice = on_step, on_notice
        self._known_steps = 0
        self.stopped_at: int | None = None
        self.saved_at: int | None = None

    def tell(self) -> None:
        """Pass on what is new."""
        lines = self._log.new_lines()
        for notice in self._notices.new_lines():
            self._notice(notice)
        for line in lines:
            # a resumed training's log begins with the lines of the earlier one
            if line["iteration"] > self._known_steps:
                self._on_step(line)

    def _notice(self, notice: dict[str, Any]) -> None:
        kind, step = notice["kind"], notice.get("step")
        if kind == Notice.RESUMED:
            self._known_steps = self.saved_at = notice["step"]
            self._on_notice(f"going on from step {step} of {notice['path']}, written on {notice['layout']}")
            for sentence in notice["changed"]:
                self._on_notice(f"  from here on {sentence}")
        elif kind == Notice.SAVED:
            self.saved_at = step
            self._on_notice(
                f"checkpoint of step {step} is written: the step waited {notice['blocked_s']:.3f} s, "
                f"writing took {notice['write_s']:.2f} s"
            )
        elif kind == Notice.STOPPED:
            self.stopped_at = step
        else:
            self._on_notice(notice["text"])


def largest_rank(out_dir: Path, ranks: int) -> tuple[int, dict[str, float]] | None:
    """The rank whose memory peaked highest, and that memory in its parts (GiB), as the ranks wrote it down."""
    memory = {}
    for rank in range(ranks):
        with contextlib.suppress(OSError, ValueError):
            memory[rank] = json.loads(RunFile.MEMORY.of(out_dir, rank).read_text())
    return max(memory.items(), key=lambda item: item[1]["peak"], default=None)


class LogTail:
    """Lines of a JSON-lines file that were not read before; an unfinished last line waits."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def new_lines(self) -> list[dict[str, Any]]:
        """Whole lines since the last call, parsed."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            block = file.read()
        whole = block[: block.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line.strip()]
