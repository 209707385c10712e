"""Case: what a prediction is about - a workload on a cluster under a stack, with what is known of the two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from trimaran.cost.calibration import Calibration, on_nodes, resolve_calibration
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.model import Model
from trimaran.nouns.probed_model import PART_NAMES
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload


@dataclass(frozen=True)
class Case:
    """Workload, cluster, stack and the calibration that predicts them.

    The workload's model is as the stack trains it; `left_out` says what of it that is not, empty where it is all.
    """

    workload: Workload
    cluster: Cluster
    stack: Stack
    calibration: Calibration
    left_out: str = ""

    @classmethod
    def of(cls, workload: Workload, cluster: Cluster, stack: Stack, calibration: Calibration | None = None) -> Self:
        """The case with `calibration`, or else the shipped one of (cluster, stack), or else the prior."""
        known = resolve_calibration(cluster, stack, calibration)
        return cls(workload, cluster, stack, known).with_workload(workload)

    @property
    def model(self) -> Model:
        """The workload's model."""
        return self.workload.model

    @property
    def on_cpu(self) -> bool:
        """Whether the cluster's devices are slots of CPUs."""
        return self.cluster.device.kind == "cpu"

    @property
    def origin(self) -> str:
        """Where the figures behind a prediction come from: those of the calibration, and parts measured whole."""
        parts = (part for part in PART_NAMES if self.cluster.part_times(part, self.model, self.stack.name))
        measured = " and ".join(parts)
        return f"{self.calibration.origin}, {measured} as probed" if measured else self.calibration.origin

    def with_workload(self, workload: Workload) -> Self:
        """Another workload on the same cluster under the same stack."""
        model = self.stack.trained(workload.model)
        if model is workload.model:
            return replace(self, workload=workload)
        depth = workload.model.mtp_depth
        left_out = f"multi-token prediction of depth {depth} is left out of {model.name}: {self.stack.name} has none"
        return replace(self, workload=workload.model_copy(update={"model": model}), left_out=left_out)

    def on(self, cluster: Cluster) -> Case:
        """The same on another cluster, with the calibration of this one."""
        return replace(self, cluster=cluster)

    def given_to(self, layout: Layout) -> Case:
        """The same on what a job of the layout is given of racks; one that is placed names devices of all of them."""
        return self if layout.placed else self.on(self.cluster.of_a_job(layout.devices))

    def on_nodes(self, cluster: Cluster) -> Case:
        """The same on nodes of one group, whose devices reach another share of their peak than the cluster's."""
        return replace(self, cluster=cluster, calibration=on_nodes(self.calibration, self.cluster, cluster, self.stack))

    def calibrated(self, calibration: Calibration) -> Case:
        """The same with another calibration."""
        return replace(self, calibration=calibration)
