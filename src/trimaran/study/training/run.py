"""Training for real: the ranks of a recipe's training, watched like a trial, to its last step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimaran.bench.launch.contract import Launcher
from trimaran.bench.launch.joined import Joined, JoinedLauncher
from trimaran.bench.launchers import launcher_of
from trimaran.bench.trial.trial import Trial, finished_row, prepare_trial
from trimaran.bench.watch.limits import Limits
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.files import CHECKPOINTS, RunFile
from trimaran.protocol.job import TrainJob, read_job
from trimaran.recipe.recipe import Recipe
from trimaran.study.training.claim import only_training
from trimaran.study.training.events import EVENTS, EventLog, set_events_aside
from trimaran.study.training.folders import earlier_logs, set_aside
from trimaran.study.training.lasting import Lasting, LastingTraining
from trimaran.study.training.stopping import StoppableLauncher, StoppedBetweenRanksError

# A training has no time limit; what stops it early is silence.
NO_TIMEOUT_S = 10 * 365 * 86400.0
# Silence of 3 of the longest gaps between signs of life is a hang; of less than this it never is. On this machine that
# is what a busy disk may hold up a step; elsewhere signs also pass through a file system that may stall for a while.
HANG_FLOOR_S, FAR_HANG_FLOOR_S = 10.0, 30.0
# Ranks that lost another notice within a second (train/comm/shared_memory.py, PATIENCE_S); their words are kept.
PEERS_S = 1.5


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
    layout_on: Callable[[int], Layout] | None = None,
    on_step: Callable[[dict[str, Any]], None] = lambda line: None,
    on_notice: Callable[[str], None] = lambda text: None,
) -> Measurement:
    """Train all of the recipe's steps on `layout`; the row of the whole training.

    Checkpoints lie in the folder `checkpoints` beside `out_dir`; `resume` goes on from the newest, where there is
    one. `on_step` gets each new line of the trainer's log.jsonl, `on_notice` sentences for the user. The log of an
    earlier training, and its checkpoints unless they are gone on from, are kept in folders beside these. `among`
    says that other ranks are started already, and that this process leads them; where torchrun has started them again,
    the training goes on. `trace_steps` are profiled. After a fault the ranks are started again, as often as the recipe
    says, on a layout of `layout_on` where devices are left out. Raises TrimaranError, naming the evidence, when the
    training does not end well, and where another one goes on in `out_dir`; TrainingStoppedError where one of
    `stop_signals` ended it.
    """
    sweep = recipe.sweep.model_copy(update={"steps": recipe.train.steps})
    whole = recipe.model_copy(update={"sweep": sweep})

    def trial_on(layout: Layout) -> Trial:
        return prepare_trial(whole, cluster, layout, data_dir=data_dir, work_dir=out_dir.parent, variant=recipe.variant)

    trial, events, checkpoints = trial_on(layout), out_dir.with_name(EVENTS), out_dir.with_name(CHECKPOINTS)
    _require_files((events, RunFile.JOB.of(out_dir)), folders=(out_dir, checkpoints))
    resume = resume or (among is not None and among.again)
    if resume and among is None and (row := _finished(trial, out_dir)):
        on_notice(f"all {recipe.train.steps} steps were made before; raise train.steps to go on")
        return row
    with contextlib.ExitStack() as stack:
        stack.enter_context(only_training(out_dir, on_notice))
        kept = set_aside([out_dir] if resume else [out_dir, checkpoints])
        if not resume and events.exists():
            set_events_aside(events, kept.get(out_dir))
        if checkpoints in kept:
            on_notice(
                f"checkpoints of an earlier training are kept in {kept[checkpoints]}; --resume would have gone on"
            )
        update: dict[str, Any] = {"out_dir": str(out_dir.resolve()), "resume": resume, "track": True}
        update |= {"trace_steps": trace_steps, "checkpoint_dir": str(checkpoints.resolve())}
        if resume:
            update["earlier_logs"] = earlier_logs(out_dir)
        launcher: Launcher = (
            JoinedLauncher(among) if among else stack.enter_context(launcher_of(recipe.sweep, cluster, on_notice))
        )
        stoppable = StoppableLauncher(launcher)
        floor_s = HANG_FLOOR_S if launcher.on_this_machine else FAR_HANG_FLOOR_S
        lasting = LastingTraining(
            replace(trial, recipe=whole, job=trial.job.model_copy(update=update)),
            Lasting(recipe.train.restarts if launcher.restarts else 0, trial_on, layout_on, joined=among is not None),
            stoppable,
            Limits(timeout_s=NO_TIMEOUT_S, hang_s=floor_s, peers_s=PEERS_S, memory_gib=cluster.host_mem_gib or None),
            EventLog(events),
            on_step,
            on_notice,
        )
        try:
            with stoppable.passing_on_signals():
                return lasting.to_the_end()
        except StoppedBetweenRanksError:
            raise lasting.stopped_between_ranks() from None


def _require_files(files: tuple[Path, ...], folders: tuple[Path, ...]) -> None:
    """Raise TrimaranError where a training's files or folders are something else: a pipe is waited for for ever."""
    for folder in folders:
        try:
            folder.resolve()
            other = folder.exists() and not folder.is_dir()
        except (OSError, RuntimeError) as error:  # links that lead in a circle
            raise TrimaranError(f"training folder {folder} cannot be reached ({error}): give --runs another") from None
        if other:
            raise TrimaranError(f"training folder {folder} is not a folder: remove it, or give --runs another folder")
    for path in files:
        if path.exists() and not path.is_file():
            raise TrimaranError(f"training file {path} is not a regular file: remove it, or give --runs another folder")


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
