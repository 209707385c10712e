"""Context parallelism: keys and values, or heads, on their way between ranks that share a sequence."""

from __future__ import annotations

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.effects.effect import Effect, IterationCost, TimePart
from trimaran.cost.grid import Floats
from trimaran.layout.layout import Layout


def _seconds(iteration: IterationCost) -> dict[str, Floats]:
    return {"cp": np.asarray(iteration.micro_batches * iteration.work.cp_time)}


def _cause(layout: Layout, case: Case, micro_batches: int) -> str:
    across = layout.cp * layout.stride("cp") > case.cluster.devices_per_node
    return (
        f"CP {layout.cp} exchanges keys and values {'across nodes' if across else 'inside the node'} and attention "
        f"does not hide it; a smaller CP or a longer part of the sequence on each rank"
    )


CONTEXT = Effect((TimePart("cp", "keys and values between ranks of a sequence", _cause),), _seconds)
