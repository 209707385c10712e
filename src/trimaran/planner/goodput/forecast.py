"""What a planned training takes on machines that fail: days and cost with their spread, interval, spares."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimaran.cost.case import Case
from trimaran.files.catalogue import load_faults
from trimaran.layout.places import mean_of_devices
from trimaran.nouns.faults import Faults
from trimaran.nouns.noun import Noun, TrimaranError
from trimaran.planner.goodput.expected import (
    Faulty,
    daly_s,
    expected,
    young_s,
)
from trimaran.planner.goodput.layouts import DAY_S, FewerNodes, LayoutUnderFaults, UnderFaults, faulty_training
from trimaran.planner.goodput.recovery import Recovery, with_measured
from trimaran.planner.goodput.simulate import simulated_s
from trimaran.planner.plan import Entry, Plan
from trimaran.planner.search.settings import PlanSettings

# Faults of GPUs on clusters that state none.
USUAL_FAULTS = "llama3-h100"
RUNS, SEED = 200, 1
# Intervals that are simulated, as shares of the best by the closed form.
INTERVALS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0)
# Spares are counted until so little time is spent on waiting for a node.
LITTLE_WAITING = 1e-3
MOST_SPARES = 64
# A training that runs less of the time than this for its work never ends: it takes a thousand times as long.
LEAST_GOODPUT = 1e-3


class Spares(Noun):
    """What so many spare nodes come to: days in the mean, and cost where a price is stated, theirs included."""

    nodes: int
    days: float
    waiting: float
    cost: float | None


class Forecast(Noun):
    """A planned training on machines that fail.

    `days_without` is what the plan says, as if nothing failed. `days` is the mean; `days_p50` and `days_p90` are of a
    simulation in which the predicted time of a step also errs as the plan's predictions do. Shares of the time add up
    to 1: `work` is what the plan's days are of. `interval_s` is the best work between two checkpoints in closed form.
    `layouts` are the best few of the plan and those that keep nodes to spare, the fewest expected days first.
    `spot` is the same training on spot devices, where their price and how often they are taken away are stated;
    `spot_never` says why it would never end on these.
    """

    faults_of: str
    source: str
    assumptions: tuple[str, ...]
    measured: tuple[str, ...] = ()
    layout: str
    devices: int
    hours_between_faults: float
    faults: float
    days_without: float
    days: float
    days_p50: float
    days_p90: float
    cost: float | None
    cost_p50: float | None
    cost_p90: float | None
    work: float
    checkpoints: float
    lost: float
    restarts: float
    waiting: float
    interval_s: float
    young_s: float
    daly_s: float
    simulated_interval_s: float
    spare_nodes: int
    spares: tuple[Spares, ...] = ()
    spares_that_pay: int | None = None
    fewer_nodes: FewerNodes | None = None
    layouts: tuple[LayoutUnderFaults, ...] = ()
    spot: Forecast | None = None
    spot_never: str | None = None


def forecast(case: Case, planned: Plan, settings: PlanSettings, recovery: Recovery | None = None) -> Forecast | None:
    """The best layout's training on machines that fail; None where no tokens are stated, or no faults are known.

    The cluster's own faults count; of GPUs whose cluster states none, published ones. What these do not state is taken
    from what a training has measured of its `recovery`, where it has. Raises TrimaranError where
    faults come so fast that the training never ends.
    """
    entry, cluster = planned.best, case.cluster
    if entry.days is None:
        return None
    assumptions: tuple[str, ...] = ()
    faults = cluster.faults
    if faults is None:
        if case.on_cpu:
            return None
        faults = load_faults(USUAL_FAULTS)
        assumptions = (f"faults are those of {USUAL_FAULTS}, since cluster {cluster.name} states none: --faults does",)
    measured: tuple[str, ...] = ()
    if recovery is not None:
        faults, measured = with_measured(faults, recovery)
    price = mean_of_devices(entry.layout, cluster, lambda nodes: nodes.price_per_device_hour)
    found = _forecast(case, planned, entry, faults, price, assumptions).model_copy(update={"measured": measured})
    training, _ = faulty_training(case, entry, faults)
    under_faults = UnderFaults(case, faults, settings)
    more_known = {"fewer_nodes": under_faults.fewer_nodes(entry, training), "layouts": under_faults.ranked(planned)}
    found = found.model_copy(update=more_known)
    spot_price = mean_of_devices(entry.layout, cluster, lambda nodes: nodes.spot_price_per_device_hour)
    if spot_price is None or faults.preemptions_per_device_day is None:
        return found
    taken = faults.preemptions_per_device_day
    more = {"faults": faults.faults + taken * faults.days * faults.devices}
    try:
        spot = _forecast(case, planned, entry, faults.model_copy(update=more), spot_price, ())
    except TrimaranError as error:
        return found.model_copy(update={"spot_never": str(error)})
    return found.model_copy(update={"spot": spot})


def _forecast(
    case: Case, planned: Plan, entry: Entry, faults: Faults, price: float | None, assumptions: tuple[str, ...]
) -> Forecast:
    training, stated = faulty_training(case, entry, faults)
    known = expected(training)
    running = known.work_s / (known.total_s - known.waiting_s)
    if running < LEAST_GOODPUT:
        raise TrimaranError(
            f"faults: one every {1 / training.rate:.0f} s on {entry.devices} devices, where a restart takes "
            f"{training.restart_s:.0f} s and a checkpoint {training.save_s:.3g} s: the training never ends, "
            f"{running:.2%} of its time would be work; use fewer devices, or state a shorter restart_s or save_s"
        )
    error = np.exp(planned.time_error * np.random.default_rng(SEED).standard_normal(RUNS))
    p50, p90 = np.quantile(simulated_s(training, RUNS, SEED) * error, (0.5, 0.9)) / DAY_S
    nodes = faults.spare_nodes * case.cluster.devices_replaced
    day_cost = None if price is None else 24.0 * price * (entry.devices + nodes)

    def cost(days: float) -> float | None:
        return None if day_cost is None else days * day_cost

    days = known.total_s / DAY_S
    spares = _spares(case, entry, training, price) if training.repair_s else ()
    return Forecast(
        faults_of=faults.name or "this cluster",
        source=faults.source or ("no source is named" if faults.name else "stated by the cluster"),
        assumptions=(*assumptions, *stated),
        layout=str(entry.layout),
        devices=entry.devices,
        hours_between_faults=1.0 / training.rate / 3600.0,
        faults=known.faults,
        days_without=training.work_s / DAY_S,
        days=days,
        days_p50=float(p50),
        days_p90=float(p90),
        cost=cost(days),
        cost_p50=cost(float(p50)),
        cost_p90=cost(float(p90)),
        work=known.goodput,
        checkpoints=known.checkpoints_s / known.total_s,
        lost=known.lost_s / known.total_s,
        restarts=known.restarts_s / known.total_s,
        waiting=known.waiting_s / known.total_s,
        interval_s=training.every_s,
        young_s=young_s(training.save_s, training.rate),
        daly_s=daly_s(training.save_s, training.rate),
        simulated_interval_s=_simulated_interval(training),
        spare_nodes=faults.spare_nodes,
        spares=spares,
        spares_that_pay=_paying(spares),
    )


def _simulated_interval(training: Faulty) -> float:
    """Of a few intervals around the best in closed form, the one whose simulated trainings are the shortest."""
    simple = replace(training, repair_s=0.0, spares=0)
    tried = [replace(simple, every_s=training.every_s * share) for share in INTERVALS]
    return min(tried, key=lambda each: float(simulated_s(each, RUNS // 2, SEED).mean())).every_s


def _spares(case: Case, entry: Entry, training: Faulty, price: float | None) -> tuple[Spares, ...]:
    """What each number of spare nodes comes to, from none to where hardly any time is spent waiting."""
    rows: list[Spares] = []
    per_node = case.cluster.devices_replaced
    for nodes in range(MOST_SPARES + 1):
        with_spares = replace(training, spares=nodes)
        known = expected(with_spares)
        days, waiting = known.total_s / DAY_S, known.waiting_s / known.total_s
        cost = None if price is None else days * 24.0 * price * (entry.devices + nodes * per_node)
        rows.append(Spares(nodes=nodes, days=days, waiting=waiting, cost=cost))
        if rows[-1].waiting < LITTLE_WAITING:
            break
    return tuple(rows)


def _paying(spares: tuple[Spares, ...]) -> int | None:
    """The cheapest number of spares; without a price the one that hardly waits."""
    if not spares:
        return None
    best = min(spares, key=lambda row: row.days if row.cost is None else row.cost)
    return best.nodes
