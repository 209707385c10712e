"""Measured rows in the columns of the field's tables, predicted beside measured."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from trimaran.files.row_nouns import model_of
from trimaran.layout.choices import CHOICE
from trimaran.layout.flops import OWN_FORMULA
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.report.disturbance import others_took
from trimaran.report.layouts import MEASURED, layout_cells, layout_fields, unused
from trimaran.report.tables import Field

FIELDS: tuple[Field, ...] = (
    Field("nodes", "Nodes"),
    Field("devices", "Ranks"),
    Field("size", "Size"),
    *layout_fields(MEASURED),
    Field("placed", "On devices", left=True),
    Field("variant", "Variant", left=True),
    Field("predicted_mem_gib", "Mem predicted", ".2f", " GiB"),
    Field("mem_gib", "Mem", ".2f", " GiB"),
    Field("predicted_sec_per_it", "Sec/it predicted", ".3f"),
    Field("sec_per_it", "Sec/it", ".3f"),
    Field("spread", "+/-", ".3f"),
    Field("tflops", "TFLOPs", ".3g"),
    Field("tflops_by", "TFLOPs by", left=True),
    Field("status", "Status", left=True),
    Field("notes", "Notes", left=True),
)


def records(measurements: Iterable[Measurement]) -> list[dict[str, Any]]:
    """One record a measurement; fields that say the same default everywhere are left blank.

    TFLOPs count the model's operations, nothing computed again, unless `tflops_by` names another calculator.
    """
    rows = list(measurements)
    left_out = unused(MEASURED, rows)
    return [record(row, left_out) for row in rows]


def record(row: Measurement, left_out: frozenset[str]) -> dict[str, Any]:
    """One measurement without the fields `left_out`, which say the same default in all rows of the table."""
    spread = row.sec_per_it_spread
    return {
        "nodes": row.nodes,
        "devices": row.devices,
        "size": size_label(row),
        **dict(layout_cells(MEASURED, row, row.gbs, left_out)),
        "placed": _placed(row),
        "variant": row.variant,
        "predicted_mem_gib": row.predicted_mem_gib,
        "mem_gib": row.mem_gib,
        "predicted_sec_per_it": row.predicted_sec_per_it,
        "sec_per_it": row.sec_per_it,
        "spread": spread / 2 if spread is not None else None,
        "tflops": row.tflops,
        "tflops_by": None if row.flops_formula == OWN_FORMULA else row.flops_formula,
        "status": row.status,
        "notes": "; ".join(filter(None, (row.notes, others_took(row)))) or row.date,
        "layout": row.layout_label,
    }


def _placed(row: Measurement) -> str | None:
    """The devices that its ranks were placed on, as the notation writes them; None where on those in their order."""
    words = (row.layout_label or "").split(",")
    stated = (re.fullmatch(CHOICE["placed"].word.pattern, word) for word in words)
    return next((match[1] for match in stated if match), None)


def network_label(row: Measurement) -> str:
    """What a row states of its network: `1 ms, 5 Gbps`, or one of the two; empty where it states neither."""
    delay, rate = row.network_delay_ms, row.network_gbps
    return ", ".join(
        filter(None, (None if delay is None else f"{delay:g} ms", None if rate is None else f"{rate:g} Gbps"))
    )


def size_label(row: Measurement) -> str:
    """The model's size: `181B`, `1.3B`, `124M`, `30K`."""
    parameters = _parameters(row)
    if parameters >= 1e9:
        billions = parameters / 1e9
        return f"{billions:.0f}B" if billions >= 10 else f"{billions:.1f}B"
    if parameters < 1e5:
        return f"{parameters / 1e3:.2g}K"
    return f"{parameters / 1e6:.0f}M" if parameters >= 1e7 else f"{parameters / 1e6:.1f}M"


def _parameters(row: Measurement) -> int:
    """The model's own count where the row says more of it than its widths; else 12 L h^2 + V h, as documents count."""
    if row.model is not None or row.experts or row.mlp == "swiglu":
        try:
            return model_of(row).unpadded_parameters
        except (TrimaranError, ValidationError):
            pass  # whose columns contradict each other, which is told where the row is predicted
    return 12 * row.layers * row.hidden**2 + row.vocab * row.hidden
