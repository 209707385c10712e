"""Measured notes: which parts of the model a probe ran whole, so that a prediction rests on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trimaran.cost.case import Case
from trimaran.layout.layout import Layout
from trimaran.nouns.precision import PRECISIONS
from trimaran.nouns.probed_model import PART_NAMES, PartName, PartTime


def measured_notes(layout: Layout, case: Case) -> Iterator[str]:
    """A sentence for each part of the case's model that was measured in its stack; none elsewhere."""
    for part in PART_NAMES:
        times = case.cluster.part_times(part, case.model, case.stack.name)
        if times:
            yield _sentence(part, times, layout, case.workload.seq_len)


def _sentence(part: PartName, times: Sequence[PartTime], layout: Layout, seq_len: int) -> str:
    rate = PRECISIONS[layout.precision].rate
    for time in times:
        if (time.precision, time.tp, time.mbs, time.seq_len) == (rate, layout.tp, layout.mbs, seq_len):
            return (
                f"{part} at TP {time.tp}, micro-batch {time.mbs}, sequence {seq_len} in {rate}, one rank alone: "
                f"{time.forward_us / 1e3:.4g} ms forward, {time.backward_us / 1e3:.4g} ms backward"
            )
    shapes = "; ".join(
        f"{title} {', '.join(map(str, sorted({getattr(time, name) for time in times})))}"
        for name, title in (("tp", "TP"), ("mbs", "micro-batch"), ("seq_len", "sequence"))
    )
    return f"{part} at {shapes}, from which this layout's is read"
