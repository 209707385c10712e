"""What a layout can be written for: other trainers, and managers of clusters that start Trimaran's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trimaran.layout.layout import Layout
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload
from trimaran.planner.export import deepspeed as plain_deepspeed
from trimaran.planner.export import megatron_lm as megatron
from trimaran.planner.export import torchtitan as titan
from trimaran.planner.export.asked import Asked
from trimaran.planner.export.jobset import jobset
from trimaran.planner.export.megatron_deepspeed import megatron_deepspeed
from trimaran.planner.export.refuse import refuse_first
from trimaran.planner.export.skypilot import skypilot
from trimaran.planner.export.start import Start
from trimaran.planner.export.trainjob import trainjob


@dataclass(frozen=True)
class Exporter:
    """How a layout is written: for which `versions` of what reads it, the newest first; () where none differ.

    `stack` is the catalogue's name of the software that is told, whose abilities count where nobody names another.
    `starts`: what is written starts the training of a recipe, by Trimaran's own trainer. `narrows` makes of a stack
    what one of the versions can be told of it.
    """

    write: Callable[[Asked], str]
    stack: str
    versions: tuple[str, ...] = ()
    starts: bool = False
    narrows: Callable[[Stack, Model, str], Stack] = lambda stack, model, version: stack

    def planned_for(self, stack: Stack, model: Model, version: str | None) -> Stack:
        """The stack that a plan of the model for that version, or for the newest, is to choose by."""
        return self.narrows(stack, model, version or next(iter(self.versions), ""))


EXPORTERS: Mapping[str, Exporter] = {
    "megatron-lm": Exporter(megatron.megatron_lm, "megatron-core", megatron.VERSIONS),
    "megatron-deepspeed": Exporter(megatron_deepspeed, "megatron-deepspeed"),
    "torchtitan": Exporter(titan.torchtitan, "torchtitan-0.2", titan.VERSIONS, narrows=titan.without_unsaid),
    "deepspeed": Exporter(plain_deepspeed.deepspeed, "deepspeed", plain_deepspeed.VERSIONS),
    "trainjob": Exporter(trainjob, "trimaran", starts=True),
    "jobset": Exporter(jobset, "trimaran", starts=True),
    "skypilot": Exporter(skypilot, "trimaran", starts=True),
}


def exporter_of(to: str, version: str | None = None) -> Exporter:
    """The exporter to `to`. Raises TrimaranError where it, or that version of it, is not known."""
    exporter = EXPORTERS.get(to)
    if exporter is None:
        raise TrimaranError(f"export to {to!r} is not known: choose one of {', '.join(EXPORTERS)}")
    if version is not None and version not in exporter.versions:
        known = f"one of {', '.join(exporter.versions)}" if exporter.versions else "without it: all are told the same"
        raise TrimaranError(f"--for-version {version!r} is not known of {to}: write {known}")
    return exporter


def export(
    layout: Layout, workload: Workload, stack: Stack, to: str, version: str | None = None, start: Start | None = None
) -> str:
    """Flags, a configuration file or a manifest, by which `to` does what the layout says; of its newest version.

    `start` is what a manifest starts. Raises TrimaranError where `to` or its version is not known, has no word for
    what the layout asks, or needs what `start` does not state.
    """
    exporter = exporter_of(to, version)
    at_once = layout.dp * layout.mbs
    refuse_first(
        to,
        layout,
        [
            (
                workload.global_batch % at_once > 0 and not layout.replica_batches,
                f"a global batch of {workload.global_batch} that DP x micro-batch {at_once} does not divide",
            ),
            # a manifest starts our own trainer
            (bool(layout.replica_batches) and not exporter.starts, "replicas with unlike numbers of micro-batches"),
            (bool(layout.departures) and not exporter.starts, layout.departures),
            (not exporter.starts and _is_placed(layout), "the device that each rank stands on"),
        ],
    )
    return exporter.write(Asked(layout, workload, stack, version or next(iter(exporter.versions), ""), start))


def _is_placed(layout: Layout) -> bool:
    """Whether ranks stand on other devices than on the cluster's in their order."""
    return layout.placed not in ((), tuple(range(layout.devices)))


class Exported(NamedTuple):
    """A layout and its text; `passed` layouts before it could not be stated, the first of them as `refused` says."""

    layout: Layout
    text: str
    passed: int = 0
    refused: str = ""


def first_exported(
    layouts: Sequence[Layout],
    workload: Workload,
    stack: Stack,
    to: str,
    version: str | None = None,
    start: Start | None = None,
) -> Exported:
    """The first of the layouts that `to` can state.

    Raises TrimaranError with the first layout's reason where it can state none.
    """
    refused: TrimaranError | None = None
    for passed, layout in enumerate(layouts):
        try:
            text = export(layout, workload, stack, to, version, start)
            return Exported(layout, text, passed, str(refused or ""))
        except TrimaranError as error:
            refused = refused or error
    raise refused or TrimaranError("no layout is given: name at least one")
