"""Answers to the questions that rows ask: each once, and those together that differ in layout and batch alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trimaran.cost.calibration import Calibration, prior, resolve_calibration
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate, estimate_each
from trimaran.cost.estimates import Estimate
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.placed.topology import differs
from trimaran.files.row_as_run import known_or_given
from trimaran.files.row_nouns import Nouns, nouns_of
from trimaran.nouns.columns import BY_NAME, FIGURES
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.stack import FOLDED

# Columns that no prediction depends on: where a row comes from, and what its run showed.
_SHOWED = {
    *FIGURES, "source", "section", "table", "row", "status", "flops_formula", "comparable_group", "quality",
}  # fmt: skip
# Rows that agree in these ask the same.
ASKED = tuple(name for name in BY_NAME if name not in _SHOWED)
# Of those, columns of the layout and the batch alone, in which rows may differ that are predicted at once. What has a
# part in telling the model, the cluster or the stack, as `tp` and `precision` have, is none of them.
_OF_A_LAYOUT = {
    "nodes",
    "devices",
    "dp",
    "pp",
    "vpp",
    "mbs",
    "gbs",
    "zero_stage",
    "recompute",
    "schedule",
    "layout_label",
}
_OF_A_BATCH = tuple(name for name in ASKED if name not in _OF_A_LAYOUT)
# Of a batch so many are predicted together: their stages' memory is held at once, and more are no quicker.
_TOGETHER = 512
# Ranks of the deepest folded pipeline that is played, which takes about two seconds.
_DEEPEST_FOLDED = 64

_Key = tuple[object, ...]


@dataclass(frozen=True)
class Asked:
    """What a row asks: what it speaks of, and what is odd about it. Such of one `batch` differ in their layouts."""

    nouns: Nouns
    notes: tuple[str, ...]
    case: Case
    batch: _Key

    @property
    def played(self) -> bool:
        """Whether its pipeline is played, as plans play theirs: the closed form of uneven and short ones is worse.

        A folded one of more ranks than models have stages for may take minutes to play.
        """
        layout = self.nouns.layout
        return 1 < layout.pp <= (_DEEPEST_FOLDED if layout.schedule in FOLDED else layout.pp)

    def sharing(self, first: Asked) -> Asked:
        """The same with the model, the cluster and the stack of the first of its batch, so that one copy is held."""
        model = {"model": first.nouns.workload.model}
        workload = self.nouns.workload.model_copy(update=model)
        nouns = replace(self.nouns, workload=workload, cluster=first.nouns.cluster, stack=first.nouns.stack)
        return replace(self, nouns=nouns, case=first.case.with_workload(workload))


@dataclass(frozen=True)
class Question:
    """What is asked of every row of a table, besides what the row states."""

    cluster: str | None
    stack: str | None
    calibration: Calibration | None
    priors_only: bool

    def asked(self, stated: Measurement) -> Asked | TrimaranError:
        """What the row asks, or why that has no answer."""
        try:
            stated, foreign = known_or_given(stated, self.cluster, self.stack)
            nouns = nouns_of(stated, self.cluster, self.stack)
            notes = (*foreign, *nouns.oddities())
            plain = prior(nouns.cluster, nouns.stack)
            known = plain if self.priors_only else resolve_calibration(nouns.cluster, nouns.stack, self.calibration)
            case = Case.of(nouns.workload, nouns.cluster, nouns.stack, known.on_day(stated.date))
        except TrimaranError as error:
            return error
        return Asked(nouns, notes, case, _key(stated, _OF_A_BATCH))


Answer = tuple[Asked, Estimate]


def _answers(asked: Mapping[_Key, Asked | TrimaranError]) -> dict[_Key, Answer | TrimaranError]:
    """Every question's answer. Those that differ in their layouts alone are answered at once, which is far quicker."""
    answers: dict[_Key, Answer | TrimaranError] = {}
    batches: dict[_Key, list[_Key]] = defaultdict(list)
    for key, each in asked.items():
        if isinstance(each, TrimaranError):
            answers[key] = each
        else:
            batches[*each.batch, each.played].append(key)
    for keys in batches.values():
        for start in range(0, len(keys), _TOGETHER):
            some = keys[start : start + _TOGETHER]
            members = [each for key in some if isinstance(each := asked[key], Asked)]
            answers |= zip(some, _answers_of_batch(members), strict=True)
    return answers


def _answers_of_batch(members: Sequence[Asked]) -> list[Answer | TrimaranError]:
    first, layouts = members[0], [each.nouns.layout for each in members]
    if len(members) == 1 or differs(first.case.cluster) or any(layout.placed for layout in layouts):
        return [_answer(each) for each in members]
    grid = LayoutGrid.from_layouts(layouts, first.case.workload, first.case.stack)
    grid = grid.with_global_batch([each.case.workload.global_batch for each in members])
    try:
        return list(zip(members, estimate_each(first.case, grid, simulate=first.played), strict=True))
    except TrimaranError:  # one of them has no answer
        return [_answer(each) for each in members]


def _answer(asked: Asked) -> Answer | TrimaranError:
    try:
        return asked, estimate(asked.case, asked.nouns.layout, simulate=asked.played)
    except TrimaranError as error:
        return error


def answers_of(rows: Sequence[Measurement | None], question: Question) -> list[Answer | TrimaranError | None]:
    """The answer to each row, or why it has none; None where there is no row."""
    asked: dict[_Key, Asked | TrimaranError] = {}
    firsts: dict[_Key, Asked] = {}
    keys = [None if row is None else _key(row, ASKED) for row in rows]
    for row, key in zip(rows, keys, strict=True):
        if row is not None and key is not None and key not in asked:
            each = question.asked(row)
            asked[key] = each if isinstance(each, TrimaranError) else each.sharing(firsts.setdefault(each.batch, each))
    answers = _answers(asked)
    return [None if key is None else answers[key] for key in keys]


def _key(stated: Measurement, names: Sequence[str]) -> _Key:
    return tuple(getattr(stated, name) for name in names)
