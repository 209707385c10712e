"""What a page shows: cases (layouts planned or measured) and sentences, as plain data for its script."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from trimaran.cost.case import Case
from trimaran.cost.effects import time_effects
from trimaran.cost.estimate import estimate
from trimaran.cost.estimates import Estimate
from trimaran.cost.memory import parts as memory_parts
from trimaran.files.catalogue import load_cluster
from trimaran.files.row_nouns import nouns_of
from trimaran.layout.axes import DEGREES, devices_of
from trimaran.layout.choices import CHOICE
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import Noun, TrimaranError
from trimaran.report.disturbance import disturbed, others_took
from trimaran.report.layouts import MEASURED
from trimaran.report.measured_rows import size_label
from trimaran.report.planned import counted


def _columns() -> Iterator[tuple[str, str, str, bool]]:
    """The page's columns of a layout: key, title, the word that filters use, and whether it is dull."""
    for choice, heading in MEASURED:
        yield choice.name, heading.title, choice.short or choice.name, heading.dull
        if choice.name == "mbs":
            yield "gbs", "GBS", "gbs", True


class ShownLayout(Noun):
    """One line of the page's table: a layout, what was predicted of it and what was measured.

    `time_s` holds predicted seconds by part, `memory_gib` predicted GiB by part of each stage. What is not
    known is None or empty, and the page leaves out what no case has.
    """

    source: str
    work: str = Field(description="model and cluster: times of different work are not drawn against each other")
    layout: str
    status: str
    nodes: int | None
    devices: int
    gbs: int
    choices: dict[str, int | str] = Field(description="what was chosen, by the name of the layout's field")
    variant: str | None = None
    sec_per_it: float | None = None
    sec_per_it_low: float | None = None
    sec_per_it_high: float | None = None
    predicted_sec_per_it: float | None = None
    mem_gib: float | None = None
    predicted_mem_gib: float | None = None
    tflops: float | None = None
    time_s: dict[str, float] = Field(default_factory=dict)
    memory_gib: tuple[dict[str, float], ...] = ()
    losses: tuple[float, ...] = ()
    notes: str = ""

    @property
    def sec_per_sample(self) -> float:
        """Seconds an iteration over its samples, by which runs of different global batches are compared."""
        return (self.sec_per_it or math.inf) / self.gbs


class Content(Noun):
    """All that a page shows. `mem_limit_gib` is drawn as a line where memory is shown."""

    title: str
    facts: tuple[tuple[str, str], ...]
    sentences: tuple[str, ...]
    cases: tuple[ShownLayout, ...]
    columns: tuple[tuple[str, str, str, bool], ...] = Field(
        default=tuple(_columns()), description="of choices: key, title, word in filters, whether dull where all agree"
    )
    mem_limit_gib: float | None = None
    legend: dict[str, dict[str, str]] = Field(
        default={
            "time_s": {part.name: part.says for part in time_effects.PARTS},
            "memory_gib": {part.name: part.says for part in memory_parts.PARTS},
        },
        description="what each part of time and of memory is",
    )


def plan_content(plan: Mapping[str, Any]) -> Content:
    """The page of a plan, from the JSON that `trimaran plan --format json` prints (docs/json.md).

    Raises TrimaranError naming the key that is not there.
    """
    try:
        return _plan_content(plan)
    except (KeyError, TypeError, AttributeError) as error:
        raise TrimaranError(
            f"plan has no {error} where docs/json.md says: make it anew with `trimaran plan ... --format json`"
        ) from None


def _plan_content(plan: Mapping[str, Any]) -> Content:
    entries: Sequence[Mapping[str, Any]] = plan["layouts"]
    cases = tuple(
        ShownLayout(
            source="plan",
            work=f"{plan['model']} on {plan['cluster']}",
            status="predicted",
            **{key: entry[key] for key in ("layout", "nodes", "devices", "gbs")},
            choices={choice.name: entry[choice.name] for choice, _ in MEASURED},
            sec_per_it=entry["sec_per_it"],
            sec_per_it_low=entry["sec_per_it_low"],
            sec_per_it_high=entry["sec_per_it_high"],
            mem_gib=entry["mem_gib"],
            tflops=entry["tflops"],
            time_s=entry["time_s"],
            memory_gib=tuple({k: v for k, v in stage.items() if k != "stage"} for stage in entry["memory_gib"]),
            notes=entry["bottleneck"],
        )
        for entry in entries
    )
    best = entries[0]
    sentences = [
        f"Best: {best['layout']}, predicted {best['sec_per_it']:.3g} s/it "
        f"({best['sec_per_it_low']:.3g} to {best['sec_per_it_high']:.3g}, {plan['calibrated_by']}) "
        f"and {best['mem_gib']:.1f} GiB.",
        f"Bottleneck: {best['bottleneck']}.",
        f"{counted((entry['precision'], entry['tflops'], entry['mfu']) for entry in entries)}.",
    ]
    if len(plan["measure"]) > 1:
        sentences.append(f"Cannot be told apart; measure these {len(plan['measure'])}: {'; '.join(plan['measure'])}.")
    if plan["advice"]:
        sentences.append(f"Advice: {plan['advice']['sentence']}.")
    return Content(
        title=f"{plan['model']} on {plan['cluster']}",
        facts=(
            ("Model", plan["model"]),
            ("Cluster", plan["cluster"]),
            ("Software", plan["stack"]),
            ("Devices", f"{plan['devices']:,}"),
            ("Layouts evaluated", f"{plan['evaluated']:,}"),
            ("that fit", f"{plan['fitting']:,}"),
        ),
        sentences=tuple(sentences),
        cases=cases,
        mem_limit_gib=_limit_gib(plan["cluster"]),
    )


