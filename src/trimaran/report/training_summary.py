"""What a finished training showed, in a few lines."""

from __future__ import annotations

import math
from pathlib import Path

from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.text import counted
from trimaran.recipe.recipe import Recipe
from trimaran.report.disturbance import trained_otherwise
from trimaran.study.training.folders import largest_rank


def summary(
    row: Measurement,
    recipe: Recipe,
    cluster: Cluster,
    layout: Layout,
    out_dir: Path,
    measured: Measurement | None = None,
) -> str:
    """First and last loss in nats against ln(vocabulary), speed, and memory beside what was predicted.

    `out_dir` is the folder of the training, where its ranks wrote down their memory. `measured` is the row of the
    layout's trial: where the training took another time, the likely cause is told.
    """
    uniform = math.log(row.vocab)
    seconds, tflops = row.sec_per_it or math.nan, row.tflops or math.nan
    tokens_per_s = (row.tokens_per_s_per_gpu or 0.0) * (row.devices or 1)
    loss = "not finite from the first step on: lower learning_rate"
    if row.losses:
        last = row.losses[-1]
        loss = f"{last:.3f} nats a token, {uniform - last:.2f} below ln(vocabulary {row.vocab}) = {uniform:.3f}"
    if row.losses and row.notes:
        loss = f"{loss}; {row.notes}: lower learning_rate"
    otherwise = trained_otherwise(row, measured)
    return "\n".join(
        (
            f"{counted(len(row.step_times_s), 'step')} with {row.layout_label}:",
            f"  loss   {loss}",
            f"  speed  {seconds:.3f} s/it, {tokens_per_s:.0f} tokens/s, {tflops:.3g} model TFLOPs a rank",
            *([f"         {otherwise}"] if otherwise else []),
            f"  memory {row.mem_gib or 0.0:.2f} GiB on the largest rank",
            *memory_lines(recipe, cluster, layout, out_dir),
        )
    )


# Parts of a rank's memory: how they are called, those predicted, and the one measured.
_PARTS = (
    ("weights", ("weights",), "weights"),
    ("gradients", ("gradients",), "gradients"),
    ("optimizer", ("optimizer",), "optimizer"),
    ("activations, logits, buffers", ("activations", "logits", "buffers"), "rest"),
    ("before the model", ("context",), "context"),
    ("peak", ("total",), "peak"),
)


def memory_lines(recipe: Recipe, cluster: Cluster, layout: Layout, out_dir: Path) -> tuple[str, ...]:
    """A small table of the largest rank's memory in GiB, predicted and measured."""
    largest = largest_rank(out_dir, layout.devices)
    if largest is None:
        return ()
    rank, measured = largest
    predicted = estimate(Case.of(recipe.workload, cluster, recipe.stack), layout)
    stage = predicted.memory[layout.coordinate("pp", rank)]
    lines = [f"    {f'rank {rank}, GiB':30}{'predicted':>10}{'measured':>10}"]
    for title, parts, held in _PARTS:
        if held in measured:
            lines.append(f"    {title:30}{sum(getattr(stage, part) for part in parts):10.3f}{measured[held]:10.3f}")
    return tuple(lines)
