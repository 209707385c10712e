"""All causes of time, in the order in which tables and pages show their parts."""

from __future__ import annotations

from trimaran.cost.effects.compute import COMPUTE
from trimaran.cost.effects.context import CONTEXT
from trimaran.cost.effects.effect import Effect, IterationCost, TimePart
from trimaran.cost.effects.expert import EXPERT
from trimaran.cost.effects.gradient_traffic import DATA
from trimaran.cost.effects.offload import OFFLOAD
from trimaran.cost.effects.optimizer import STEP
from trimaran.cost.effects.overhead import OVERHEAD
from trimaran.cost.effects.pipelines import PIPELINE
from trimaran.cost.effects.tensor import TENSOR
from trimaran.cost.grid import Floats
from trimaran.cost.similar import time_scales

EFFECTS: tuple[Effect, ...] = (COMPUTE, TENSOR, EXPERT, CONTEXT, PIPELINE, DATA, STEP, OFFLOAD, OVERHEAD)
PARTS: tuple[TimePart, ...] = tuple(part for effect in EFFECTS for part in effect.parts)
TIME_PARTS: tuple[str, ...] = tuple(part.name for part in PARTS)


def time_parts(iteration: IterationCost) -> dict[str, Floats]:
    """Seconds of every part, in the order of TIME_PARTS."""
    scale = time_scales(iteration.case, iteration.grid)
    seconds = {name: value for effect in EFFECTS for name, value in effect.seconds(iteration).items()}
    return {name: seconds[name] * scale for name in TIME_PARTS}
