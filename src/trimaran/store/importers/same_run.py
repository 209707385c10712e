"""Which rows of logs show the same run: a log that grew since it was imported, and logs that every rank wrote."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from trimaran.nouns.measurement import Measurement

# What a run shows, and where it is told. All other fields say what ran.
_SHOWN = {
    "source", "section", "table", "row", "quality", "notes", "status", "evidence", "trial_key", "sec_per_it",
    "sec_per_it_spread", "step_times_s", "losses", "tflops", "tokens_per_s_per_gpu", "flops_formula", "mem_gib",
    "mem_gib_per_rank",
}  # fmt: skip


def with_key(row: Measurement) -> Measurement:
    """A log's row under the key of its run, so that of a log which grew since the longer row is the one that counts.

    A run is known by its file's name, by what ran and by the times of its first two steps. Those of a progress bar,
    which are whole seconds, may be the same in two runs: they give no key.
    """
    first = row.step_times_s[:2]
    if len(first) < 2 or all(time.is_integer() for time in first):
        return row
    key = hashlib.sha256(repr((row.source, _what_ran(row), first)).encode()).hexdigest()[:32]
    return row.model_copy(update={"trial_key": key})


def mark_ranks(files: Sequence[Sequence[Measurement]]) -> list[tuple[Measurement, ...]]:
    """The rows of files that are imported together; one whose run an earlier file shows is marked as a duplicate.

    They show one run where the same ran and each of two or more losses is equal or, without losses, each time.
    """
    shown: dict[object, tuple[int, Measurement]] = {}
    return [tuple(_marked(row, shown, number) for row in rows) for number, rows in enumerate(files)]


def _marked(row: Measurement, shown: dict[object, tuple[int, Measurement]], file: int) -> Measurement:
    figures = row.losses or row.step_times_s
    if len(figures) < 2:
        return row
    first_file, first = shown.setdefault((_what_ran(row), bool(row.losses), figures), (file, row))
    if first_file == file:
        return row
    note = f"the same run as {first.source}: every {'loss' if row.losses else 'time'} is equal"
    # what a log does not state can be stated, and the row is a duplicate still
    quality = "duplicate" if row.quality in ("ok", "corrected", "incomplete") else row.quality
    return row.model_copy(update={"quality": quality, "notes": "; ".join(filter(None, (row.notes, note)))})


def _what_ran(row: Measurement) -> str:
    return repr(sorted(row.model_dump(exclude=_SHOWN).items()))
