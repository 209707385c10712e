"""The page of measured rows: one store's, or several side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.estimates import Estimate
from trimaran.files.row_nouns import nouns_of
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.report.disturbance import others_took
from trimaran.report.measured_rows import size_label
from trimaran.report.page.answers import answer_of_rows, by_work, choices_of, devices_known, layout_of, work_of
from trimaran.report.page.content import Content, ShownLayout, batch_fact, limit_gib
from trimaran.report.placement_map import placement_map

# Rows that a page holds, and those of them that it holds whole: with parts of time and memory, and losses. An
# estimate takes milliseconds, and a page of any store is to open at once.
ROWS, WHOLE_ROWS = 50_000, 1_000
# Losses of a run that a curve is drawn from, and characters of a row's notes.
LOSSES, NOTES = 200, 300
# What may differ between runs that have one prediction.
_OF_A_RUN = {
    "sec_per_it", "sec_per_it_spread", "step_times_s", "mem_gib", "mem_gib_per_rank", "tflops", "tokens_per_s_per_gpu",
    "status", "losses", "notes", "row", "trial_key", "date", "created_at", "wall_s", "evidence", "seed",
}  # fmt: skip


def measured_content(stores: Mapping[str, Sequence[Measurement]]) -> Content:
    """The page of one store's rows, or of several side by side: the fastest ROWS of each work in turn.

    Raises TrimaranError where there is no row at all.
    """
    rows = [(name, row) for name, measurements in stores.items() for row in measurements]
    if not rows:
        raise TrimaranError(f"no measured rows in {', '.join(stores)}: run `trimaran bench` or `trimaran tune` first")
    first = rows[0][1]
    ranked = _fastest_first(stores)
    predict = _Predictions()
    whole, others = ranked[:WHOLE_ROWS], ranked[WHOLE_ROWS:ROWS]
    cases = (
        *(_measured_case(name, row, predict(row), row.losses) for name, row in whole),
        *(_measured_case(name, row, None, ()) for name, row in others),
    )
    clusters = sorted({row.cluster for _, row in rows if row.cluster})
    return Content(
        title=" against ".join(stores) if len(stores) > 1 else (first.recipe or next(iter(stores))),
        facts=(
            ("Model", _models(row for _, row in rows)),
            ("Cluster", ", ".join(clusters) or "not stated"),
            ("Software", ", ".join(sorted({row.stack for _, row in rows if row.stack})) or "not stated"),
            batch_fact((row.gbs for _, row in rows), (row.seq_len for _, row in rows)),
            ("Runs", _count_by_status(row for _, row in rows)),
        ),
        answers=tuple(answer_of_rows(name, works) for name, rows in stores.items() for works in by_work(rows)),
        sentences=tuple(_left_out(len(rows))),
        cases=cases,
        mem_limit_gib=limit_gib(clusters[0]) if len(clusters) == 1 else None,
        map=next(filter(None, (_map(row) for _, row in ranked[:WHOLE_ROWS] if "on" in (row.layout_label or ""))), ""),
    )


def _fastest_first(stores: Mapping[str, Sequence[Measurement]]) -> list[tuple[str, Measurement]]:
    """Every row with its store: the fastest of each work, the second of each, and so on."""

    def pace_s(row: Measurement) -> tuple[bool, float]:
        timed = row.status == "ok" and row.sec_per_it is not None and bool(row.gbs)
        return (not timed, (row.sec_per_it or 0.0) / (row.gbs or 1))

    placed = [
        (place, name, row)
        for name, rows in stores.items()
        for works in by_work(rows)
        for place, row in enumerate(sorted(works, key=pace_s))
    ]
    placed.sort(key=lambda one: one[0])
    return [(name, row) for _, name, row in placed]


def _left_out(rows: int) -> Iterable[str]:
    """What the page does not hold, where that is anything."""
    if rows > ROWS:
        yield (
            f"{ROWS:,} of {rows:,} rows are on this page, the fastest of each work; `trimaran store ... list --where` "
            f"shows the others."
        )
    if rows > WHOLE_ROWS:
        yield f"Parts of time and memory, and losses, are those of the {WHOLE_ROWS:,} fastest rows."


def _measured_case(source: str, row: Measurement, predicted: Estimate | None, losses: tuple[float, ...]) -> ShownLayout:
    parts: dict[str, Any] = {}
    if predicted is not None:
        stages = (stage.model_dump(exclude={"stage"}) for stage in predicted.memory)
        parts = {"time_s": predicted.time.model_dump(), "memory_gib": tuple(stages)}
    every = -(-len(losses) // LOSSES) or 1
    return ShownLayout(
        source=source,
        work=work_of(row),
        layout=layout_of(row),
        nodes=row.nodes,
        devices=devices_known(row),
        gbs=row.gbs,
        choices=choices_of(row),
        **parts,
        status=row.status,
        variant=row.variant,
        sec_per_it=row.sec_per_it,
        predicted_sec_per_it=row.predicted_sec_per_it or (predicted.sec_per_it if predicted else None),
        mem_gib=row.mem_gib,
        predicted_mem_gib=row.predicted_mem_gib or (predicted.reported_mem_gib if predicted else None),
        tflops=row.tflops,
        losses=losses[::every],
        loss_every=every,
        notes="; ".join(filter(None, (row.notes, others_took(row))))[:NOTES],
    )


def _map(row: Measurement) -> str:
    """Where a row's ranks were placed; empty where they were not, or the row's cluster cannot be looked up."""
    try:
        nouns = nouns_of(row)
        return placement_map(nouns.cluster, nouns.layout) if nouns.layout.placed else ""
    except TrimaranError:
        return ""


class _Predictions:
    """Estimates of rows, each made once: a store holds many runs of one layout."""

    def __init__(self) -> None:
        self._known: dict[str, Estimate | None] = {}

    def __call__(self, row: Measurement) -> Estimate | None:
        asked = row.model_dump_json(exclude=_OF_A_RUN)
        if asked not in self._known:
            self._known[asked] = _estimate_of(row)
        return self._known[asked]


def _estimate_of(row: Measurement) -> Estimate | None:
    """What the cost model says of a measured row; None where the row does not say enough for one."""
    try:
        nouns = nouns_of(row)
        return estimate(Case.of(nouns.workload, nouns.cluster, nouns.stack), nouns.layout)
    except TrimaranError:
        return None


def _models(rows: Iterable[Measurement]) -> str:
    shapes = {(size_label(row), row.layers, row.hidden, row.heads) for row in rows}
    if len(shapes) == 1:
        ((size, layers, hidden, heads),) = shapes
        return f"{size}: {layers} layers, hidden {hidden}, {heads} heads"
    return ", ".join(sorted({size for size, *_ in shapes}))


def _count_by_status(rows: Iterable[Measurement]) -> str:
    counts = Counter(row.status for row in rows)
    return ", ".join(f"{count} {status}" for status, count in counts.most_common())
