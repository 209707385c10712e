"""What a page shows: answers, cases (layouts planned or measured) and sentences, as plain data for its script."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from pydantic import Field

from trimaran.cost.effects import time_effects
from trimaran.cost.memory import parts as memory_parts
from trimaran.files.catalogue import load_cluster
from trimaran.nouns.noun import Noun, TrimaranError
from trimaran.report.layouts import MEASURED
from trimaran.report.page.answers import Answer


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
    devices: int | None
    gbs: int
    choices: dict[str, int | str | None] = Field(description="what was chosen, by the name of the layout's field")
    variant: str | None = None
    sec_per_it: float | None = None
    sec_per_it_low: float | None = None
    sec_per_it_high: float | None = None
    predicted_sec_per_it: float | None = None
    mem_gib: float | None = None
    predicted_mem_gib: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    time_s: dict[str, float] = Field(default_factory=dict)
    memory_gib: tuple[dict[str, float], ...] = ()
    losses: tuple[float, ...] = ()
    loss_every: int = Field(default=1, description="steps from one of the losses to the next")
    notes: str = ""

    @property
    def sec_per_sample(self) -> float:
        """Seconds an iteration over its samples, by which runs of different global batches are compared."""
        return (self.sec_per_it or math.inf) / self.gbs


class Content(Noun):
    """All that a page shows. `mem_limit_gib` is drawn as a line where memory is shown."""

    title: str
    facts: tuple[tuple[str, str], ...]
    answers: tuple[Answer, ...] = Field(description="what is fastest, how sure that is and what to do next")
    sentences: tuple[str, ...]
    cases: tuple[ShownLayout, ...]
    columns: tuple[tuple[str, str, str, bool], ...] = Field(
        default=tuple(_columns()), description="of choices: key, title, word in filters, whether dull where all agree"
    )
    mem_limit_gib: float | None = None
    map: str = Field(default="", description="HTML of where the ranks stand; empty: nodes are filled in order of rank")
    legend: dict[str, dict[str, str]] = Field(
        default={
            "time_s": {part.name: part.says for part in time_effects.PARTS},
            "memory_gib": {part.name: part.says for part in memory_parts.PARTS},
        },
        description="what each part of time and of memory is",
    )


def batch_fact(batches: Iterable[int], lengths: Iterable[int]) -> tuple[str, str]:
    """What a step works on, without which its seconds say nothing: global batches in sequences, lengths in tokens."""
    return "Global batch", f"{_span(batches)} sequences of {_span(lengths)} tokens"


def _span(counts: Iterable[int]) -> str:
    known = sorted(set(counts))
    return f"{known[0]:,}" if len(known) == 1 else f"{known[0]:,} to {known[-1]:,}"


def limit_gib(cluster: str) -> float | None:
    """Memory of one device of a cluster that can be looked up by its name or file."""
    try:
        return load_cluster(cluster).device.mem_gib
    except TrimaranError:
        return None
