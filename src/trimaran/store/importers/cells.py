"""One printed cell of a document's table: its figure, unit, marks and words."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from trimaran.nouns.spoken.printed import PER_GIB, PER_SECOND, ended_as

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d{1,3})?")
_BLANK = re.compile(r"-*\s*(?:GiB|GB|MiB|MB|KiB|TiB|ms|s)?")
_UNIT = re.compile(r"\s*(TiB|TB|GiB|GB|MiB|MB|KiB|ms|sec|min|s)\b")
_ENVIRONMENT = re.compile(r"[A-Z][A-Z0-9_]*=\S+")
_CLOCK = re.compile(r"(\d+(?:\.\d+)?)\s*G?Hz", re.IGNORECASE)


@dataclass(frozen=True)
class Figure:
    """What a measured cell says.

    `value` is in the column's unit (GiB, s, TFLOP/s). `status` is oom, hang or fail where the cell
    says how the run ended; `estimate` and `doubted` are the marks ^ and ??; `alien` a unit that
    is another column's.
    """

    value: float | None = None
    status: str | None = None
    estimate: bool = False
    doubted: bool = False
    alien: str | None = None
    note: str = ""


def read_figure(column: str, text: str, heading_unit: str = "") -> Figure:
    """Read a cell of `mem_gib`, `sec_per_it`, `tflops` or another measured column.

    `heading_unit` is that of the heading, as in `Mem (MiB)`, which holds where the cell prints none.
    """
    text = text.strip()
    if _BLANK.fullmatch(text):
        return Figure()
    ended = ended_as(text)
    match = _NUMBER.match(text)
    if match is None:
        return Figure(status=ended or "unreadable", note="" if ended else f"{column} prints {text!r}")
    value, rest = float(match[0].replace(",", "")), text[match.end() :]
    units = {"mem_gib": PER_GIB, "sec_per_it": PER_SECOND}.get(column, {})
    alien = None
    if (unit := _UNIT.match(rest)) is not None:
        rest = rest[unit.end() :]
        alien = None if unit[1] in units else unit[1]
        value /= units.get(unit[1], 1.0)
    else:
        value /= units.get(heading_unit, 1.0)
    estimate, doubted = "^" in rest, "??" in rest
    words = rest.replace("^", "").replace("??", "").strip(" .,;")
    return Figure(
        value=value,
        status=ended if words.startswith("(") else None,
        estimate=estimate,
        doubted=doubted,
        alien=alien,
        note=f"printed {text!r}" if words else "",
    )


@dataclass(frozen=True)
class Count:
    """What a whole-number cell says, as `4 (2.2Hz, LD_PRELOAD=libtcmalloc.so)`."""

    value: str
    variant: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


def read_count(text: str) -> Count:
    """A count, with the environment and clock that are printed in brackets behind it."""
    text = text.strip()
    match = re.match(r"([\d,]+)\s*\((.*)\)$", text)
    if match is None:
        return Count(text.replace(",", "") if re.fullmatch(r"[\d,]+", text) else text)
    variant, notes = [], []
    for part in (piece.strip().strip("\"'") for piece in match[2].split(",")):
        if clock := _CLOCK.fullmatch(part):
            variant.append(f"clock={clock[1]}GHz")
            notes.append(f"clock {clock[1]} GHz, printed {part!r}")
        elif _ENVIRONMENT.fullmatch(part):
            variant.append(part)
        else:
            notes.append(part)
    return Count(match[1].replace(",", ""), tuple(variant), tuple(notes))


def read_network(text: str) -> dict[str, float]:
    """Delay and rate as `delay 1ms  bandwidth 5Gbps` or `default (about 0.1ms; up to 10Gbps)` print them."""
    cells: dict[str, float] = {}
    if delay := re.search(r"(\d+(?:\.\d+)?)\s*ms\b", text):
        cells["network_delay_ms"] = float(delay[1])
    if rate := re.search(r"(\d+(?:\.\d+)?)\s*(G|M)bps\b", text):
        cells["network_gbps"] = float(rate[1]) / (1.0 if rate[2] == "G" else 1000.0)
    return cells


def read_layout(heading: str) -> dict[str, int] | None:
    """The layout that a column's heading names (`T-4 P-2`, `Pipe(P)-8`, `DP Degree: 4`), or None."""
    if heading.strip().lower() in ("execution time", "time"):
        return {}
    if batch := re.fullmatch(r"\s*micro batch size:?\s*(\d{1,9})\s*", heading, re.IGNORECASE):
        return {"mbs": int(batch[1])}
    if degree := re.fullmatch(r"\s*(DP|TP|PP) degree:?\s*(\d{1,9})\s*", heading, re.IGNORECASE):
        return {degree[1].lower(): int(degree[2])}
    cells: dict[str, int] = {}
    for word in heading.split():
        match = re.fullmatch(r"(?:Tensor\(T\)|Pipe\(P\)|Data\(D\)|TP?|PP?|DP?)-(\d{1,9})", word)
        if match is None:
            return None
        cells[{"T": "tp", "P": "pp", "D": "dp"}[word[0]]] = int(match[1])
    return {"tp": 1, "pp": 1, **cells} if cells else None


def read_date(text: str, year: int | None) -> tuple[str | None, str]:
    """The day that a note begins with (02-15, 4/22, 2023-04-22) as ISO 8601, and the rest of the note."""
    text = text.strip()
    if full := re.match(r"(\d{4})[-/](\d{1,2})[-/](\d{1,2})\b", text):
        return f"{full[1]}-{int(full[2]):02d}-{int(full[3]):02d}", text[full.end() :].strip()
    day = re.match(r"(\d{1,2})[-/](\d{1,2})\b", text)
    if day is None or year is None:
        return None, text
    return f"{year}-{int(day[1]):02d}-{int(day[2]):02d}", text[day.end() :].strip()
