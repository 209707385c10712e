"""A layout run for a few steps, the last of them recorded as a timeline."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from trimaran.bench.launch.contract import Say
from trimaran.bench.launchers import launcher_of
from trimaran.bench.sweep import shared_by_sweeps
from trimaran.bench.trial.trial import prepare_trial, run_trial
from trimaran.bench.watch.limits import Limits
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.timeline import Event, Timeline
from trimaran.protocol.files import RunFile
from trimaran.recipe.recipe import Recipe
from trimaran.store import Store, waiting_for

_ASK_AGAIN_S = 0.5


def record_timeline(
    recipe: Recipe, cluster: Cluster, layout: Layout, store: Store, *, data_dir: Path, work_dir: Path, say: Say
) -> Timeline:
    """Run the layout as a trial of the recipe's sweep; the timeline of its first pipeline's ranks.

    It waits, and says for whom, until no trial of the store's sweeps runs where it would. Raises TrimaranError, naming
    the evidence, when the run does not end well.
    """
    trial = prepare_trial(recipe, cluster, layout, data_dir=data_dir, work_dir=work_dir, variant=recipe.variant)
    job = trial.job.model_copy(update={"record_timeline": True})
    sweep = recipe.sweep
    limits = Limits(timeout_s=sweep.timeout_s, memory_gib=cluster.host_mem_gib or None)
    with launcher_of(sweep, cluster) as launcher, _turn(store, trial.key, shared_by_sweeps(launcher), say):
        row = run_trial(replace(trial, job=job), launcher, limits)
    if row.status != "ok":
        raise TrimaranError(f"{layout} ended as {row.status}: {row.reason}; see {job.out_dir}")
    return read_timeline([RunFile.TIMELINE.of(job.out_dir, stage) for stage in range(layout.pp)])


@contextmanager
def _turn(store: Store, key: str, shared: str | None, say: Say) -> Iterator[None]:
    """Hold the folder of the run, and what trials of sweeps would run on beside it, while the block runs."""
    names, told = [name for name in (f"timeline-{key}", shared) if name], set[str]()
    try:
        for name in names:
            while not store.claim(name):
                if (holder := store.holder(name)) and (
                    text := waiting_for(holder, "measures in this store")
                ) not in told:
                    told.add(text)
                    say(text)
                time.sleep(_ASK_AGAIN_S)
        yield
    finally:
        for name in names:
            store.release(name)


def read_timeline(paths: Sequence[Path]) -> Timeline:
    """The timeline that a run's ranks recorded, each in its own file. Raises TrimaranError for an unreadable one."""
    events: list[Event] = []
    for path in paths:
        try:
            events += Timeline.model_validate_json(path.read_text(encoding="utf-8")).events
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise TrimaranError(f"timeline {path} cannot be read ({reason}): record it again") from None
    return Timeline(events=tuple(events), origin="measured")
