"""Predict: a whole table of rows, each answered, with a note where it is odd, or refused; and scored by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trimaran.cost.calibration import Calibration
from trimaran.cost.estimates import Estimate
from trimaran.cost.score import Score, score
from trimaran.cost.table.row_answers import ASKED, Answer, Question, answers_of
from trimaran.files.frames import FrameLibrary, frame_of, html_table
from trimaran.files.row_nouns import formula_of, seconds_of, with_usual_mbs
from trimaran.files.row_table import Row, Table
from trimaran.layout.flops import tflops_per_device
from trimaran.nouns.columns import BY_NAME, FIT_QUALITIES
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError

PREDICTED_COLUMNS = (
    "predicted_sec_per_it",
    "predicted_low_sec_per_it",
    "predicted_high_sec_per_it",
    "predicted_tflops",
    "predicted_mem_gib",
    "predicted_fits",
    "predicted_error",
    "predicted_note",
)
# What a notebook's table shows of a row.
_SHOWN = (
    "row_number", "cluster", "devices", "dp", "tp", "pp", "mbs", "gbs", "sec_per_it", "predicted_sec_per_it", "mem_gib",
    "predicted_mem_gib", "predicted_error",
)  # fmt: skip
# Rows that agree in these are repeats of one configuration: in all that they ask but for words and days.
_WORDS = ("system", "hardware", "notes", "date")
CONFIGURATION = ("comparable_group", *(name for name in ASKED if name not in _WORDS))
ALL_ROWS = "all rows"
UNGROUPED = "(no group)"


@dataclass(frozen=True, repr=False)
class PredictedRow:
    """One row's answer: an Estimate with the TFLOPs of the row's own formula, or the reason for none.

    `notes` say what is odd about a run that was answered: what its stack or cluster is not known to do. `seconds` of an
    iteration are those that were measured, or follow from the row's tokens a second or TFLOPs.
    """

    row: Row
    estimate: Estimate | None
    tflops: float | None
    error: str | None
    notes: tuple[str, ...] = ()
    seconds: float | None = None

    def cells(self) -> dict[str, str]:
        """The columns that predict adds, as CSV cells; two of three such runs lie between low and high."""
        answer = self.estimate
        if answer is None:
            return dict.fromkeys(PREDICTED_COLUMNS, "") | {"predicted_error": self.error or ""}
        return {
            "predicted_sec_per_it": f"{answer.sec_per_it:.6g}",
            "predicted_low_sec_per_it": f"{answer.between[0]:.6g}",
            "predicted_high_sec_per_it": f"{answer.between[1]:.6g}",
            "predicted_tflops": "" if self.tflops is None else f"{self.tflops:.6g}",
            "predicted_mem_gib": f"{answer.reported_mem_gib:.6g}",
            "predicted_fits": str(answer.fits).lower(),
            "predicted_error": "",
            "predicted_note": "; ".join(self.notes),
        }

    def __repr__(self) -> str:
        if self.estimate is None:
            return f"<row {self.row.number}: {self.error}>"
        return (
            f"<row {self.row.number}: {self.estimate.sec_per_it:.4g} s/it, {self.estimate.mem_gib:.4g} GiB predicted>"
        )

    def record(self) -> dict[str, Any]:
        """The row as plain values: what was stated of it, what was measured, and what is predicted."""
        stated = {} if self.row.answerable is None else vars(self.row.answerable)
        answer = self.estimate
        return {
            "row_number": self.row.number,
            **{name: stated.get(name) for name in BY_NAME},
            "predicted_sec_per_it": answer and answer.sec_per_it,
            "predicted_low_sec_per_it": answer and answer.between[0],
            "predicted_high_sec_per_it": answer and answer.between[1],
            "predicted_tflops": self.tflops,
            "predicted_mem_gib": answer and answer.reported_mem_gib,
            "predicted_fits": answer and answer.fits,
            "predicted_error": self.error,
            "predicted_note": "; ".join(self.notes) or None,
        }


class Predictions(list[PredictedRow]):
    """The rows of a table, each answered or refused, in the table's order."""

    def __repr__(self) -> str:
        answered = sum(row.estimate is not None for row in self)
        return f"<Predictions of {len(self)} rows: {answered} answered, {len(self) - answered} refused>"

    def to_frame(self, library: FrameLibrary | None = None) -> Any:
        """The rows as a DataFrame of pandas or polars, with the columns of the table and those that are predicted.

        Of the library that is installed, unless one is named. Raises TrimaranError where there is none.
        """
        return frame_of([row.record() for row in self], library)

    def _repr_html_(self) -> str:
        return html_table([{key: row.record()[key] for key in _SHOWN} for row in self], repr(self).strip("<>"))


