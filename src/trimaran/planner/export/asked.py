"""What an exporter is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from trimaran.layout.layout import Layout
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload
from trimaran.planner.export.start import Start


@dataclass(frozen=True)
class Asked:
    """A layout of a workload, planned for a stack, to be written for a `version` of what reads it ("": its only one).

    `start` is what a manifest needs besides: the recipe's training, the machines, the image.
    """

    layout: Layout
    workload: Workload
    stack: Stack
    version: str = ""
    start: Start | None = None

    def started(self, to: str) -> Start:
        """What a manifest starts. Raises TrimaranError where it is not said, or other software would be started."""
        if self.start is None:
            raise TrimaranError(f"export to {to} starts the training of a recipe, and none is given: name one")
        if self.stack.framework != "trimaran":
            raise TrimaranError(
                f"export to {to} starts `trimaran train`, and the stack is {self.stack.name or self.stack.framework}: "
                f"plan for the stack trimaran"
            )
        return self.start
