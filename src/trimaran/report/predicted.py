"""Published rows in the columns of their own documents, predicted beside published."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from trimaran.cost.table.predict_table import PredictedRow
from trimaran.layout.flops import aggregate_pflops
from trimaran.report.measured_rows import network_label, size_label
from trimaran.report.tables import Field

FIELDS = (
    Field("nodes", "Nodes"),
    Field("size", "Size"),
    Field("dp", "DP"),
    Field("tp", "TP"),
    Field("pp", "PP"),
    Field("heads", "NHEADS"),
    Field("mbs", "MBS"),
    Field("gbs", "GBS"),
    Field("network", "Network", left=True),
    Field("mem_gib", "Mem", ".1f", "GiB"),
    Field("predicted_mem_gib", "predicted", ".1f", "GiB"),
    Field("sec_per_it", "Sec/it", ".4g"),
    Field("predicted_sec_per_it", "predicted", ".4g"),
    Field("error", "off by", "+.1%"),
    Field("tflops", "TFLOPs", ".4g"),
    Field("predicted_tflops", "predicted", ".4g"),
    Field("pflops", "Est. Aggr. PetaFLOPs", ".3g"),
    Field("status", "Status", left=True),
    Field("notes", "Notes", left=True),
)


def records(rows: Sequence[PredictedRow]) -> list[dict[str, Any]]:
    """One record a row; what was not published, or could not be predicted, is None."""
    return [_record(row) for row in rows]


def _record(row: PredictedRow) -> dict[str, Any]:
    published, estimate = row.row.answerable, row.estimate
    if published is None:
        return {"notes": row.error}
    both = estimate is not None and published.sec_per_it is not None
    odd = () if estimate is None else (*(() if estimate.fits else ("does not fit",)), *row.notes)
    return {
        **{name: getattr(published, name) for name in ("nodes", "dp", "tp", "pp", "heads", "mbs", "gbs", "mem_gib")},
        "size": size_label(published),
        "network": network_label(published),
        "predicted_mem_gib": estimate.reported_mem_gib if estimate else None,
        "sec_per_it": published.sec_per_it,
        "predicted_sec_per_it": estimate.sec_per_it if estimate else None,
        "error": estimate.sec_per_it / published.sec_per_it - 1 if both and estimate and published.sec_per_it else None,
        "tflops": published.tflops,
        "predicted_tflops": row.tflops,
        "pflops": aggregate_pflops(row.tflops, published.devices) if row.tflops and published.devices else None,
        "status": published.status,
        "notes": row.error or "; ".join(odd),
    }


def told_once(rows: Iterable[tuple[int, Sequence[str]]]) -> list[str]:
    """Each sentence on rows once, with the first of its rows and how many more it is true of."""
    seen: dict[str, list[int]] = {}
    for number, sentences in rows:
        for sentence in sentences:
            seen.setdefault(sentence, []).append(number)
    more = {sentence: f" and {len(numbers) - 1} more" if len(numbers) > 1 else "" for sentence, numbers in seen.items()}
    return [f"row {numbers[0]}{more[sentence]}: {sentence}" for sentence, numbers in seen.items()]
