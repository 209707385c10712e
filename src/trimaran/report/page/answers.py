"""What a page says first: which layout is fastest, how sure that is, and what to do next."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from pydantic import Field

from trimaran.layout.axes import DEGREES, devices_of
from trimaran.layout.choices import CHOICE
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import Noun
from trimaran.nouns.text import figure
from trimaran.report.disturbance import disturbed
from trimaran.report.layouts import MEASURED
from trimaran.report.measured_rows import size_label

# Layouts that ended without a time are named where the cost model held them to be faster; so many at most.
NAMED = 3


class Answer(Noun):
    """The answer of one source for one model on one cluster, as sentences."""

    source: str
    work: str
    fastest: str
    sure: str
    next: str = Field(description="what to do with it, or to be surer")


class _Timed(NamedTuple):
    """A layout's runs: seconds of a sample, its middle run, and by how much of it runs differ, None where unknown."""

    layout: str
    pace_s: float
    row: Measurement
    runs: int
    scatter: float | None


def answer_of_plan(plan: Mapping[str, Any]) -> Answer:
    """The answer of a plan, from its JSON. Raises KeyError where it lacks a key."""
    best, measure = plan["layouts"][0], plan["measure"]
    alike = plan["cannot_tell_apart"]
    sure = f"{figure(best['sec_per_it_low'])} to {figure(best['sec_per_it_high'])} s/it ({plan['calibrated_by']})"
    if alike > 1:
        more = " or more" if alike == len(plan["layouts"]) else ""
        sure += f". {alike}{more} layouts cannot be told apart: predictions err by {plan['time_error']:.0%}"
    todo = f"Measure these {len(measure)}: {'; '.join(measure)}." if len(measure) > 1 else "Train with it."
    if plan["advice"]:
        todo += f" Advice: {plan['advice']['sentence']}."
    return Answer(
        source="plan",
        work=f"{plan['model']} on {plan['cluster']}",
        fastest=f"{_unplaced(best['layout'])}, predicted {figure(best['sec_per_it'])} s/it and "
        f"{best['mem_gib']:.2f} GiB",
        sure=f"{sure}.",
        next=todo,
    )


def _unplaced(layout: str) -> str:
    """A layout without the device of every rank, which the table and the map have."""
    return ",".join(word for word in layout.split(",") if not re.fullmatch(CHOICE["placed"].word.pattern, word))


def answer_of_rows(source: str, rows: Sequence[Measurement]) -> Answer:
    """The answer of measured rows of one work; those of different global batches are compared by a sample's time."""
    timed = sorted(_timed(rows), key=lambda layout: layout.pace_s)
    ended = Counter(str(row.status) for row in rows if row.status != "ok")
    if not timed:
        return Answer(
            source=source,
            work=work_of(rows[0]),
            fastest=f"None of {len(rows)} runs was timed: {_counts(ended) or 'they state no time'}",
            sure="Nothing was measured.",
            next="`trimaran plan` names layouts that fit; measure those.",
        )
    best = timed[0]
    memory = f" and {best.row.mem_gib:.2f} GiB" if best.row.mem_gib is not None else ""
    return Answer(
        source=source,
        work=work_of(rows[0]),
        fastest=f"{_unplaced(best.layout)}, {figure(best.row.sec_per_it or 0.0)} s/it{memory}",
        sure=" ".join(filter(None, (_standing(timed), _scored(rows), _disturbance(rows)))),
        next=_next(timed, rows),
    )


def _disturbance(rows: Sequence[Measurement]) -> str:
    """What other programs took of the cores meanwhile, as a sentence, or nothing."""
    said = disturbed([row for row in rows if row.status == "ok" and row.sec_per_it])
    return f"{said[0].upper()}{said[1:]}." if said else ""


def layout_of(row: Measurement) -> str:
    """The row's layout in short notation; one from a table has no label of its own."""
    known = choices_of(row)
    words = (CHOICE[name].word.writes(known) for name in (*DEGREES, "mbs") if known[name] is not None)
    return row.layout_label or ",".join(filter(None, words))


def choices_of(row: Measurement) -> dict[str, Any]:
    """What was chosen of a row's layout, by the name of the layout's field; None where a log does not state it."""
    known = {choice.name: choice.stated(getattr(row, choice.name)) for choice, _ in MEASURED}
    if row.dp is None and row.devices and not any(known[name] is None for name in DEGREES if name != "dp"):
        replica = devices_of(known, without="dp")
        known["dp"] = row.devices // replica if row.devices % replica == 0 else None
    return known


