"""Plan: layouts ranked by estimate with their intervals, and the rejected ones with their reasons."""

from __future__ import annotations

from typing import Any

from trimaran.cost.estimates import Estimate
from trimaran.files.frames import FrameLibrary, frame_of, html_table
from trimaran.layout.choices import IN_GRID
from trimaran.layout.layout import Layout
from trimaran.nouns.noun import Noun
from trimaran.planner.explain.advice import Advice
from trimaran.planner.search.objective import EQUAL, Objective

# An entry that beats the first with at least this chance cannot be told apart from it.
RIVAL_CHANCE = 0.25


class Entry(Noun):
    """One ranked layout: what it costs in time, memory and money.

    `sec_per_it_low` and `_high` bound the prediction at one standard error; `rival_chance` is the
    chance that this layout is better than the first; `variants` counts the layouts that fit and
    differ in placement or stage split alone, which rank as one (the best of them is shown).
    """

    rank: int
    layout: Layout
    devices: int
    nodes: int
    global_batch: int
    estimate: Estimate
    sec_per_it_low: float
    sec_per_it_high: float
    tokens_per_s: float
    tflops: float
    flops_formula: str
    mfu: float
    days: float | None
    cost: float | None
    cost_per_million_tokens: float | None
    rival_chance: float
    variants: int
    bottleneck: str

    @property
    def sec_per_it(self) -> float:
        """Predicted seconds of one iteration."""
        return self.estimate.sec_per_it

    @property
    def mem_gib(self) -> float:
        """Predicted memory of the fullest rank, GiB."""
        return self.estimate.mem_gib

    def __repr__(self) -> str:
        return f"<{self.rank}: {self.layout}, {self.sec_per_it:.4g} s/it, {self.mem_gib:.4g} GiB, {self.mfu:.1%} MFU>"

    __str__ = __repr__

    def record(self) -> dict[str, Any]:
        """The entry as one row of plain values: seconds, GiB, TFLOPs; what was not asked for is None."""
        choices = {c.name: getattr(self.layout, c.name) for c in IN_GRID if c.heading}
        whole = self.model_dump(exclude={"layout", "estimate", "bottleneck"})
        return {
            "rank": self.rank,
            "layout": str(self.layout),
            **choices,
            "sec_per_it": self.sec_per_it,
            "mem_gib": self.mem_gib,
            **whole,
            "bottleneck": self.bottleneck,
        }


# What a notebook's table shows of an entry.
_SHOWN = (
    "rank", "layout", "devices", "sec_per_it", "sec_per_it_low", "sec_per_it_high", "mem_gib", "tflops", "mfu", "days",
    "cost",
)  # fmt: skip


class Refusal(Noun):
    """Why candidates fell out: the rule, how many combinations of the fields it reads, and one of them."""

    rule: str
    fields: tuple[str, ...]
    combinations: int
    example: str


class Unfit(Noun):
    """A layout that would rank but does not fit: its estimate and the sentence that says what is too much."""

    layout: Layout
    estimate: Estimate
    sentence: str


class Plan(Noun):
    """The answer of a search. `software` says in words what `stack` stands for.

    `evaluated` layouts broke no rule and had their memory and time predicted, `fitting` of them fit; the
    others could not enter the ranking, by a bound on memory or time, or were refused. `measure` are the
    layouts to measure in order to know the best: the first and what cannot be told apart from it.
    """

    model: str
    seq_len: int
    cluster: str
    stack: str
    software: str
    devices: int
    objective: Objective
    mem_margin: float
    calibrated_by: str
    time_error: float
    entries: tuple[Entry, ...]
    measure: tuple[Layout, ...]
    cannot_tell_apart: int
    evaluated: int
    fitting: int
    refusals: tuple[Refusal, ...]
    nearest_unfit: Unfit | None
    advice: Advice | None
    notes: tuple[str, ...]

    @property
    def best(self) -> Entry:
        """The first entry; a plan always has one, since a search without any raises."""
        return self.entries[0]

    @property
    def fastest_equal(self) -> Entry:
        """The fastest of the entries that are as good as the first: on as many devices, of the same global batch.

        Another than the first where that is the plainest of them.
        """
        best = self.best
        like = (e for e in self.entries if (e.devices, e.global_batch) == (best.devices, best.global_batch))
        return min((e for e in like if best.sec_per_it <= e.sec_per_it * EQUAL), key=lambda entry: entry.sec_per_it)

    def __repr__(self) -> str:
        best = f"{self.best.layout} at {self.best.sec_per_it:.4g} s/it"
        return f"<Plan of {self.model} on {self.cluster}: best {best}, {len(self.entries)} layouts ranked>"

    __str__ = __repr__

    def to_frame(self, library: FrameLibrary | None = None) -> Any:
        """The ranked layouts as a DataFrame of pandas or polars, one row each, with the columns of `Entry.record`.

        Of the library that is installed, unless one is named. Raises TrimaranError where there is none.
        """
        return frame_of([entry.record() for entry in self.entries], library)

    def _repr_html_(self) -> str:
        records = (entry.record() for entry in self.entries)
        return html_table([{key: record[key] for key in _SHOWN} for record in records], repr(self).strip("<>"))
