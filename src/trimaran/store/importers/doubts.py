"""Doubts: what in an imported row contradicts the rest of it, or the rows beside it.

A contradiction with one explanation that the figures themselves support becomes a proposed repair;
one without is flagged. Nothing is changed unless the user accepts the proposal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby

from trimaran.files.catalogue import catalogue_names, load_stack
from trimaran.store.importers.calculators import agreement, expected_tflops, fitting_formulas, tolerance
from trimaran.store.importers.draft import Accept, Draft

# Rows of a table that a row is held against: documents' tables are shorter, and a sweep's CSV may have 100,000.
_NEAR = 32

# What makes two rows the same set-up.
_SETUP = (
    "cluster", "stack", "nodes", "devices", "layers", "hidden", "heads", "seq_len", "vocab", "dp", "tp", "pp", "vpp",
    "mbs", "gbs", "zero_stage", "recompute", "precision", "optimizer", "network_delay_ms", "network_gbps", "variant",
)  # fmt: skip


_load_stack = cache(load_stack)


def examine(drafts: Sequence[Draft], accept: Accept) -> None:
    """Flag or repair the rows of one document, in its order."""
    for _, group in groupby(drafts, key=lambda draft: draft.table):
        table = list(group)
        blank = [draft for draft in table if draft.number("sec_per_it") is None and draft.number("tflops") is None]
        for draft in table:
            _time_against_tflops(draft, blank[:_NEAR], accept)
            _degrees_against_devices(draft, accept)
            _stages_against_layers(draft)
        _memory_against_micro_batch(table)
        _time_against_global_batch(table)
    _mirrored(drafts, accept)
    _printed_again(drafts)
    _same_time_elsewhere(drafts)


def _agrees(draft: Draft, factor: float = 1.0) -> bool:
    ratio = agreement(draft)
    return ratio is not None and abs(ratio / factor - 1) <= tolerance(draft)


def _time_against_tflops(draft: Draft, blank: Sequence[Draft], accept: Accept) -> None:
    ratio, seconds = agreement(draft), draft.number("sec_per_it")
    if ratio is None or seconds is None or _agrees(draft):
        return
    mismatch = f"{draft.cells['tflops']} TFLOPs is {ratio:.4g} times what {seconds:g} s/it gives by its calculator"
    if _agrees(draft, 1000.0):
        draft.propose(
            "inconsistent_unit", f"{mismatch}: Sec/it is in milliseconds", {"sec_per_it": seconds / 1000.0}, accept
        )
        return
    gbs = draft.number("gbs")
    if draft.stated_gbs and gbs and _agrees(draft, draft.stated_gbs / gbs):
        sentence = f"{mismatch}, and right for the global batch {draft.stated_gbs} stated above the table"
        draft.propose("inconsistent_gbs", sentence, {"gbs": draft.stated_gbs}, accept)
        return
    if other := _blank_row_that_fits(draft, blank):
        where = {name: other.cells.get(name) for name in ("nodes", "devices", "dp", "tp", "pp")}
        sentence = f"{mismatch}, and right for row {other.row} ({other.cells.get('devices')} devices), which is blank"
        draft.propose("misplaced", sentence, {k: v for k, v in where.items() if v != draft.cells.get(k)}, accept)
    elif others := fitting_formulas(draft):
        draft.doubt("ambiguous", f"{mismatch}, and fits {' or '.join(others)}: another calculator, or another time")
    else:
        draft.doubt("inconsistent_tflops", f"{mismatch} ({expected_tflops(draft):.4g})")


def _blank_row_that_fits(draft: Draft, blank: Sequence[Draft]) -> Draft | None:
    """One of the table's rows without figures, on as many devices as the figures of `draft` need."""
    here = draft.number("devices")
    for other in blank:
        there = other.number("devices")
        if other is not draft and here and there and here != there and _agrees(draft, here / there):
            return other
    return None


