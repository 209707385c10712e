"""What a published table shows on a small machine beside what was published, and the answer in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from trimaran.cost.score import kendall_tau
from trimaran.nouns.measurement import Measurement
from trimaran.recipe.published import PublishedTable
from trimaran.report.measured_rows import network_label
from trimaran.report.tables import Field, Format, render
from trimaran.study.published.scale import SmallRow
from trimaran.study.published.small_tables import SmallTable

FIELDS = (
    Field("nodes", "Nodes"),
    Field("dp", "DP"),
    Field("tp", "TP"),
    Field("pp", "PP"),
    Field("mbs", "MBS"),
    Field("gbs", "GBS"),
    Field("heads", "Heads"),
    Field("network", "Network", left=True),
    Field("published_s", "Sec/it", ".4g"),
    Field("published_status", "Status", left=True),
    Field("small", "Here", left=True),
    Field("small_gbs", "GBS here"),
    Field("small_s", "Sec/it here", ".3f"),
    Field("small_mem_gib", "Mem here", ".2f", "GiB"),
    Field("small_predicted_s", "predicted", ".3f"),
    Field("small_status", "Status here", left=True),
)
# What a person calls a column.
CALLED = {
    "dp": "DP", "tp": "TP", "pp": "PP", "mbs": "MBS", "gbs": "GBS", "heads": "heads", "layers": "layers",
    "hidden": "hidden", "recompute": "recompute", "precision": "precision", "network_delay_ms": "delay ms",
    "network_gbps": "Gbps", "dp_kind": "DP by", "variant": "",
}  # fmt: skip
# Speeds closer than this are not told apart.
ALIKE = 0.02


def as_json(tables: Sequence[SmallTable]) -> str:
    """Every table with its answer and its rows."""
    objects = [
        {"table": table.published.name, "answer": answer(table.published, table.rows), "rows": records(table.rows)}
        for table in tables
    ]
    return json.dumps(objects, indent=2, allow_nan=False)


def as_text(tables: Sequence[SmallTable], form: Format) -> str:
    """Every table under its name, its answer below."""
    lines = []
    for table in tables:
        title = f"### {table.published.name}" if form == "markdown" else table.published.name
        lines += [f"\n{title}\n\n{render(records(table.rows), FIELDS, form)}\n", answer(table.published, table.rows)]
    return "\n".join(lines)


def records(rows: Sequence[tuple[SmallRow, Measurement | None]]) -> list[dict[str, Any]]:
    """One record a published row, what was measured of it here beside."""
    rows_shown = []
    for small, measured in rows:
        published = small.published
        rows_shown.append(
            {
                **{name: getattr(published, name) for name in ("nodes", "dp", "tp", "pp", "mbs", "gbs", "heads")},
                "network": network_label(published) or None,
                "published_s": published.sec_per_it,
                "published_status": published.status,
                "small": small.layout.label(),
                "small_gbs": small.workload.global_batch,
                "small_s": measured.sec_per_it if measured else None,
                "small_mem_gib": measured.mem_gib if measured else None,
                "small_predicted_s": measured.predicted_sec_per_it if measured else None,
                "small_status": measured.status if measured else "not run",
            }
        )
    return rows_shown


def answer(table: PublishedTable, rows: Sequence[tuple[SmallRow, Measurement | None]]) -> str:
    """The table's question answered from the data: here, and as published; and whether the two agree."""
    measured_here = _best_by_value(table, rows, lambda small, measured: _sec_per_sample(measured))
    as_published = _best_by_value(table, rows, lambda small, measured: _sec_per_sample(small.published))
    sentences = [f"{table.question} Here: {_ordered(measured_here)}.", f"Published: {_ordered(as_published)}."]
    both = [value for value in measured_here if value in as_published]
    tau = kendall_tau([measured_here[value] for value in both], [as_published[value] for value in both])
    if tau is not None:
        sentences.append(f"The two orders have a rank correlation of {tau:.2f} over {len(both)}.")
    return " ".join(sentences)


def _sec_per_sample(row: Measurement | None) -> float | None:
    if row is None or row.status != "ok" or row.sec_per_it is None:
        return None
    return row.sec_per_it / row.gbs


def _best_by_value(
    table: PublishedTable,
    rows: Sequence[tuple[SmallRow, Measurement | None]],
    seconds: Callable[[SmallRow, Measurement | None], float | None],
) -> dict[str, float]:
    """Seconds a sample of the best row for each value of the compared columns, the fastest first."""
    best: dict[str, float] = {}
    for small, measured in rows:
        per_sample = seconds(small, measured)
        value = _value(table, small.published)
        if per_sample is not None and per_sample < best.get(value, float("inf")):
            best[value] = per_sample
    return dict(sorted(best.items(), key=lambda item: item[1]))


def _value(table: PublishedTable, row: Measurement) -> str:
    values = ((CALLED.get(name, name), getattr(row, name)) for name in table.compares)
    return " ".join(
        f"{called} {value:g}" if isinstance(value, int | float) else str(value or "plain") for called, value in values
    )


def _ordered(best: dict[str, float]) -> str:
    """The values in words: the fastest, and how much slower the others are."""
    if not best:
        return "nothing was timed"
    (first, fastest), *others = best.items()
    if not others:
        return f"only {first} was timed"
    slower = (f"{value} {_slower(seconds / fastest - 1)}" for value, seconds in others)
    return f"{first} is fastest, {', '.join(slower)}"


def _slower(share: float) -> str:
    return "as fast" if share < ALIKE else f"{share:.0%} slower" if share < 1 else f"{1 + share:.1f} times as slow"
