"""Advice: what a slightly different model would gain where sizes fall badly on the hardware.

Tiles, waves, alignment and the eligibility of fused kernels make speed uneven in hidden size and
heads: on A100s a hidden size of 14400 with 96 heads of 150 ran at 94 TFLOPs where 13824 with 64 heads
reached 120. Neighbours of the model are predicted on the layout at hand and compared by useful work.
"""

from __future__ import annotations

from collections.abc import Iterator

from trimaran.cost.case import Case
from trimaran.cost.estimate import time_many
from trimaran.cost.grid import LayoutGrid
from trimaran.layout.flops import model_flops
from trimaran.layout.layout import Layout
from trimaran.layout.rules import violations
from trimaran.nouns.model import Model
from trimaran.nouns.noun import Noun

# A neighbour is worth a sentence from this gain on.
WORTH = 0.05
# How far hidden may move, relatively, and the sizes that it is rounded to.
_REACH = 0.06
_ROUND_TO = (1024, 512, 128)
# Head sizes that attention kernels are made for.
_HEAD_SIZES = (64, 80, 96, 128)


class Advice(Noun):
    """A neighbouring model that does `gain` more useful work a second on the same layout."""

    hidden: int
    heads: int
    parameters: int
    gain: float
    sentence: str


def advise(layout: Layout, case: Case) -> Advice | None:
    """The best neighbour of the model in hidden size and heads, or None where none gains enough."""
    model = case.model
    useful = _rate(layout, case)
    best: tuple[float, Model] | None = None
    for neighbour in _neighbours(model):
        workload = case.workload.model_copy(update={"model": neighbour})
        if any(violations(layout, workload, case.cluster, case.stack)):
            continue
        rate = _rate(layout, case.with_workload(workload))
        # Of equally good neighbours the nearer one, which comes first, stays.
        if best is None or rate > best[0] * (1.0 + 1e-3):
            best = rate, neighbour
    if best is None or best[0] / useful - 1.0 < WORTH:
        return None
    gain, neighbour = best[0] / useful - 1.0, best[1]
    return Advice(
        hidden=neighbour.hidden,
        heads=neighbour.heads,
        parameters=neighbour.parameters,
        gain=gain,
        sentence=(
            f"hidden {neighbour.hidden} with {neighbour.heads} heads of {neighbour.head_dim} would do {gain:.0%} more "
            f"work a second on this layout than hidden {model.hidden} with {model.heads} heads of {model.head_dim} "
            f"({neighbour.parameters / 1e9:.4g}B parameters in place of {model.parameters / 1e9:.4g}B)"
        ),
    )


def _rate(layout: Layout, case: Case) -> float:
    """Useful operations a second."""
    workload = case.workload
    grid = LayoutGrid.from_layouts([layout], workload, case.stack)
    seconds = float(time_many(case, grid)[0])
    return model_flops(workload.model, workload.seq_len, workload.global_batch, layout.tp) / seconds


def _neighbours(model: Model) -> Iterator[Model]:
    """Models of about the same size, nearest hidden first, with head sizes that kernels like.

    None of a model with latent attention, whose heads have widths of their own.
    """
    if model.latent_attention is not None:
        return
    near = {model.hidden}
    for multiple in _ROUND_TO:
        below = model.hidden // multiple * multiple
        near |= {below, below + multiple}
    for hidden in sorted(near, key=lambda size: abs(size - model.hidden)):
        if not hidden or abs(hidden / model.hidden - 1.0) > _REACH:
            continue
        ffn = model.ffn_hidden * hidden // model.hidden
        for size in _HEAD_SIZES:
            heads = hidden // size
            groups = model.heads // model.kv_heads
            if hidden % size or heads % groups or ffn * model.hidden != model.ffn_hidden * hidden:
                continue
            yield model.model_copy(
                update={
                    "name": "", "hidden": hidden, "heads": heads, "head_dim": size, "kv_heads": heads // groups,
                    "ffn_hidden": ffn,
                }
            )  # fmt: skip
