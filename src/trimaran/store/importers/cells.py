"""One printed cell of a document's table: its figure, unit, marks and words."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from trimaran.nouns.spoken.printed import PER_GIB, PER_SECOND, ended_as, says_nothing

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?")
_BLANK = re.compile(r"-*\s*(?:GiB|GB|MiB|MB|KiB|TiB|ms|s)?")
_UNIT = re.compile(r"\s*(TiB|TB|GiB|GB|MiB|MB|KiB|ms|seconds|secs|sec|minutes|min|hours|h|s)\b")
# What may stand behind a figure without a unit: marks, brackets, a spread, of what it is. Else it is a unit: 2:05, 40%.
_BEHIND = re.compile(
    r"\s*(?:$|[\^?*(\[\u00b1;,]|\+\s?[-/]|(?:/\s?|per\s)(?:it|iter|iteration|step|gpu|device|rank|node)s?\b)", re.I
)
_ENVIRONMENT = re.compile(r"[A-Z][A-Z0-9_]*=\S+")
_OTHER_UNITS = frozenset({"%", "k", "K", "M"})
_OWN = {
    "tflops": re.compile(r"\s*T(?:FLOPS|FLOP/s|FLOPs|Flops|F)\b"),
    "tokens_per_s_per_gpu": re.compile(r"\s*(?:tokens?|tok)/s(?:ec)?\b", re.I),
}
_APART = re.compile(r"[/,x\u00d7-]")
_DEGREES = {
    **{name: name for name in ("dp", "tp", "pp", "cp", "ep", "vpp", "mbs")},
    **{"mp": "tp", "d": "dp", "t": "tp", "p": "pp"},
}
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
    if _BLANK.fullmatch(text) or says_nothing(text, none_is_a_word=False):
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
    elif (own := _OWN.get(column)) is not None and (unit := own.match(rest)) is not None:
        rest = rest[unit.end() :]
    else:
        value /= units.get(heading_unit, 1.0)
    other = unit is None and (heading_unit in _OTHER_UNITS or not _BEHIND.match(rest))
    if other or re.match(r"\s*\d|,\d", rest):  # 12,5 is no figure in a place where 12,345 is
        return Figure(status=ended or "unreadable", note=f"{column} prints {text!r}")
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
    """A count, with the environment and clock that are printed in brackets behind it; `16x8` nodes of 8 are 128."""
    text = text.strip()
    if product := re.fullmatch(r"(\d{1,6})\s*[x\u00d7*]\s*(\d{1,6})", text):
        return Count(str(int(product[1]) * int(product[2])))
    match = re.match(r"([\d,]+)\s*\((.*)\)$", text)
    if match is None:
        return Count(text)
    variant, notes = [], []
    for part in (piece.strip().strip("\"'") for piece in match[2].split(",")):
        if clock := _CLOCK.fullmatch(part):
            variant.append(f"clock={clock[1]}GHz")
            notes.append(f"clock {clock[1]} GHz, printed {part!r}")
        elif _ENVIRONMENT.fullmatch(part):
            variant.append(part)
        else:
            notes.append(part)
    return Count(match[1], tuple(variant), tuple(notes))


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


def names_degrees(heading: str) -> tuple[str, ...]:
    """The degrees that a heading names together, `TP/PP/DP` or `(DP, TP, PP)`; empty where it names none or but one."""
    names = [_DEGREES.get(name.strip().lower(), "") for name in _APART.split(heading.strip().strip("()"))]
    return tuple(names) if len(names) > 1 and all(names) else ()


def read_degrees(heading: str, text: str) -> dict[str, int]:
    """The degrees of a cell `8/2/4` under a heading that names them; none where it names none.

    Raises ValueError where the cell has not as many numbers as the heading has names.
    """
    degrees = names_degrees(heading)
    sizes = _APART.split(text.strip().strip("()"))
    if degrees and (len(sizes) != len(degrees) or not all(size.strip().isdecimal() for size in sizes)):
        raise ValueError(f"{heading} is {text!r}, expected {len(degrees)} whole numbers set apart as the heading is")
    return {degree: int(size) for degree, size in zip(degrees, sizes, strict=False)}


def read_tokens(text: str, seq_len: int) -> int | None:
    """The sequences of a batch printed in tokens: of `4,194,304`, or of `4M` where one reading alone is whole."""
    match = re.fullmatch(r"((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)\s*([kKM]?)(?:\s*tokens)?", text.strip())
    if match is None:
        return None
    number, times = float(match[1].replace(",", "")), {"": (1, 1), "k": (10**3, 2**10), "m": (10**6, 2**20)}
    whole = {number * each / seq_len for each in times[match[2].lower()] if number * each % seq_len == 0}
    return int(whole.pop()) if len(whole) == 1 else None


def read_date(text: str, year: int | None) -> tuple[str | None, str]:
    """The day that a note begins with (02-15, 4/22, 2023-04-22) as ISO 8601, and the rest of the note."""
    text = text.strip()
    if full := re.match(r"(\d{4})[-/](\d{1,2})[-/](\d{1,2})\b", text):
        return f"{full[1]}-{int(full[2]):02d}-{int(full[3]):02d}", text[full.end() :].strip()
    day = re.match(r"(\d{1,2})[-/](\d{1,2})\b", text)
    if day is None or year is None:
        return None, text
    return f"{year}-{int(day[1]):02d}-{int(day[2]):02d}", text[day.end() :].strip()