@dataclass(frozen=True)
class GroupScore:
    """Scores of one comparable group: time, memory, and how out-of-memory runs were told."""

    group: str
    time: Score | None
    memory: Score | None
    oom_rows: int
    oom_found: int
    false_alarms: int


def predict_table(
    table: Table,
    *,
    cluster: str | None = None,
    stack: str | None = None,
    calibration: Calibration | None = None,
    priors_only: bool = False,
) -> list[PredictedRow]:
    """Answer every row that is possible. The row's own cluster and stack win over the arguments.

    Without `calibration` the shipped one of the row's (cluster, stack) applies, unless `priors_only`.
    """
    asked = Question(cluster, stack, calibration, priors_only)
    rows = [
        replace(row, supposed=with_usual_mbs(row.supposed, stack)) if row.supposed and "mbs" in row.assumed else row
        for row in table.rows
    ]
    return [
        PredictedRow(row, None, None, row.error) if answer is None else _predicted_row(row, answer)
        for row, answer in zip(rows, answers_of([row.answerable for row in rows], asked), strict=True)
    ]


def _predicted_row(row: Row, answer: Answer | TrimaranError) -> PredictedRow:
    stated = row.answerable
    assert stated is not None
    if isinstance(answer, TrimaranError):
        return PredictedRow(row, None, None, str(answer))
    asked, predicted = answer
    nouns, notes = asked.nouns, (*row.readings, *asked.notes)
    if row.measurement is None:
        assumed = ", ".join(f"{name} is empty: counted as {getattr(stated, name)}" for name in row.assumed)
        notes = (f"{assumed or (row.error or '').partition(': ')[2]}, and not scored", *notes)
    formula, tflops = formula_of(stated, nouns), None
    if formula is not None:
        devices = nouns.layout.devices
        tflops = tflops_per_device(nouns.workload, nouns.layout.tp, devices, predicted.sec_per_it, formula)
    return PredictedRow(row, predicted, tflops, None, notes, seconds_of(stated, nouns))


def score_groups(predictions: Sequence[PredictedRow]) -> list[GroupScore]:
    """Scores per comparable group and, last, over all rows; empty where nothing was measured."""
    answered = [p for p in predictions if p.estimate is not None and _fit_for_scoring(p)]
    groups: dict[str, list[PredictedRow]] = {}
    for prediction in answered:
        groups.setdefault(_measurement(prediction).comparable_group or UNGROUPED, []).append(prediction)
    scores = [group_score for name, members in groups.items() if (group_score := _score_group(name, members))]
    total = _score_group(ALL_ROWS, answered)
    if total is None:
        return []
    # rows of different groups may not be ranked against each other
    if total.time is not None and len(scores) > 1:
        total = replace(total, time=replace(total.time, tau=None, regret=None))
    return [*scores, total] if len(scores) > 1 else [total]


def _fit_for_scoring(prediction: PredictedRow) -> bool:
    return prediction.row.measurement is not None and _measurement(prediction).quality in FIT_QUALITIES


def _measurement(prediction: PredictedRow) -> Measurement:
    row = prediction.row.measurement
    assert row is not None
    return row if row.sec_per_it == prediction.seconds else row.model_copy(update={"sec_per_it": prediction.seconds})


def _score_group(name: str, members: Sequence[PredictedRow]) -> GroupScore | None:
    rows = [(_measurement(p), p.estimate) for p in members if p.estimate is not None]
    timed = [(m, e) for m, e in rows if m.sec_per_it is not None and m.status == "ok"]
    weighed = [(m, e) for m, e in rows if m.mem_gib is not None and m.status == "ok"]
    ooms = [e for m, e in rows if m.status == "oom"]
    if not (timed or weighed or ooms):
        return None
    return GroupScore(
        group=name,
        time=_score_times(timed),
        memory=score([e.reported_mem_gib for _, e in weighed], [m.mem_gib or 0.0 for m, _ in weighed])
        if weighed
        else None,
        oom_rows=len(ooms),
        oom_found=sum(not e.fits for e in ooms),
        false_alarms=sum(not e.fits for m, e in rows if m.status == "ok"),
    )


def _score_times(timed: Sequence[tuple[Measurement, Estimate]]) -> Score | None:
    """Time scores, repeats of one configuration averaged first."""
    if not timed:
        return None
    repeats: dict[tuple[object, ...], list[tuple[Measurement, Estimate]]] = {}
    for m, e in timed:
        repeats.setdefault(tuple(getattr(m, name) for name in CONFIGURATION), []).append((m, e))
    measured = [sum(m.sec_per_it or 0.0 for m, _ in same) / len(same) for same in repeats.values()]
    predicted = [same[0][1].sec_per_it for same in repeats.values()]
    work = [float(same[0][0].gbs) for same in repeats.values()]
    return score(predicted, measured, work)
