"""What another trainer's configuration would cost, in sentences and in parts."""

from __future__ import annotations

import json
from typing import Any

from trimaran.cost.effects.time_effects import TIME_PARTS
from trimaran.cost.memory.parts import MEMORY_PARTS
from trimaran.planner.configs.cost import ConfigCost
from trimaran.report.tables import Field, Format, render

_FIELDS = (
    Field("part", "Part", left=True),
    Field("value", "Value", ".3f"),
    Field("unit", "", left=True),
)


def answer(cost: ConfigCost, form: Format) -> str:
    """The cost as text, or as JSON, or as a table of its parts."""
    if form == "json":
        return json.dumps(_as_json(cost), indent=2, allow_nan=False)
    parts = render(_parts(cost), _FIELDS, form)
    if form != "table":
        return parts
    case = cost.case
    speed = f"{cost.estimate.sec_per_it:.2f} s/it, {cost.tflops:.0f} TFLOPs"
    mfu = "" if cost.mfu is None else f", {cost.mfu:.0%} MFU"
    lines = [
        f"{cost.layout} on {cost.devices} devices of {case.cluster.name}",
        f"  {speed}{mfu}, {cost.estimate.mem_gib:.1f} GiB",
        f"  {cost.trainer}: {case.stack.software or case.stack.name}",
        f"  bottleneck: {cost.bottleneck}",
        f"  memory: {cost.memory}",
        *(f"  {kind}: {sentence}" for kind, sentence in cost.remarks),
    ]
    return "\n".join([*lines, "", parts])


def _as_json(cost: ConfigCost) -> dict[str, Any]:
    workload = cost.case.workload
    return {
        "trainer": cost.trainer,
        "layout": str(cost.layout),
        "devices": cost.devices,
        "stage_split": list(cost.layout.stage_split),
        "model": workload.model.model_dump(mode="json"),
        "seq_len": workload.seq_len,
        "global_batch": workload.global_batch,
        "cluster": cost.case.cluster.name,
        "stack": cost.case.stack.name,
        "tflops": cost.tflops,
        "mfu": cost.mfu,
        "estimate": cost.estimate.model_dump(mode="json"),
        "bottleneck": cost.bottleneck,
        "memory": cost.memory,
        "remarks": [{"kind": kind, "sentence": sentence} for kind, sentence in cost.remarks],
    }


def _parts(cost: ConfigCost) -> list[dict[str, Any]]:
    fullest = max(cost.estimate.memory, key=lambda stage: stage.total)
    rows = [{"part": name, "value": getattr(cost.estimate.time, name), "unit": "s"} for name in TIME_PARTS]
    rows.append({"part": "sec/it", "value": cost.estimate.sec_per_it, "unit": "s"})
    rows += [{"part": name, "value": getattr(fullest, name), "unit": "GiB"} for name in MEMORY_PARTS]
    return [*rows, {"part": "memory", "value": fullest.total, "unit": "GiB"}]
