"""Planner: from a workload, a cluster and a stack to a Plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trimaran.cost.calibration import Calibration
from trimaran.cost.case import Case
from trimaran.cost.estimate import each_of, estimate_each
from trimaran.cost.memory.limit import memory_limit_gib
from trimaran.cost.placed.topology import differs
from trimaran.layout.axes import DEGREES, PRODUCT_IN_WORDS
from trimaran.layout.choices import APART, COUNTS
from trimaran.layout.flops import COUNTED, tflops_per_device
from trimaran.layout.layout import Layout
from trimaran.layout.rules import RULES, Violation, violations
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import LARGEST, TrimaranError
from trimaran.nouns.stack import Stack
from trimaran.nouns.text import counted, figure
from trimaran.nouns.workload import Workload
from trimaran.planner.entries import entry_of
from trimaran.planner.explain.advice import advise
from trimaran.planner.explain.bottleneck import memory_sentence
from trimaran.planner.explain.ways_out import ways_out
from trimaran.planner.on_groups import plan_on_groups
from trimaran.planner.plan import RIVAL_CHANCE, Entry, Plan, Refusal, Unfit
from trimaran.planner.search.batches import with_batch
from trimaran.planner.search.objective import Goal, Objective
from trimaran.planner.search.ranking import Ranking
from trimaran.planner.search.search import BEHIND, Search
from trimaran.planner.search.settings import PlanSettings, settings_from
from trimaran.planner.search.sieve import Columns, Sieve, take
from trimaran.planner.sizes import enough_devices, on_devices, search_of, with_sensible_size
from trimaran.planner.unmet import WholeTraining, unmet_sentence

# Of what comes nearest to fitting so many are looked at for one that every rule allows.
UNFIT_TRIED = 8
# Layouts that `measure` names at most.
TO_MEASURE = 4
# A layout with a part in the host's memory is told of where it is this many times as fast as the best without.
WORTH_OFFLOADING = 1.1
# The closed form ranks; of its best, so many at most, those that may be among the first asked for are simulated, and
# ranked by that.
SIMULATED = 1000


def plan(
    workload: Workload,
    cluster: Cluster,
    stack: Stack,
    *,
    calibration: Calibration | None = None,
    **settings: object,
) -> Plan:
    """`plan_with`, its settings given by the names of PlanSettings' and Objective's fields."""
    return plan_with(Case.of(workload, cluster, stack, calibration), settings_from(**settings))


def plan_with(case: Case, settings: PlanSettings) -> Plan:
    """Rank every valid layout of the case's workload on its cluster under its stack.

    Where nodes or links differ, each is placed by a search of its own. More devices than the cluster states are taken
    as more nodes of the same kind, and a note says so. Raises TrimaranError where no layout is valid, fits and meets
    the objective's limits.
    """
    if differs(case.cluster):
        on_devices(case.cluster, max((settings.devices or 1, *settings.device_counts)))
        return plan_on_groups(case, settings, _plan_alike)
    found = _plan_alike(case, settings)
    notes = (
        *found.notes, *first_of_equals(found), *_idle(case, settings, found), *_faster_offloaded(case, settings, found),
        *_in_its_log(case, found),
    )  # fmt: skip
    return found.model_copy(update={"notes": notes})


def first_of_equals(found: Plan) -> list[str]:
    """Why the first is not the fastest, where it is not by a share that can be told."""
    best, faster = found.best, found.fastest_equal
    share = f"{1 - faster.sec_per_it / best.sec_per_it:.1%}"
    if faster is best or share == f"{0:.1%}":
        return []
    return [
        f"{faster.layout} is predicted {share} faster than the best, less than a run that is repeated differs by: of "
        f"such the layout with the plainest means is named the best"
    ]


def _idle(case: Case, settings: PlanSettings, found: Plan) -> list[str]:
    """What stays idle where the fastest layout does not use all devices that it may, and what all would take."""
    best, asked = found.best, found.devices
    if best.devices == asked or settings.objective.goal != "time" or settings.device_counts:
        return []
    unlimited = {"devices": asked, "device_counts": (asked,), "objective": Objective()}
    of_all = _best_entry(case, settings.model_copy(update=unlimited))
    instead = (
        f"all of them would take {figure(_sequence_s(of_all) * best.global_batch, '.4g')} s"
        if of_all is not None
        else "no layout that is searched uses all of them"
    )
    idle = asked - best.devices
    return [f"{best.devices} of {asked} devices are used, {idle} {'is' if idle == 1 else 'are'} idle; {instead}"]


def _faster_offloaded(case: Case, settings: PlanSettings, found: Plan) -> list[str]:
    """What a part in the host's memory would gain where the best layout computes whole layers again for want of room.

    A search offloads unasked only where nothing fits without; that something fits may yet be far slower.
    """
    best = found.best
    if settings.objective.goal != "time" or settings.objective.limited or best.layout.recompute != "full":
        return []
    most_s = _sequence_s(best) / WORTH_OFFLOADING
    faster: list[tuple[str, Entry]] = []
    for word, asked in _offloading(case, settings):
        entry = _best_entry(case, asked.model_copy(update={"devices": found.devices}), most_s * BEHIND)
        if entry is not None and _sequence_s(entry) <= most_s:
            most_s = _sequence_s(entry)
            faster.append((word, entry))
    return [
        f"{entry.layout} is predicted {_sequence_s(best) / most_s:.1f} times as fast as the best, "
        f"{figure(entry.sec_per_it)} s/it, by what lies in the host's memory: --fix offload={word} searches such "
        f"layouts"
        for word, entry in faster[-1:]
    ]


def _in_its_log(case: Case, found: Plan) -> list[str]:
    """What the software's own log will say where it counts other operations than a plan does."""
    formula, best = case.stack.flops_formula, found.best
    if formula is None or formula == best.flops_formula:
        return []
    of_best = with_batch(case.workload, best.global_batch)
    tflops = tflops_per_device(of_best, best.layout.tp, best.devices, best.sec_per_it, formula)
    return [f"a log of {case.stack.name} will say {tflops:.4g} TFLOPs of the best, since it counts {COUNTED[formula]}"]


