"""Trackers: where a training's figures go for people to look at, beside its own log."""

from __future__ import annotations

import atexit
import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from trimaran.nouns.noun import TrimaranError
from trimaran.recipe.train_settings import TrackerName


class Tracker(Protocol):
    """Takes figures by name, a step at a time."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of one step."""
        ...


class TensorBoard:
    """Event files in `tensorboard`."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import FileWriter

        self._summary: Any = Summary
        self._writer: Any = FileWriter(str(folder / "tensorboard"), flush_secs=5)
        atexit.register(self._writer.close)  # its thread may not have written the last step yet

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """One scalar a figure, all in one event."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._writer.add_summary(self._summary(value=values), step)


class WeightsAndBiases:
    """A run of Weights & Biases in `wandb`: kept there for `wandb sync` unless WANDB_MODE says otherwise."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(project="trimaran", dir=str(folder), config=dict(config), mode=mode)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """One line of the run's history."""
        self._run.log(dict(figures), step=step)


class MlFlow:
    """A run of MLflow: in `mlflow.db` unless MLFLOW_TRACKING_URI names a server."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import mlflow

        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(f"sqlite:///{folder.resolve()}/mlflow.db")
        mlflow.set_experiment("trimaran")
        mlflow.start_run()
        mlflow.log_params({name: str(value)[:250] for name, value in config.items()})
        self._log = mlflow.log_metrics

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """One metric a figure."""
        self._log(dict(figures), step=step)


_TRACKERS: dict[TrackerName, Callable[[Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MlFlow,
}


def open_trackers(names: tuple[TrackerName, ...], folder: Path, config: Mapping[str, Any]) -> tuple[Tracker, ...]:
    """The trackers `names`, which write into `folder`. Raises TrimaranError for one that is not installed."""
    require_trackers(names)
    return tuple(_TRACKERS[name](folder, config) for name in names)


def require_trackers(names: tuple[TrackerName, ...]) -> None:
    """Raise TrimaranError for a tracker that is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise TrimaranError(
                f"train.track names {name}, which is not installed: pip install {name}, or leave it out"
            )


def _numbers(name: str, given: object) -> Iterator[tuple[str, int | float]]:
    """The number that is given, or those in a table."""
    if isinstance(given, int | float):
        yield name, given
    elif isinstance(given, list | tuple):
        for place, inner in enumerate(given):
            yield from _numbers(f"{name}/{place}", inner)


def figures_of(record: Mapping[str, Any]) -> dict[str, float]:
    """What of a log line is a finite number; those of a table under their places, as `expert_load/0/3`."""
    numbers = {name: value for key, given in record.items() for name, value in _numbers(key, given)}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value) and name != "iteration"}