def _degrees_against_devices(draft: Draft, accept: Accept) -> None:
    dp, devices = draft.count("dp"), draft.count("devices")
    tp, pp = draft.count("tp", 1) or 1, draft.count("pp", 1) or 1
    cp = draft.count("cp", 1) or 1
    if dp is None or devices is None or dp * tp * pp * cp == devices:
        return
    product = f"DP {dp} x TP {tp} x PP {pp}" + (f" x CP {cp}" if cp > 1 else "")
    sentence = f"{product} = {dp * tp * pp * cp}, but the row has {devices} devices"
    # the figures, where they fit the devices, say that it is a degree that is wrong
    if devices % (tp * pp * cp) == 0 and (_agrees(draft) or _agrees(draft, 1000.0)):
        draft.propose("inconsistent_layout", sentence, {"dp": devices // (tp * pp * cp)}, accept)
    else:
        draft.doubt("inconsistent_layout", sentence)


def _stages_against_layers(draft: Draft) -> None:
    layers, stages, stack = draft.count("layers"), draft.count("pp", 1) or 1, draft.cells.get("stack")
    if layers is None or layers % stages == 0 or stack not in catalogue_names("stacks"):
        return
    if not _load_stack(str(stack)).uneven_stages:
        draft.doubt("suspect", f"{layers} layers do not split evenly over PP {stages}, which {stack} needs")


def _pairs(table: Sequence[Draft], but: str) -> Iterator[tuple[Draft, Draft]]:
    """Pairs of one table, the earlier first, that differ in the column `but` alone; in a long table near ones."""
    alike: dict[tuple[object, ...], list[Draft]] = {}
    for later in table:
        before = alike.setdefault(_setup(later, but), [])
        for earlier in before[-_NEAR:]:
            yield earlier, later
        before.append(later)


def _memory_against_micro_batch(table: Sequence[Draft]) -> None:
    """More memory at a smaller micro-batch is not to be believed, nor two figures for one set-up."""
    for earlier, later in _pairs(table, but="mbs"):
        first, second = sorted((earlier, later), key=lambda draft: draft.number("mbs") or 0.0)
        small, large = first.number("mem_gib"), second.number("mem_gib")
        if not small or not large:
            continue
        if first.number("mbs") == second.number("mbs"):
            if abs(small / large - 1) > 0.05:
                sentence = f"{small:g} GiB, but row {earlier.row} prints {large:g} GiB for the same set-up"
                later.doubt("ambiguous", sentence if later is first else _swapped_sentence(earlier, small, large))
        elif small > 1.05 * large:
            sentence = f"{small:g} GiB at MBS {first.cells['mbs']}, but row {second.row} has {large:g} GiB"
            first.doubt("suspect_mem", f"{sentence} at MBS {second.cells['mbs']}: the memory figure is implausible")


def _swapped_sentence(earlier: Draft, small: float, large: float) -> str:
    return f"{large:g} GiB, but row {earlier.row} prints {small:g} GiB for the same set-up"


def _time_against_global_batch(table: Sequence[Draft]) -> None:
    """Time follows the number of micro-batches: m + PP - 1 of them pass the slowest stage."""
    for earlier, later in _pairs(table, but="gbs"):
        small, large = sorted((earlier, later), key=lambda draft: draft.number("gbs") or 0.0)
        times = small.number("sec_per_it"), large.number("sec_per_it")
        dp, mbs, bubble = small.number("dp"), small.number("mbs"), (small.number("pp") or 1) - 1
        batches = small.number("gbs"), large.number("gbs")
        if not (times[0] and times[1] and dp and mbs and batches[0] and batches[1]) or batches[0] == batches[1]:
            continue
        due = (batches[0] / (dp * mbs) + bubble) / (batches[1] / (dp * mbs) + bubble)
        if abs(times[0] / times[1] / due - 1) > 0.15:
            small.doubt(
                "suspect",
                f"{times[0]:g} s at GBS {batches[0]:g} against {times[1]:g} s at {batches[1]:g} in row {large.row}: "
                f"{times[0] / times[1]:.0%} of its time where {due:.0%} were due",
            )


def _mirrored(drafts: Sequence[Draft], accept: Accept) -> None:
    """The figures of an earlier row in each other's columns; their product is the same, so no calculator tells."""
    first_by_figures: dict[tuple[object, ...], Draft] = {}
    for draft in drafts:
        seconds, tflops, setup = draft.number("sec_per_it"), draft.number("tflops"), _setup(draft)
        if seconds is None or tflops is None or seconds == tflops:
            continue
        if other := first_by_figures.get((setup, tflops, seconds)):
            sentence = f"Sec/it {seconds:g} and TFLOPs {tflops:g} stand in each other's columns in {other.name}"
            draft.propose("swapped", sentence, {"sec_per_it": tflops, "tflops": seconds}, accept)
        first_by_figures.setdefault((setup, seconds, tflops), draft)


def _printed_again(drafts: Sequence[Draft]) -> None:
    """The same run printed twice: a duplicate, or a repeat where it opens another comparison."""
    first_by_figures: dict[tuple[object, ...], Draft] = {}
    originals: dict[int, Draft] = {}
    for draft in drafts:
        seconds, tflops = draft.number("sec_per_it"), draft.number("tflops")
        if seconds is None:
            continue
        first = first_by_figures.setdefault((_setup(draft), seconds, tflops), draft)
        memories = {memory for memory in (first.number("mem_gib"), draft.number("mem_gib")) if memory is not None}
        if first is not draft and len(memories) < 2:
            originals[id(draft)] = first
    for draft in drafts:
        if original := originals.get(id(draft)):
            regrouped = original.cells.get("comparable_group") != draft.cells.get("comparable_group")
            draft.doubt("repeat" if regrouped else "duplicate", f"the same measurement as {original.name}")


def _same_time_elsewhere(drafts: Sequence[Draft]) -> None:
    """The same time to four digits for another set-up, where no TFLOPs tell which is right."""
    by_time: dict[float, list[Draft]] = {}
    for draft in drafts:
        seconds = draft.number("sec_per_it")
        if seconds is None or draft.number("tflops") is not None or len(f"{seconds:g}".replace(".", "")) < 4:
            continue
        for other in by_time.get(seconds, ()):
            if _setup(other) != _setup(draft):
                for noted, twin in ((draft, other), (other, draft)):
                    noted.notes.append(f"{seconds:g} s is printed for {twin.name} too, another set-up: perhaps copied")
        by_time.setdefault(seconds, []).append(draft)


def _setup(draft: Draft, but: str = "") -> tuple[object, ...]:
    """What was run; how replicas agree tells nothing where there is one."""
    kind = draft.cells.get("dp_kind") if draft.count("dp") != 1 else None
    return (kind, *(draft.cells.get(name) for name in _SETUP if name != but))
