"""Ways out: what would make a layout fit that holds too much, as the cost model counts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache

from trimaran.cost.case import Case
from trimaran.cost.estimate import memory_many
from trimaran.cost.grid import LayoutGrid
from trimaran.files.catalogue import catalogue_names, load_stack
from trimaran.layout.layout import Layout
from trimaran.layout.rules import violations
from trimaran.nouns.stack import Stack

# How far degrees are raised, in doublings.
_DOUBLINGS = 7


@dataclass(frozen=True)
class _Way:
    """A means of holding less: its words, the layouts that it makes of one, the mildest first, and who has it."""

    name: str
    choice: str
    tries: Callable[[Layout, Case], Iterator[Layout]]
    had_by: Callable[[Stack], bool]


def ways_out(layout: Layout, case: Case, limit_gib: float, fixed: Mapping[str, object], enough: int) -> str:
    """What of context parallelism, recompute, sharding and offload makes the layout fit, each by itself, or what size.

    `enough` are devices on which some layout fits; 0: none are known. Empty where nothing helps. Says of each means
    what it needs, and why the search did not choose it: it takes more devices, the stack has it not, or the choice was
    held.
    """
    said = [_said(way, layout, case, limit_gib, fixed) for way in WAYS]
    helps = [sentence for sentence in (*said, f"{enough} devices" if enough else None) if sentence]
    return f"; what would help: {', '.join(helps)}" if helps else ""


def _said(way: _Way, layout: Layout, case: Case, limit_gib: float, fixed: Mapping[str, object]) -> str | None:
    for tried in way.tries(layout, case):
        needed = _memory(tried, case)
        if needed > limit_gib or (way.had_by(case.stack) and _is_refused(tried, layout, case)):
            continue
        but = [f"{needed:.1f} GiB"]
        if tried.devices > layout.devices:
            if _replicas_do(layout, tried.devices // layout.devices, case, limit_gib):
                return None
            but.append(f"on {tried.devices} devices")
        if not way.had_by(case.stack):
            others = _named(_stacks_with(way.name), case.stack.name)
            but.append(f"which {case.stack.name} has not, {others} have" if others else f"not in {case.stack.name}")
        elif way.choice in fixed:
            but.append(f"where {way.choice} is not held at {fixed[way.choice]}")
        return f"{way.name.format(layout=tried)} ({', '.join(but)})"
    return None


def _is_refused(tried: Layout, layout: Layout, case: Case) -> bool:
    """Whether a rule that takes the layout refuses what is made of it, on as many devices as that wants."""
    about = case.workload, case.cluster, case.stack
    known = {"devices", *(broken.rule for broken in violations(layout, *about))}
    return any(broken.rule not in known for broken in violations(tried, *about))


def _named(stacks: Sequence[str], missing: str) -> str:
    """Two of the stacks, the likest by name first; others of a name that one begins with are variants of it."""
    plain = [name for name in stacks if not any(name.startswith(f"{other}-") for other in stacks)]
    likest = sorted(plain, key=lambda name: -SequenceMatcher(None, name, missing).ratio())
    return ", ".join([*likest[:2], *(["others"] if len(stacks) > 2 else [])])


def _memory(layout: Layout, case: Case) -> float:
    return float(memory_many(case, LayoutGrid.from_layouts([layout], case.workload, case.stack))[0][0])


def _replicas_do(layout: Layout, times: int, case: Case, limit_gib: float) -> bool:
    """Whether so many times the devices are enough as replicas, so that nothing else of theirs is what helps."""
    more = layout.model_copy(update={"dp": layout.dp * times})
    return case.workload.global_batch % (more.dp * more.mbs) == 0 and _memory(more, case) <= limit_gib


@cache
def _stacks_with(name: str) -> tuple[str, ...]:
    way = next(way for way in WAYS if way.name == name)
    return tuple(stack for stack in catalogue_names("stacks") if way.had_by(load_stack(stack)))


def _context(layout: Layout, case: Case) -> Iterator[Layout]:
    """Twice the CP and so on, of fewer replicas as long as there are any."""
    for doubling in range(1, _DOUBLINGS):
        cp = layout.cp * 2**doubling
        if case.workload.seq_len % (2 * cp):
            return
        dp = layout.dp // 2**doubling if layout.dp % 2**doubling == 0 else layout.dp
        for kind in case.stack.context_parallel or ("ring",):
            yield layout.model_copy(update={"cp": cp, "dp": dp, "cp_kind": kind})


def _recompute(layout: Layout, case: Case) -> Iterator[Layout]:
    if layout.recompute != "full" or layout.recompute_every > 1:
        yield layout.model_copy(update={"recompute": "full", "recompute_every": 1})


def _sharding(layout: Layout, case: Case) -> Iterator[Layout]:
    if layout.zero_stage < 3 and layout.dp * layout.cp > 1:
        yield layout.model_copy(update={"zero_stage": 3, "dp_kind": "fully_sharded", "shard": 0})


def _offload(layout: Layout, case: Case) -> Iterator[Layout]:
    """The states of the optimizer in the host's memory, where it is known."""
    if layout.offload == "none" and case.cluster.device.host_link_gb_s and case.cluster.device.host_mem_gb_s:
        yield layout.model_copy(update={"offload": "optimizer", "zero_stage": max(layout.zero_stage, 1)})


WAYS: tuple[_Way, ...] = (
    _Way("CP {layout.cp}", "cp", _context, lambda stack: bool(stack.context_parallel)),
    _Way("recompute of whole layers", "recompute", _recompute, lambda stack: "full" in stack.recomputes),
    _Way("ZeRO stage 3", "zero_stage", _sharding, lambda stack: 3 in stack.zero_stages),
    _Way("offload of the optimizer", "offload", _offload, lambda stack: "optimizer" in stack.offloads),
)