def _best_entry(case: Case, settings: PlanSettings, within: float = math.inf) -> Entry | None:
    """The best that the settings allow, by simulation as a plan ranks all.

    Of those whose value is `within` by the closed form, which ranks first; None where there is none, or where the
    cluster's figures make of it what no number of seconds is.
    """
    search = search_of(case, settings.model_copy(update={"top": 1}), SIMULATED, within)
    ranking = search.search()
    if len(ranking.value):
        search.simulate(ranking)
    return _entries(ranking, search, 1)[0] if (ranking.value[:1] < LARGEST).any() else None


def _sequence_s(entry: Entry) -> float:
    """Seconds a sequence, by which layouts with unlike global batches compare."""
    return entry.sec_per_it / entry.global_batch


def _plan_alike(case: Case, settings: PlanSettings) -> Plan:
    """The plan where all nodes are alike, and all links between them."""
    notes: list[str] = []
    cluster = case.cluster
    search_of(case, settings, 1).proposer.check_fixed()
    settings, chosen = with_sensible_size(case, settings)
    notes += [note for note in (chosen, case.left_out) if note]
    if besides := case.model.uncounted:
        notes.append(f"the model has besides, which is not counted: {', '.join(besides)}")
    cap = settings.devices or cluster.devices
    if cap > cluster.devices:
        notes.append(
            f"cluster {cluster.name} states {counted(cluster.nodes, 'node')}; {cap} devices are planned on "
            f"{on_devices(cluster, cap).nodes} of that kind"
        )
    search, ranking = searched(case, settings)
    case, known = search.case, case.calibration
    entries = _entries(ranking, search, settings.top)
    notes += [
        f"{words}: trains to another loss than layouts without"
        for words in dict.fromkeys(entry.layout.departures for entry in entries)
        if words
    ]
    alike = [entry for entry in entries if entry.rival_chance >= RIVAL_CHANCE or entry.rank == 1]
    return Plan(
        model=case.model.name,
        seq_len=case.workload.seq_len,
        cluster=cluster.name,
        stack=case.stack.name,
        software=case.stack.software,
        devices=cap,
        objective=settings.objective,
        mem_margin=settings.mem_margin,
        calibrated_by=case.origin,
        time_error=known.time_error,
        entries=entries,
        measure=_to_measure([entry.layout for entry in alike]),
        cannot_tell_apart=len(alike),
        evaluated=ranking.evaluated,
        fitting=ranking.fitting,
        refusals=_refusals(search.proposer.sieve, entries[0].layout),
        nearest_unfit=_nearest_unfit(ranking, search),
        advice=advise(entries[0].layout, case.with_workload(with_batch(case.workload, entries[0].global_batch))),
        notes=tuple(notes),
    )


