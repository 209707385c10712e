"""Layouts of a plan on machines that fail: which of them has the fewest expected days."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np

from trimaran.cost.case import Case
from trimaran.nouns.faults import Faults
from trimaran.nouns.noun import Noun, TrimaranError
from trimaran.planner.goodput.expected import Faulty, best_interval_s, expected
from trimaran.planner.plan import Entry, Plan
from trimaran.planner.planner import plan_with
from trimaran.planner.ramp_up import RESTART_MINUTES
from trimaran.planner.search.settings import PlanSettings

DAY_S, GIB = 86400.0, 2.0**30
# A snapshot goes to host memory over the device's own link, where that is stated; else at what PCIe 4.0 x16 carries at
# most: 16 GT/s x 16 lanes x 128/130 (PCI-SIG).
SNAPSHOT_GB_S = 31.5
# So many of a plan's layouts are laid under faults, and on so many nodes less, which then stand by.
BEST, KEPT_TO_SPARE = 5, (1, 2)
# Moments of a training at which it is asked how many nodes are away.
_MOMENTS = 64


class FewerNodes(Noun):
    """Going on with so many nodes less while more are away than there are spares, in place of waiting for them."""

    nodes: int
    layout: str
    slower: float
    days: float
    better: bool


class LayoutUnderFaults(Noun):
    """One layout's training under faults: its expected days, and what nodes of the same machine stand by.

    `fewer_nodes`: it goes on with fewer nodes while more are away than stand by, which is better than to wait.
    """

    layout: str
    devices: int
    spare_nodes: int
    days_without: float
    days: float
    fewer_nodes: bool = False


def faulty_training(case: Case, entry: Entry, faults: Faults) -> tuple[Faulty, tuple[str, ...]]:
    """The entry's training on machines with these faults, at the best interval, and sentences on what is assumed."""
    assert entry.days is not None, "tokens are stated"
    assumed = []
    restart_s = faults.restart_s
    if restart_s is None:
        restart_s = RESTART_MINUTES * 60.0
        assumed.append(f"a restart takes {RESTART_MINUTES:g} minutes, which faults.restart_s does not state")
    save_s = faults.save_s
    if save_s is None:
        state_gib = max(stage.weights + stage.optimizer for stage in entry.estimate.memory)
        device = case.cluster.device
        rate_gb_s = device.mem_bandwidth_gb_s if case.on_cpu else device.host_link_gb_s or SNAPSHOT_GB_S
        save_s = state_gib * GIB / (rate_gb_s * 1e9)
        assumed.append(
            f"a checkpoint stops the training for {save_s:.2f} s, to copy {state_gib:.1f} GiB of each device at "
            f"{rate_gb_s:g} GB/s, and is written before the next is due; faults.save_s states another"
        )
    if faults.repair_hours is None:
        assumed.append("another node takes the place of a failed one at once, since faults.repair_hours is not stated")
    elif case.cluster.devices_per_host:
        assumed.append(
            f"a node that fails is a host, of {case.cluster.devices_replaced} devices, as devices_per_host says"
        )
    rate = faults.per_device_day * entry.devices / DAY_S
    return Faulty(
        work_s=entry.days * DAY_S,
        rate=rate,
        every_s=max(best_interval_s(save_s, rate), entry.sec_per_it),
        save_s=save_s,
        detect_s=faults.detect_s,
        restart_s=restart_s + faults.load_s,
        away_share=faults.away_share,
        repair_s=(faults.repair_hours or 0.0) * 3600.0,
        spares=faults.spare_nodes,
    ), tuple(assumed)


class UnderFaults:
    """What becomes of a plan's layouts under the faults of its machine."""

    def __init__(self, case: Case, faults: Faults, settings: PlanSettings) -> None:
        self._case, self._faults, self._settings = case, faults, settings
        self._best_on = cache(self._plan_on)

    def ranked(self, planned: Plan) -> tuple[LayoutUnderFaults, ...]:
        """The best layouts of the plan, and where nodes are away those on a few nodes less, fewest days first.

        Nodes that such a layout leaves free are spare ones: the machine is the same for all.
        """
        case, faults = self._case, self._faults
        tried = [(entry, 0) for entry in planned.entries[:BEST] if entry.devices == planned.best.devices]
        if faults.repair_hours is not None:
            for nodes in KEPT_TO_SPARE:
                fewer = self._best_on(planned.best.devices - nodes * case.cluster.devices_replaced)
                tried += [] if fewer is None else [(fewer, nodes)]
        rows = [self._expected(entry, nodes) for entry, nodes in tried]
        return tuple(sorted(rows, key=lambda row: row.days))

    def fewer_nodes(self, entry: Entry, training: Faulty) -> FewerNodes | None:
        """What going on with fewer nodes comes to, where nodes are away and there is a layout for the rest.

        How many are away is then Poisson's, since nodes go on to fail: none at the start, as many as go and come back
        in the long run. While more are away than there are spares, the training makes `1 / slower` of its steps, on as
        many nodes less as are missing in the mean; each time that this begins it costs a restart more, to grow again.
        """
        away = training.rate * training.away_share * training.repair_s
        spares, known = training.spares, expected(training)
        less = max(1, round(away - spares))
        devices = entry.devices - less * self._case.cluster.devices_replaced
        if not known.waiting_s or not math.isfinite(known.total_s) or (fewer := self._best_on(devices)) is None:
            return None
        slower = entry.tokens_per_s / fewer.tokens_per_s
        running_s = known.total_s - known.waiting_s
        # how many are away in the mean, at as many moments; then chances of none to as many as there are spares
        moments_s = running_s * (np.arange(_MOMENTS) + 0.5) / _MOMENTS
        mean = (away * -np.expm1(-moments_s / training.repair_s))[:, None]
        logs = np.arange(spares + 1) * np.log(mean) - mean - [math.lgamma(k + 1) for k in range(spares + 1)]
        chances = np.exp(logs).mean(axis=0)
        short = 1.0 - float(chances.sum())
        restarts = training.rate * training.away_share * float(chances[-1]) * training.restart_s
        kept = 1.0 - short + short / slower - restarts
        days = running_s / kept / DAY_S if kept > 0 else math.inf
        better = days < known.total_s / DAY_S
        return FewerNodes(nodes=less, layout=str(fewer.layout), slower=slower, days=days, better=better)

    def _expected(self, entry: Entry, nodes: int) -> LayoutUnderFaults:
        training, _ = faulty_training(self._case, entry, self._faults)
        training = replace(training, spares=training.spares + nodes)
        days = expected(training).total_s / DAY_S
        fewer = self.fewer_nodes(entry, training)
        goes_on = fewer is not None and fewer.better
        return LayoutUnderFaults(
            layout=str(entry.layout),
            devices=entry.devices,
            spare_nodes=training.spares,
            days_without=training.work_s / DAY_S,
            days=fewer.days if fewer is not None and goes_on else days,
            fewer_nodes=goes_on,
        )

    def _plan_on(self, devices: int) -> Entry | None:
        """The fastest layout on so many devices; None where there is none."""
        if devices < 1:
            return None
        settings = self._settings.model_copy(update={"devices": devices, "device_counts": (), "top": 1})
        try:
            return plan_with(self._case, settings).best
        except TrimaranError:
            return None
