"""What the text around a table states: `NHIDDEN=14336 / NLAYERS=72`, `--hidden-size 2048`, `Sequence Length=1024`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from trimaran.nouns.columns import Cell

# Only what a table's columns seldom hold. Degrees and batches in the text belong to examples as often as to runs.
_NAMES = {
    "nlayers": "layers",
    "num-layers": "layers",
    "nhidden": "hidden",
    "hidden-size": "hidden",
    "nheads": "heads",
    "num-attention-heads": "heads",
    "seq_len": "seq_len",
    "seq-length": "seq_len",
    "sequence length": "seq_len",
}
_STATED = re.compile(
    r"\b(NLAYERS|NHIDDEN|NHEADS|SEQ_LEN|Sequence Length)=(\d{1,9})\b"
    r"|--(num-layers|hidden-size|num-attention-heads|seq-length)[ =](\d{1,9})\b"
)
_SIZED = re.compile(r"(\d{1,5}(?:\.\d{1,3})?[MBT]) model:")
_GBS = re.compile(r"\bGBS=(\d{1,9})\b")


@dataclass
class Stated:
    """Cells that the text states: for every row below, and for rows of one Size (`20B model: NLAYERS=8`)."""

    cells: dict[str, Cell] = field(default_factory=dict)
    by_size: dict[str, dict[str, Cell]] = field(default_factory=dict)


def read_statements(lines: Iterable[str]) -> Stated:
    """The statements of some lines of text; a later one wins."""
    stated = Stated()
    for line in lines:
        sized = _SIZED.match(line.strip())
        target = stated.by_size.setdefault(sized[1], {}) if sized else stated.cells
        for name, value, flag, flag_value in _STATED.findall(line):
            target[_NAMES[(name or flag).lower()]] = int(value or flag_value)
    return stated


def stated_gbs(lines: Iterable[str]) -> int | None:
    """A global batch named right above a table."""
    batches = [int(value) for line in lines for value in _GBS.findall(line)]
    return batches[-1] if batches else None
