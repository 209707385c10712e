"""Measured rows in the columns of the field's tables, predicted beside measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trimaran.nouns.measurement import Measurement
from trimaran.report.tables import Field

FIELDS: tuple[Field, ...] = (
    Field("nodes", "Nodes"),
    Field("devices", "Ranks"),
    Field("size", "Size"),
    Field("dp", "DP"),
    Field("tp", "TP"),
    Field("pp", "PP"),
    Field("vpp", "VPP"),
    Field("mbs", "MBS"),
    Field("gbs", "GBS"),
    Field("zero_stage", "ZeRO"),
    Field("recompute", "Recompute", left=True),
    Field("precision", "Precision", left=True),
    Field("schedule", "Schedule", left=True),
    Field("variant", "Variant", left=True),
    Field("predicted_mem_gib", "Mem predicted", ".2f", " GiB"),
    Field("mem_gib", "Mem", ".2f", " GiB"),
    Field("predicted_sec_per_it", "Sec/it predicted", ".3f"),
    Field("sec_per_it", "Sec/it", ".3f"),
    Field("spread", "+/-", ".3f"),
    Field("tflops", "TFLOPs", ".3g"),
    Field("status", "Status", left=True),
    Field("notes", "Notes", left=True),
)


def records(measurements: Iterable[Measurement]) -> list[dict[str, Any]]:
    """One record a measurement; fields that say the same default everywhere are left blank."""
    rows = list(measurements)
    return [_record(row, rows) for row in rows]


def _record(row: Measurement, rows: list[Measurement]) -> dict[str, Any]:
    spread = row.sec_per_it_spread
    return {
        "nodes": row.nodes,
        "devices": row.devices,
        "size": size_label(row),
        "dp": row.dp,
        "tp": row.tp,
        "pp": row.pp,
        "vpp": row.vpp if any(other.vpp > 1 for other in rows) else None,
        "mbs": row.mbs,
        "gbs": row.gbs,
        "zero_stage": row.zero_stage if any(other.zero_stage for other in rows) else None,
        "recompute": row.recompute,
        "precision": row.precision,
        "schedule": row.schedule,
        "variant": row.variant,
        "predicted_mem_gib": row.predicted_mem_gib,
        "mem_gib": row.mem_gib,
        "predicted_sec_per_it": row.predicted_sec_per_it,
        "sec_per_it": row.sec_per_it,
        "spread": spread / 2 if spread is not None else None,
        "tflops": row.tflops,
        "status": row.status,
        "notes": row.notes or row.date,
        "layout": row.layout_label,
    }


def size_label(row: Measurement) -> str:
    """The model's size as the documents print it: `181B`, `1.3B`, `124M` (12 L h^2 + V h)."""
    parameters = 12 * row.layers * row.hidden**2 + row.vocab * row.hidden
    if parameters >= 1e9:
        billions = parameters / 1e9
        return f"{billions:.0f}B" if billions >= 10 else f"{billions:.1f}B"
    return f"{parameters / 1e6:.0f}M" if parameters >= 1e7 else f"{parameters / 1e6:.1f}M"