def searched(case: Case, settings: PlanSettings) -> tuple[Search, Ranking]:
    """The search that the settings ask for, and what it ranked, the best SIMULATED (or as many as asked) by simulation.

    Raises TrimaranError where that is nothing.
    """
    settings.objective.check(case.workload, case.cluster)
    search = search_of(case, settings, max(settings.top, SIMULATED))
    ranking = search.search()
    if not len(ranking.value) and ranking.over_limit and not ranking.unmet:
        search, ranking = _offloaded(case, settings) or (search, ranking)
    if len(ranking.value):
        search.simulate(ranking)
    if not len(ranking.value):
        raise TrimaranError(_nothing(ranking, search, settings.devices or case.cluster.devices))
    return search, ranking


def _offloaded(case: Case, settings: PlanSettings) -> tuple[Search, Ranking] | None:
    """The first search that finds something with a part in the host's memory, since nothing fits without; else None."""
    for _, asked in _offloading(case, settings):
        search = search_of(case, asked, max(settings.top, SIMULATED))
        ranking = search.search()
        if len(ranking.value):
            return search, ranking
    return None


def _offloading(case: Case, settings: PlanSettings) -> list[tuple[str, PlanSettings]]:
    """What the stack can put in the host's memory, and settings that ask for it; none where that was said already."""
    device = case.cluster.device
    if "offload" in settings.fixed or not (device.host_link_gb_s and device.host_mem_gb_s):
        return []
    words = case.stack.offloads
    return [(word, settings.model_copy(update={"fixed": {**settings.fixed, "offload": word}})) for word in words]


def _entries(ranking: Ranking, search: Search, top: int) -> tuple[Entry, ...]:
    case, workload = search.case, search.case.workload
    rows = take(ranking.rows, slice(top))
    grid, variants = search.proposer.grid(rows), search.variants(rows).tolist()
    error = case.calibration.time_error
    entries = []
    assert ranking.simulated is not None
    simulated = ranking.simulated.take(slice(top))
    for index, predicted in enumerate(each_of(case, grid, simulated)):
        layout = grid.layout(index)
        at_batch = case.with_workload(with_batch(workload, int(grid.global_batch[index])))
        chance = _rival_chance(search.objective, ranking, index, error)
        entries.append(entry_of(index + 1, layout, at_batch, predicted, chance, variants[index]))
    return tuple(entries)


def _rival_chance(objective: Objective, ranking: Ranking, index: int, error: float) -> float:
    """Chance that an entry is better than the first, both being wrong by `error` (1 sigma of the log).

    Errors of two layouts of one model on one cluster are half in common, so that their difference errs as much as
    each of them: sqrt(2 x (1 - 1/2)) = 1.
    """
    if index == 0:
        return 1.0
    ratio = float(objective.times(ranking.value[[index]], ranking.value[0])[0])
    if error <= 0:
        return 0.5 if ratio <= 1 else 0.0
    return 0.5 * math.erfc(math.log(ratio) / error / math.sqrt(2.0))


def _to_measure(alike: Sequence[Layout]) -> tuple[Layout, ...]:
    """A few of the layouts that cannot be told apart, such that each differs from the others in what matters.

    Where they are all of one kind, the first few.
    """
    chosen: dict[tuple[object, ...], Layout] = {}
    for layout in alike:
        chosen.setdefault((*(getattr(layout, axis) for axis in DEGREES), layout.mbs, layout.recompute), layout)
    kinds = tuple(chosen.values())
    return (kinds if len(kinds) > 1 else tuple(alike))[:TO_MEASURE]


def _refusals(sieve: Sieve, best: Layout) -> tuple[Refusal, ...]:
    """Each rule that refused something, with the refused combination nearest to the winner as the example."""
    refused = sieve.refused()
    refusals = []
    for rule in RULES:
        members = refused.get(rule.name)
        if not members:
            continue
        nearest = min(members, key=lambda fields: _distance(fields, best))
        fields = tuple(dict.fromkeys(name for term in rule.reads if term not in APART for name in term.split("*")))
        sentence = sieve.sentence(rule, nearest) or ""
        refusals.append(Refusal(rule=rule.name, fields=fields, combinations=len(members), example=sentence))
    return tuple(refusals)


def _distance(fields: dict[str, int], best: Layout) -> float:
    """How far refused fields are from a layout's, in powers of two; words do not count."""
    return sum(abs(math.log2(fields[name] / getattr(best, name))) for name in COUNTS if name in fields)


