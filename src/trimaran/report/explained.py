"""The answer to `why`: one layout beside the best, in sentences and part by part."""

from __future__ import annotations

import json
from typing import Any

from trimaran.cost.effects.time_effects import TIME_PARTS
from trimaran.cost.estimates import Estimate
from trimaran.cost.memory.parts import MEMORY_PARTS
from trimaran.planner.why import Why
from trimaran.report.tables import Field, Format, render

_FIELDS = (
    Field("part", "Part", left=True),
    Field("this", "This layout", ".3f"),
    Field("best", "Best", ".3f"),
    Field("difference", "Difference", "+.3f"),
    Field("unit", "", left=True),
)


def answer(why: Why, form: Format) -> str:
    """The explanation as text, or as JSON or CSV of the parts."""
    if form == "json":
        return json.dumps(_as_json(why), indent=2, allow_nan=False)
    parts = [] if why.estimate is None else _parts(why.estimate, why.best_estimate)
    if form == "csv":
        return render(parts, _FIELDS, form)
    standing = f"rank {why.rank}" if why.rank else why.verdict
    text = "\n".join([f"{why.layout}: {standing}", *(f"  {reason}" for reason in why.reasons)])
    return text if not parts else f"{text}\n\n{render(parts, _FIELDS, form)}"


def _as_json(why: Why) -> dict[str, Any]:
    return {
        "layout": str(why.layout),
        "verdict": why.verdict,
        "rank": why.rank,
        "reasons": list(why.reasons),
        "estimate": None if why.estimate is None else why.estimate.model_dump(mode="json"),
        "best": str(why.best),
        "best_estimate": why.best_estimate.model_dump(mode="json"),
    }


def _parts(this: Estimate, best: Estimate) -> list[dict[str, Any]]:
    def row(part: str, this: float, best: float, unit: str) -> dict[str, Any]:
        return {"part": part, "this": this, "best": best, "difference": this - best, "unit": unit}

    rows = [row(name, getattr(this.time, name), getattr(best.time, name), "s") for name in TIME_PARTS]
    rows.append(row("sec/it", this.sec_per_it, best.sec_per_it, "s"))
    fullest, fullest_of_best = (max(e.memory, key=lambda stage: stage.total) for e in (this, best))
    rows += [row(name, getattr(fullest, name), getattr(fullest_of_best, name), "GiB") for name in MEMORY_PARTS]
    rows.append(row("memory", fullest.total, fullest_of_best.total, "GiB"))
    return rows
