"""Stage splits: how many layers each pipeline stage gets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cache

from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.stack import Stack


@cache
def weighted_split(layers: int, stages: int, head_in_layers: float, bare_ends: bool = False) -> tuple[int, ...]:
    """Layers per stage such that the slowest stage is as fast as it can be.

    The last stage also carries the output head, which weighs `head_in_layers` layers; the
    remaining layers are spread evenly, earlier stages taking the rest. Every stage keeps at
    least one layer, but the last one none where with `bare_ends` the head weighs more than any other stage.
    Raises TrimaranError where stages exceed layers.
    """
    if stages > layers:
        raise TrimaranError(f"layers {layers} cannot fill {stages} stages: use at most {layers} stages")
    if stages == 1:
        return (layers,)

    def others(last: int) -> int:
        return -(-(layers - last) // (stages - 1))

    # Layers on the last stage make it slower and the others faster: the best is where the two cross. Of equally
    # fast splits take the one that leaves most on the last stage: the others, which keep more micro-batches in
    # flight, are then lighter.
    most = layers - (stages - 1)
    least = 0 if bare_ends else 1
    last = least + bisect_left(range(least, most), True, key=lambda count: count + head_in_layers >= others(count))
    if last > least and others(last - 1) < max(others(last), last + head_in_layers) - 1e-12:
        last -= 1
    share, extra = divmod(layers - last, stages - 1)
    return (*(share + (1 if stage < extra else 0) for stage in range(stages - 1)), last)


@cache
def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage, equal where they divide; else the middle stages take the rest."""
    share, extra = divmod(layers, stages)
    first = (stages - extra) // 2
    return tuple(share + (1 if first <= stage < first + extra else 0) for stage in range(stages))


@cache
def ends_split(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage where embedding and head stand for a layer each, on the first and the last stage.

    The earlier stages take the rest, every stage keeps at least one layer (torchtitan 0.2.2,
    distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part). Equal stages where there are too few layers.
    """
    share, extra = divmod(layers + 2, stages)
    split = [share + (stage < extra) for stage in range(stages)]
    split[0] -= 1
    split[-1] -= 1
    return tuple(split) if min(split) > 0 else even_split(layers, stages)


def most_stages(stack: Stack, layers: int) -> int:
    """How many stages so many layers can make: one each, and with `bare_ends` two more for embedding and head."""
    return layers + (2 if stack.bare_ends else 0)


def stack_split(stack: Stack, layers: int, stages: int, head_in_layers: Callable[[], float]) -> tuple[int, ...]:
    """The split that a stack makes of itself; `head_in_layers` says how many layers the output head weighs.

    Where stages are one or two more than layers, embedding and head stand alone on the first and the last.
    """
    if stages > layers:
        return (0,) * (stages - layers - 1) + (1,) * layers + (0,)
    if stack.head_weighted_stages:
        return weighted_split(layers, stages, head_in_layers(), stack.bare_ends)
    if stack.ends_count_as_layers and stack.uneven_stages:
        return ends_split(layers, stages)
    return even_split(layers, stages)
