"""KindOfNode: what a layout's stages do on nodes that are alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.grid import Floats
from trimaran.cost.pipeline.runs import PipelineRuns
from trimaran.cost.pipeline.stage_times import StageTimes
from trimaran.cost.stage_work import StageWork
from trimaran.nouns.hardware.link import Link


@dataclass(frozen=True)
class KindOfNode:
    """The case on such nodes, the work of the stages there, and parts of their time; all is so many times slower."""

    case: Case
    work: StageWork
    runs: PipelineRuns
    message: Floats
    parts: dict[str, Floats]
    slower: float

    @property
    def unslowed(self) -> StageTimes:
        """Times of the stages at their machine's own speed: a node that is held back leaves its cores to others."""
        return self.work.times if self.slower == 1.0 else self.work.times.scaled(np.array([1.0 / self.slower]))

    @cached_property
    def layer_s(self) -> float:
        """Seconds of a layer's backward, by which nodes are slower than others."""
        return float(self.work.times.backward[0])


def joined_by(case: Case, link: Link | None) -> Case:
    """The case on nodes that such a link joins; None: it is not used."""
    return case if link is None else case.on(case.cluster.model_copy(update={"inter": link}))