def _nearest_unfit(ranking: Ranking, search: Search) -> Unfit | None:
    """The layout that every rule allows, that would beat the best and comes nearest to fitting, if one is found.

    Some of those that a search notes are the leanest that their degrees could be, which no rule was asked about: what
    these become holds more. What the degrees of the best can become besides, no search looks at that has what fits.
    """
    best = float(ranking.value[0]) if len(ranking.value) else np.inf
    noted = [each.row for each in ranking.nearest_unfit()[:UNFIT_TRIED]]
    rows = [search.valid_unfit(row, best) if _broken(row, search) else row for row in noted]
    rows += [search.valid_unfit(take(ranking.rows, slice(1)), best)] if len(ranking.value) else []
    over: list[tuple[float, Unfit]] = []
    for row in rows:
        if row is not None:
            asked = _unfit(row, search)
            seconds, devices = np.array([asked.estimate.sec_per_it]), np.array([asked.layout.devices])
            beats = search.objective.value(seconds, devices, row["global_batch"])[0] < best
            if beats:
                over.append((asked.estimate.mem_gib / _limit_gib(search, asked.layout), asked))
    over = sorted((each for each in over if each[0] > 1.0), key=lambda each: each[0])
    return over[0][1] if over else None


def _limit_gib(search: Search, layout: Layout) -> float:
    return float(memory_limit_gib(search.case.cluster, np.array([layout.devices]), search.mem_margin)[0])


def _broken(row: Columns, search: Search) -> list[Violation]:
    """The rules that a row's layout breaks."""
    case, layout = search.case, search.proposer.grid(row).layout(0)
    workload = with_batch(case.workload, int(row["global_batch"][0]))
    return list(violations(layout, workload, case.cluster, case.stack))


def _unfit(row: Columns, search: Search) -> Unfit:
    """What is predicted of a row's layout, and on which stage it holds too much."""
    grid = search.proposer.grid(row)
    layout = grid.layout(0)
    workload = with_batch(search.case.workload, int(grid.global_batch[0]))
    predicted = estimate_each(search.case.with_workload(workload), grid, simulate=True)[0]
    sentence = memory_sentence(predicted, _limit_gib(search, layout), search.mem_margin)
    return Unfit(layout=layout, estimate=predicted, sentence=sentence)


def _without_limits(search: Search, goal: Goal) -> WholeTraining:
    """The best training by that goal, were there no deadline and no budget.

    Raises TrimaranError where no layout fits: what was unmet was a bound.
    """
    settings = search.proposer.settings.model_copy(update={"objective": Objective(goal=goal), "top": 1})
    unlimited, ranking = searched(search.case, settings)
    best = _entries(ranking, unlimited, 1)[0]
    assert best.days is not None, "limits ask for tokens"
    return WholeTraining(best.layout, best.days, best.cost)


def _nothing(ranking: Ranking, search: Search, devices: int) -> str:
    """Why no layout is left: limits, memory or rules, whichever came nearest."""
    if ranking.unmet:
        fastest = _without_limits(search, "time")
        cheapest = fastest if search.objective.budget is None else _without_limits(search, "cost")
        return unmet_sentence(search.objective, f"no layout on {counted(devices, 'device')}", fastest, cheapest)
    unfit = _nearest_unfit(ranking, search)
    if unfit is not None:
        settings, limit = search.proposer.settings, _limit_gib(search, unfit.layout)
        helps = ways_out(
            unfit.layout, search.case, limit, settings.fixed, enough_devices(search.case, settings, devices)
        )
        return f"no layout on {counted(devices, 'device')} fits; the nearest is {unfit.layout}: {unfit.sentence}{helps}"
    # What is fixed may be nothing that stack or device has, of which memory knows nothing.
    for noted in ranking.nearest_unfit()[:1]:
        for violation in _broken(noted.row, search):
            return f"no layout is valid; for example, {search.proposer.grid(noted.row).layout(0)}: {violation.sentence}"
    sieve, counts = search.proposer.sieve, search.proposer.settings.device_counts
    if sieve.emptied is None and counts:
        return (
            f"sweep.devices {', '.join(map(str, counts))}: no valid layout uses so many of {devices} devices "
            f"({PRODUCT_IN_WORDS}) with a global batch of {search.case.workload.global_batch}: state other numbers, or "
            f"none"
        )
    if sieve.emptied is None:
        return f"no layout on {counted(devices, 'device')} is left: allow more devices or fix fewer choices"
    rule, fields = sieve.emptied
    return f"no layout is valid; for example, {sieve.sentence(rule, fields)}"