def devices_known(row: Measurement) -> int | None:
    """The devices that a row states or that all its degrees give."""
    known = choices_of(row)
    given = None if any(known[name] is None for name in DEGREES) else devices_of(known)
    return row.devices or given


def work_of(row: Measurement) -> str:
    """The model's size, the tokens of a sequence and the cluster: times of different work are not compared."""
    where = row.cluster or row.hardware or "an unnamed cluster"
    return f"{size_label(row)} of {row.seq_len:,} tokens on {where}"


def by_work(rows: Sequence[Measurement]) -> list[list[Measurement]]:
    """The rows of each work together."""
    groups: dict[str, list[Measurement]] = {}
    for row in rows:
        groups.setdefault(work_of(row), []).append(row)
    return list(groups.values())


def _timed(rows: Sequence[Measurement]) -> Iterator[_Timed]:
    """Every layout that was timed; runs under another variant or global batch are another layout's."""
    groups: dict[tuple[object, ...], list[tuple[float, Measurement]]] = {}
    for row in rows:
        if row.status == "ok" and row.sec_per_it and row.gbs:
            # two rows are runs of one layout where all that was chosen and asked is the same
            work = (row.variant, row.gbs, row.devices, row.layers, row.hidden, row.seq_len, row.network_gbps)
            what = (layout_of(row), *work, row.network_delay_ms, row.comparable_group, *choices_of(row).values())
            groups.setdefault(what, []).append((row.sec_per_it, row))
    for (layout, variant, *_), runs in groups.items():
        runs.sort(key=lambda run: run[0])
        seconds, middle = runs[(len(runs) - 1) // 2]
        steps = [row.sec_per_it_spread / 2 / took for took, row in runs if row.sec_per_it_spread is not None]
        scatter = max(steps, default=None)
        if len(runs) > 1:
            scatter = max(scatter or 0.0, (runs[-1][0] - runs[0][0]) / 2 / seconds)
        name = f"{layout} ({variant})" if variant else str(layout)
        yield _Timed(name, seconds / (middle.gbs or 1), middle, len(runs), scatter)


def _lead(timed: Sequence[_Timed]) -> float:
    """By how much of the best's time the second is slower."""
    return timed[1].pace_s / timed[0].pace_s - 1


def _noise(timed: Sequence[_Timed]) -> float | None:
    """By how much the first two differ from run to run, together; None where no run says."""
    known = [layout.scatter for layout in timed[:2] if layout.scatter is not None]
    return sum(known) if known else None


def _tied(timed: Sequence[_Timed]) -> bool:
    noise = _noise(timed)
    return len(timed) > 1 and noise is not None and _lead(timed) <= noise


def _standing(timed: Sequence[_Timed]) -> str:
    """The winner beside the second, and beside what measuring twice would change."""
    runs = f"measured {timed[0].runs} times" if timed[0].runs > 1 else "measured once"
    if len(timed) == 1:
        return f"It is the only layout that was timed, {runs}."
    second, noise, lead = timed[1], _noise(timed), _lead(timed)
    said = f"{runs.capitalize()}; the second of {len(timed)}, {second.layout}, takes {lead:.1%} longer"
    if noise is None:
        return f"{said}; no run says by how much times scatter."
    return f"{said}, {'within' if _tied(timed) else 'beyond'} the {noise:.1%} by which their times scatter."


def _scored(rows: Sequence[Measurement]) -> str:
    errors = [
        abs(row.predicted_sec_per_it / row.sec_per_it - 1)
        for row in rows
        if row.status == "ok" and row.predicted_sec_per_it and row.sec_per_it
    ]
    return f"Predictions were off by {fmean(errors):.1%} on average over {len(errors)} runs." if errors else ""


def _next(timed: Sequence[_Timed], rows: Sequence[Measurement]) -> str:
    best = timed[0]
    if len(timed) == 1:
        return "Measure others beside it: `trimaran plan` names those worth it, `trimaran bench` runs them."
    if _tied(timed):
        return f"Measure {best.layout} and {timed[1].layout} again, longer: `trimaran bench` with more steps."
    promised = {
        f"{layout_of(row)} ({row.status})": None
        for row in rows
        if row.status != "ok" and row.predicted_sec_per_it and row.predicted_sec_per_it / (row.gbs or 1) < best.pace_s
    }
    if promised:
        return f"Look why these ended, which were predicted to be faster: {'; '.join([*promised][:NAMED])}."
    return "Train with it (`trimaran train`), or let `trimaran tune` look for a faster one among those not measured."


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {status}" for status, count in counts.most_common())
