"""What a finished training showed, in a few lines."""

from __future__ import annotations

import math

from trimaran.measurement import Measurement


def summary(row: Measurement) -> str:
    """First and last loss in nats against ln(vocabulary), speed and memory."""
    uniform = math.log(row.vocab)
    seconds, tflops = row.sec_per_it or math.nan, row.tflops or math.nan
    tokens_per_s = (row.tokens_per_s_per_gpu or 0.0) * (row.devices or 1)
    loss = "not finite from the first step on: lower learning_rate"
    if row.losses:
        last = row.losses[-1]
        loss = f"{last:.3f} nats a token, {uniform - last:.2f} below ln(vocabulary {row.vocab}) = {uniform:.3f}"
    if row.losses and row.notes:
        loss = f"{loss}; {row.notes}: lower learning_rate"
    return "\n".join(
        (
            f"{len(row.step_times_s)} steps with {row.layout_label}:",
            f"  loss   {loss}",
            f"  speed  {seconds:.3f} s/it, {tokens_per_s:.0f} tokens/s, {tflops:.3g} TFLOPs a rank",
            f"  memory {row.mem_gib or 0.0:.2f} GiB on the largest rank",
        )
    )
