"""Which rows of logs show the same run: a log that grew since it was imported, and logs that every rank wrote."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from trimaran.nouns.measurement import Measurement

# What a run shows, and where it is told. All other fields say what ran.
_SHOWN = {
    "source", "section", "table", "row", "quality", "notes", "status", "evidence", "trial_key", "sec_per_it",
    "sec_per_it_spread", "step_times_s", "losses", "tflops", "tokens_per_s_per_gpu", "flops_formula", "mem_gib",
    "mem_gib_per_rank",
}  # fmt: skip
# Ranks end a step together. Their logs tell so within some seconds, since clocks of nodes differ, and a hundredth.
_CLOCKS_S, _TIMES = 5.0, 0.01


def with_key(row: Measurement) -> Measurement:
    """A log's row under the key of its run, so that of a log which grew since the longer row is the one that counts.

    A run is known by times and losses of its first two steps, whatever its file is called now and whatever is stated of
    it: what is stated otherwise by a later import stands for what was stated before. Where there is no loss, or where
    times have no more than three digits, it is known by its file's name and what ran too. Times of a progress bar,
    which are whole seconds, may be the same in two runs: they give no key. One that has made a single step is known by
    that, as `begun_key` says.
    """
    first = row.step_times_s[:2]
    if len(first) < 2 or all(time.is_integer() for time in first):
        begun = begun_key(row) if len(first) == 1 else None
        return row if begun is None else row.model_copy(update={"trial_key": begun})
    exact = len(row.losses) > 1 and any(float(f"{time:.3g}") != time for time in first)
    known = (first, row.losses[:2]) if exact else (row.source, _what_ran(row), first)
    return row.model_copy(update={"trial_key": _hash(known)})


def begun_key(row: Measurement) -> str | None:
    """The key of a log's row as long as it had one step; None where time and loss of that may be another run's too."""
    first = row.step_times_s[:1]
    exact = bool(row.losses) and any(float(f"{time:.3g}") != time for time in first)
    return _hash((first, row.losses[:1])) if exact else None


def as_begun(rows: Iterable[Measurement], stored: Container[str]) -> tuple[Measurement, ...]:
    """The rows, under the key that each had when it was stored with one step, where it was."""
    keys = ((row, begun_key(row) if row.trial_key else None) for row in rows)
    return tuple(row.model_copy(update={"trial_key": key}) if key in stored else row for row, key in keys)


@dataclass(frozen=True)
class _Seen:
    """A row that another may show again: the file of this import that has it (None: stored), when its log ended."""

    row: Measurement
    file: int | None = None
    ended: float | None = None


def mark_ranks(
    files: Sequence[Sequence[Measurement]],
    ended: Sequence[float | None] = (),
    stored: Iterable[Measurement] = (),
) -> list[tuple[Measurement, ...]]:
    """The rows of files that are imported together; one whose run an earlier file shows is marked as a duplicate.

    `ended` is the time of each file's last step, in seconds by its own clock, and `stored` holds rows imported before.
    Two show one run where the same ran, each of two or more losses is equal, and so is the time of the last step or,
    where a log has no clock, each time but the first to a hundredth; without losses where each time is equal. Losses
    that are equal at other times are another run of the same seed.
    """
    seen: dict[object, list[_Seen]] = {}
    for row in stored:
        if row.quality != "duplicate":
            seen.setdefault(_figures(row), []).append(_Seen(row))
    ends = ended or [None] * len(files)
    return [tuple(_marked(_Seen(row, at, ends[at]), seen) for row in rows) for at, rows in enumerate(files)]


def _marked(new: _Seen, seen: dict[object, list[_Seen]]) -> Measurement:
    row = new.row
    if len(row.losses or row.step_times_s) < 2:
        return row
    before = seen.setdefault(_figures(row), [])
    again = any(other.file is None and _place(other.row) == _place(row) for other in before)
    first = None if again else next((other for other in before if _one_run(other, new)), None)
    if first is None:
        before.append(new)
        return row
    note = f"the same run as {first.row.source}: every {'loss' if row.losses else 'time'} is equal"
    # what a log does not state can be stated, and the row is a duplicate still
    quality = "duplicate" if row.quality in ("ok", "corrected", "incomplete") else row.quality
    # under a key of its own, so that it never stands for the row that counts
    key = row.trial_key and _hash((row.trial_key, row.source))
    return row.model_copy(
        update={"quality": quality, "notes": "; ".join(filter(None, (row.notes, note))), "trial_key": key}
    )


def _one_run(first: _Seen, second: _Seen) -> bool:
    """Whether two rows with the same figures show one run."""
    if first.file is not None and first.file == second.file:
        return False
    if first.ended is not None and second.ended is not None:
        longest = max((*first.row.step_times_s, *second.row.step_times_s), default=0.0)
        return abs(first.ended - second.ended) <= max(_CLOCKS_S, longest)
    times = zip(first.row.step_times_s[1:], second.row.step_times_s[1:], strict=False)
    return all(abs(one - other) <= _TIMES * max(one, other) for one, other in times)


def _figures(row: Measurement) -> object:
    return _what_ran(row), bool(row.losses), row.losses or row.step_times_s


def _place(row: Measurement) -> object:
    return row.source, row.table, row.row, row.step_times_s


def _what_ran(row: Measurement) -> str:
    return repr(sorted(row.model_dump(exclude=_SHOWN).items()))


def _hash(known: object) -> str:
    return hashlib.sha256(repr(known).encode()).hexdigest()[:32]
