"""Training for real: the ranks of a recipe's training, watched like a trial, to its last step."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from trimaran.bench.launcher import Launcher
from trimaran.bench.limits import Limits
from trimaran.bench.network import launcher_for
from trimaran.bench.trial import prepare_trial, run_trial
from trimaran.cluster import Cluster
from trimaran.layout import Layout
from trimaran.measurement import Measurement
from trimaran.noun import TrimaranError
from trimaran.recipe import Recipe

# A training has no time limit; what stops it early is silence.
NO_TIMEOUT_S = 10 * 365 * 86400.0
# A training is worth more patience than a trial: a file system may stall for a while.
PATIENCE_S = 120.0


def run_training(
    recipe: Recipe,
    cluster: Cluster,
    layout: Layout,
    *,
    data_dir: Path,
    out_dir: Path,
    launcher: Launcher | None = None,
    on_step: Callable[[dict[str, Any]], None] = lambda line: None,
) -> Measurement:
    """Train all of the recipe's steps on `layout`; the row of the whole training.

    `on_step` gets each line of the trainer's log.jsonl. The log of an earlier training is kept in a
    folder beside `out_dir`. Raises TrimaranError, naming the evidence, when the training does not end well.
    """
    sweep = recipe.sweep.model_copy(update={"steps": recipe.train.steps})
    whole = recipe.model_copy(update={"sweep": sweep})
    trial = prepare_trial(whole, cluster, layout, data_dir=data_dir, work_dir=out_dir.parent, variant=recipe.variant)
    job = trial.job.model_copy(update={"out_dir": str(out_dir.resolve())})
    _set_aside(out_dir)
    tail = LogTail(out_dir / "log.jsonl")

    def tell() -> None:
        for line in tail.new_lines():
            on_step(line)

    row = run_trial(
        type(trial)(key=trial.key, recipe=whole, cluster=cluster, job=job, variant=trial.variant),
        launcher or launcher_for(cluster),
        Limits(timeout_s=NO_TIMEOUT_S, hang_s=PATIENCE_S, memory_gib=cluster.host_mem_gib or None),
        on_step=lambda step: tell(),
    )
    tell()
    if row.status != "ok":
        first = (row.evidence or "no evidence").strip().splitlines()[0]
        raise TrimaranError(f"training on {layout} ended as {row.status}: {first}; see {out_dir}")
    return row


def _set_aside(out_dir: Path) -> None:
    """Rename the folder of an earlier training to the first of NAME-1, NAME-2, ... that is free."""
    if not (out_dir / "log.jsonl").exists():
        return
    free = next(name for n in count(1) if not (name := out_dir.with_name(f"{out_dir.name}-{n}")).exists())
    try:
        out_dir.rename(free)
    except OSError as error:
        raise TrimaranError(
            f"training folder {out_dir} cannot be kept as {free.name}: {error.strerror}; check its permissions"
        ) from None


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
