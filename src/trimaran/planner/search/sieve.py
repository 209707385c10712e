"""Sieve: asks the rules of trimaran.layout.rules about many layouts at once.

A rule says which fields decide it, so it is asked once for each distinct combination of those, and
its answer holds for every candidate with that combination. Nothing here decides validity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from trimaran.cost.grid import Bools, Ints, distinct
from trimaran.layout.choices import APART, CHOICE
from trimaran.layout.layout import Layout
from trimaran.layout.rules import RULES, Rule
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload
from trimaran.planner.search.batches import with_batch

# Partial candidates: columns of equal length, named as LayoutGrid's fields.
Columns = dict[str, Ints]

_PLAIN: dict[str, object] = Layout().__dict__


@dataclass
class Sieve:
    """Lets valid candidates through and remembers what the rules said of the others."""

    workload: Workload
    cluster: Cluster
    stack: Stack
    # The first rule that left nothing of what it was asked about, and one of the candidates it refused.
    emptied: tuple[Rule, dict[str, int]] | None = None
    # By rule and combination of what it reads: None where it is content, else one refused candidate's fields.
    _asked: dict[str, dict[tuple[int, ...], dict[str, int] | None]] = field(default_factory=dict)

    def keep(self, columns: Columns, *, known: tuple[frozenset[str], ...] = ()) -> Columns:
        """Candidates that break no rule decidable from `columns`; rules on fields of one of `known` are not asked."""
        valid = np.ones(count(columns), dtype=np.bool_)
        for rule in RULES:
            reads = _fields(rule)
            # Nobody proposes lists that a rule could refuse.
            reads -= APART
            if reads <= set(columns) and not any(reads <= fields for fields in known):
                passes = self._passes(rule, columns, valid)
                if valid.any() and not passes.any() and self.emptied is None:
                    row = int(np.flatnonzero(valid)[0])
                    self.emptied = rule, {name: int(values[row]) for name, values in columns.items()}
                valid = passes
        return take(columns, valid)

    def refusal(self, rule: Rule, columns: Columns) -> str | None:
        """What a rule says of one of the candidates, where it refuses them all.

        A few from all over are asked about first, since one that passes is enough.
        """
        for step in (max(1, count(columns) // 64), 1):
            some = take(columns, slice(None, None, step))
            if self._passes(rule, some, np.ones(count(some), dtype=np.bool_)).any():
                return None
        return self.sentence(rule, {name: int(values[0]) for name, values in columns.items()})

    def refused(self) -> dict[str, list[dict[str, int]]]:
        """For each rule that refused something, one candidate's fields per refused combination."""
        examples = {name: [fields for fields in asked.values() if fields] for name, asked in self._asked.items()}
        return {name: members for name, members in examples.items() if members}

    def sentence(self, rule: Rule, fields: Mapping[str, int]) -> str | None:
        """What a rule says of one candidate: its sentence, or None where the rule is content."""
        chosen = {name: CHOICE[name].value(number) for name, number in fields.items() if name in CHOICE}
        # Thousands are asked about, and rules read fields alone: no need to make it as pydantic does.
        layout = object.__new__(Layout)
        layout.__dict__.update(_PLAIN, **chosen)
        workload = self._with_batch(fields.get("global_batch", self.workload.global_batch))
        return rule.broken(layout, workload, self.cluster, self.stack)

    def _passes(self, rule: Rule, columns: Columns, alive: Bools) -> Bools:
        index = np.flatnonzero(alive)
        keys = [_product(columns, term)[index] for term in rule.reads if term not in APART]
        if "global_batch" in columns and "dp*mbs" in rule.reads:
            keys.append(columns["global_batch"][index])
        if not keys:
            keys.append(np.zeros_like(index))
        first, inverse = distinct(keys)
        names = [name for name in (*_fields(rule), "global_batch") if name in columns]
        asked = self._asked.setdefault(rule.name, {})
        answers = np.empty(len(first), dtype=np.bool_)
        for position, (key, row) in enumerate(zip(np.stack(keys)[:, first].T.tolist(), index[first], strict=True)):
            combination = tuple(key)
            if combination not in asked:
                fields = {name: int(columns[name][row]) for name in names}
                asked[combination] = None if self.sentence(rule, fields) is None else fields
            answers[position] = asked[combination] is None
        passes = np.zeros(len(alive), dtype=np.bool_)
        passes[index] = answers[inverse]
        return passes

    @cached_property
    def _workloads(self) -> dict[int, Workload]:
        return {self.workload.global_batch: self.workload}

    def _with_batch(self, batch: int) -> Workload:
        """The workload under another global batch (checked by whoever proposes the batch)."""
        if batch not in self._workloads:
            self._workloads[batch] = with_batch(self.workload, batch)
        return self._workloads[batch]


def count(rows: Columns) -> int:
    """How many candidates there are."""
    return len(next(iter(rows.values())))


def take(rows: Columns, index: Bools | Ints | slice) -> Columns:
    """The candidates at `index`, a mask or positions."""
    return {name: values[index] for name, values in rows.items()}


def cross(*parts: Columns) -> Columns:
    """Every combination of the rows of the parts; one without columns has nothing to combine."""
    parts = tuple(part for part in parts if part)
    sizes = [len(next(iter(part.values()))) for part in parts]
    rows: Columns = {}
    for position, part in enumerate(parts):
        inner = math.prod(sizes[position + 1 :])
        outer = math.prod(sizes[:position])
        rows |= {name: np.tile(np.repeat(values, inner), outer) for name, values in part.items()}
    return rows


def join(left: Columns, right: Columns, on: str) -> Columns:
    """Every pair of a row of `left` and a row of `right` that agree in the column `on`."""
    order = np.argsort(right[on], kind="stable")
    keys = right[on][order]
    start = np.searchsorted(keys, left[on], side="left")
    count = np.searchsorted(keys, left[on], side="right") - start
    rows = np.repeat(np.arange(len(count)), count)
    offset = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    matched = order[np.repeat(start, count) + offset]
    taken = {name: values[rows] for name, values in left.items()}
    return taken | {name: values[matched] for name, values in right.items() if name != on}


def _fields(rule: Rule) -> set[str]:
    return {name for term in rule.reads for name in term.split("*")}


def _product(columns: Columns, term: str) -> Ints:
    return np.asarray(np.prod([columns[name] for name in term.split("*")], axis=0))