def measured_content(stores: Mapping[str, Sequence[Measurement]]) -> Content:
    """The page of one store's rows, or of several side by side.

    Raises TrimaranError where there is no row at all.
    """
    rows = [(name, row) for name, measurements in stores.items() for row in measurements]
    if not rows:
        raise TrimaranError(f"no measured rows in {', '.join(stores)}: run `trimaran bench` or `trimaran tune` first")
    first = rows[0][1]
    cases = tuple(_measured_case(name, row) for name, row in rows)
    clusters = sorted({row.cluster for _, row in rows if row.cluster})
    return Content(
        title=" against ".join(stores) if len(stores) > 1 else (first.recipe or next(iter(stores))),
        facts=(
            ("Model", _models(row for _, row in rows)),
            ("Cluster", ", ".join(clusters) or "not stated"),
            ("Software", ", ".join(sorted({row.stack for _, row in rows if row.stack})) or "not stated"),
            ("Runs", _count_by_status(row for _, row in rows)),
        ),
        sentences=tuple(
            _sentence_on(name, works) for name, measurements in stores.items() for works in _by_work(measurements)
        ),
        cases=cases,
        mem_limit_gib=_limit_gib(clusters[0]) if len(clusters) == 1 else None,
    )


def _measured_case(source: str, row: Measurement) -> ShownLayout:
    predicted = _estimate_of(row)
    choices = _choices_of(row)
    parts: dict[str, Any] = {}
    if predicted is not None:
        stages = (stage.model_dump(exclude={"stage"}) for stage in predicted.memory)
        parts = {"time_s": predicted.time.model_dump(), "memory_gib": tuple(stages)}
    return ShownLayout(
        source=source,
        work=_work(row),
        layout=_layout_of(row),
        nodes=row.nodes,
        devices=row.devices or devices_of(choices),
        gbs=row.gbs,
        choices=choices,
        **parts,
        status=row.status,
        variant=row.variant,
        sec_per_it=row.sec_per_it,
        predicted_sec_per_it=row.predicted_sec_per_it or (predicted.sec_per_it if predicted else None),
        mem_gib=row.mem_gib,
        predicted_mem_gib=row.predicted_mem_gib or (predicted.reported_mem_gib if predicted else None),
        tflops=row.tflops,
        losses=row.losses,
        notes="; ".join(filter(None, (row.notes, others_took(row)))),
    )


def _choices_of(row: Measurement) -> dict[str, Any]:
    return {choice.name: getattr(row, choice.name) for choice, _ in MEASURED} | {"dp": row.dp or 1}


def _layout_of(row: Measurement) -> str:
    """The row's layout in short notation; one from a table has no label of its own."""
    words = (CHOICE[name].word.writes(_choices_of(row)) for name in (*DEGREES, "mbs"))
    return row.layout_label or ",".join(filter(None, words))


def _estimate_of(row: Measurement) -> Estimate | None:
    """What the cost model says of a measured row; None where the row does not say enough for one."""
    try:
        nouns = nouns_of(row)
        return estimate(Case.of(nouns.workload, nouns.cluster, nouns.stack), nouns.layout)
    except TrimaranError:
        return None


def _work(row: Measurement) -> str:
    return f"{size_label(row)} on {row.cluster or row.hardware or 'an unnamed cluster'}"


def _by_work(rows: Sequence[Measurement]) -> list[list[Measurement]]:
    groups: dict[str, list[Measurement]] = {}
    for row in rows:
        groups.setdefault(_work(row), []).append(row)
    return list(groups.values())


def _sentence_on(name: str, rows: Sequence[Measurement]) -> str:
    """One sentence on a store's rows: the fastest, how far off the predictions were, and what disturbed the runs."""
    timed = [row for row in rows if row.status == "ok" and row.sec_per_it]
    if not timed:
        return f"{name}, {_work(rows[0])}: none of {len(rows)} runs was timed."
    # rows of different work are compared by the time of a sample
    best = min(timed, key=lambda row: (row.sec_per_it or 0.0) / row.gbs)
    sentence = f"{name}, {_work(rows[0])}: fastest of {len(timed)} timed runs is {_layout_of(best)}"
    sentence += f", {best.sec_per_it:.3g} s/it"
    errors = [
        abs(row.predicted_sec_per_it / row.sec_per_it - 1)
        for row in timed
        if row.predicted_sec_per_it and row.sec_per_it
    ]
    off = f"predictions were off by {sum(errors) / len(errors):.1%} on average" if errors else None
    return "; ".join(filter(None, (sentence, off, disturbed(timed)))) + "."


def _models(rows: Iterable[Measurement]) -> str:
    shapes = {(size_label(row), row.layers, row.hidden, row.heads) for row in rows}
    if len(shapes) == 1:
        ((size, layers, hidden, heads),) = shapes
        return f"{size}: {layers} layers, hidden {hidden}, {heads} heads"
    return ", ".join(sorted({size for size, *_ in shapes}))


def _count_by_status(rows: Iterable[Measurement]) -> str:
    counts = Counter(row.status for row in rows)
    return ", ".join(f"{count} {status}" for status, count in counts.most_common())


def _limit_gib(cluster: str) -> float | None:
    """Memory of one device of a cluster that can be looked up by its name or file."""
    try:
        return load_cluster(cluster).device.mem_gib
    except TrimaranError:
        return None
