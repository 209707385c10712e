"""What a finished training showed, in a few lines."""

from __future__ import annotations

import math

from trimaran.measurement import Measurement


def summary(row: Measurement) -> str:
    """First and last loss in nats against ln(vocabulary), speed and memory."""
    uniform = math.log(row.vocab)
    last = row.losses[-1] if row.losses else math.nan
    seconds, tflops = row.sec_per_it or math.nan, row.tflops or math.nan
    tokens_per_s = (row.tokens_per_s_per_gpu or 0.0) * (row.devices or 1)
    return "\n".join(
        (
            f"{len(row.losses)} steps with {row.layout_label}:",
            f"  loss   {last:.3f} nats a token, {uniform - last:.2f} below ln(vocabulary {row.vocab}) = {uniform:.3f}",
            f"  speed  {seconds:.3f} s/it, {tokens_per_s:.0f} tokens/s, {tflops:.3g} TFLOPs a rank",
            f"  memory {row.mem_gib or 0.0:.2f} GiB on the largest rank",
        )
    )
