"""Sizes: how many devices of a large cluster a training is worth, where nobody says how many to use.

Such that half as many devices train at most 1 / WORTH_DOUBLING as fast, and twice as many less than WORTH_DOUBLING
times as fast. Searches of three sizes prove that, where the first is well chosen; the largest ones take longest.
"""

from __future__ import annotations

import math

from trimaran.cost.case import Case
from trimaran.layout.axes import devices_of
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError
from trimaran.planner.search.candidates import Proposer
from trimaran.planner.search.search import Search
from trimaran.planner.search.settings import PlanSettings
from trimaran.planner.search.sieve import Sieve
from trimaran.planner.search.space import space_of

# Clusters of more devices than this are not used whole unless somebody says so: as many devices are planned on as
# make training at least so many times as fast as half of them do, which is 80% of what doubling could bring.
MANY_DEVICES = 1024
WORTH_DOUBLING = 1.6
# How often as many devices are tried where nothing fits.
DOUBLINGS = 5
# Tokens of a batch that a device has at the size that is looked at first: fewer leave its products small.
USUAL_TOKENS = 1024


def on_devices(cluster: Cluster, devices: int) -> Cluster:
    """The cluster as a job of so many devices has it, with more nodes of the same kind where it has fewer.

    Raises TrimaranError where its nodes are of several kinds.
    """
    if devices <= cluster.devices:
        return cluster.of_a_job(devices)
    if cluster.groups:
        raise TrimaranError(
            f"devices {devices}, but the groups of {cluster.name} have {cluster.devices}: state more nodes of a "
            f"group, or fewer devices"
        )
    used = cluster.model_copy(update={"nodes": devices}).of_a_job(devices)
    return used.model_copy(update={"nodes": -(-devices // used.devices_per_node)})


def search_of(
    case: Case, settings: PlanSettings, most: int, within: float = math.inf, sieve: Sieve | None = None
) -> Search:
    """The search that the settings ask for, which ranks so many at most, of a value of `within` at most.

    `sieve`: one that has been asked about other sizes of the same cluster, whose answers hold here too.
    """
    cap = settings.devices or case.cluster.devices
    case = case.on(on_devices(case.cluster, cap))
    about = case.workload, case.cluster, case.stack
    space = space_of(*about, cap, settings.fixed, tolerant=settings.gbs_tolerance > 0)
    proposer = Proposer(space, sieve or Sieve(*about), settings, cap)
    return Search(case, proposer, settings.objective, settings.mem_margin, most, settings.top, within)


def fastest_on(
    case: Case, settings: PlanSettings, devices: int, within: float = math.inf, sieve: Sieve | None = None
) -> tuple[float, int]:
    """Seconds a sequence of the fastest layout on at most so many devices, by the closed form, and how many it uses.

    inf and all of them where none fits, or none takes at most `within`.
    """
    sized = settings.model_copy(update={"devices": devices, "top": 1})
    ranking = search_of(case, sized, 1, within, sieve).search()
    if not len(ranking.value):
        return math.inf, devices
    return float(ranking.value[0]), int(devices_of(ranking.rows)[0])


def enough_devices(case: Case, settings: PlanSettings, devices: int) -> int:
    """The first of twice, four times, ... so many devices on which some layout fits, or 0."""
    several = () if settings.device_counts else (devices * 2**doubling for doubling in range(1, DOUBLINGS + 1))
    return next((more for more in several if math.isfinite(fastest_on(case, settings, more)[0])), 0)


def with_sensible_size(case: Case, settings: PlanSettings) -> tuple[PlanSettings, str]:
    """Settings that say how many devices to use, and the sentence why, empty where nobody has to be told.

    Where a plan for the fastest training names no number, on a cluster of more than MANY_DEVICES.
    """
    cluster, objective = case.cluster, settings.objective
    is_open = not (settings.devices or settings.device_counts or objective.limited) and objective.goal == "time"
    if not is_open or cluster.devices <= MANY_DEVICES:
        return settings, ""
    sizes = _Sizes(case, settings)
    size = sizes.worth()
    sized = settings.model_copy(update={"devices": size})
    if size == cluster.devices:
        return sized, ""
    gain = sizes.seconds(size) / sizes.seconds(sizes.doubled(size))
    return sized, (
        f"{size} of the {cluster.devices} devices of {cluster.name} are planned on: twice as many would train "
        f"{gain:.2f} times as fast, and less than {WORTH_DOUBLING:g} times is not worth them; --devices states another "
        f"number"
    )


class _Sizes:
    """All devices of a cluster, half, a quarter, ...: what the fastest layout takes on each, by the closed form."""

    def __init__(self, case: Case, settings: PlanSettings) -> None:
        self.case, self.settings = case, settings
        self._sieve = Sieve(case.workload, case.cluster, case.stack)
        # Seconds a sequence by size; inf where nothing fits.
        self._known: dict[int, float] = {}
        node = case.cluster.devices_per_node
        self._all = [case.cluster.devices]
        while self._all[-1] > node:
            self._all.append(self._all[-1] // 2 // node * node or node)

    def worth(self) -> int:
        """The size that is worth it: its half is too slow, its double not fast enough; all where nothing fits.

        Begins where each device has USUAL_TOKENS of a batch, and goes from size to size as long as one is better.
        """
        workload = self.case.workload
        most = workload.global_batch * workload.seq_len / USUAL_TOKENS
        at = next((at for at, size in enumerate(self._all) if size <= most), len(self._all) - 1)
        if not math.isfinite(self.seconds(self._all[at])) and not math.isfinite(self.seconds(self._all[0])):
            return self._all[0]
        while not math.isfinite(self.seconds(self._all[at])):
            at -= 1
        while True:
            size = self._all[at]
            if at and self.seconds(size) >= WORTH_DOUBLING * self.seconds(self._all[at - 1], self.seconds(size)):
                at -= 1
            elif at + 1 < len(self._all) and self._is_enough(self._all[at + 1], size):
                at += 1
            else:
                return size

    def doubled(self, size: int) -> int:
        """The next larger size."""
        return self._all[self._all.index(size) - 1]

    def seconds(self, size: int, slowest: float = math.inf) -> float:
        """What the fastest layout takes on at most so many devices, which is known to be `slowest` at most."""
        if size not in self._known:
            self._known[size] = self._fastest(size, slowest)
        return self._known[size]

    def _is_enough(self, half: int, size: int) -> bool:
        """Whether half of a size is fast enough: what is not is not looked for."""
        limit = WORTH_DOUBLING * self.seconds(size)
        if half not in self._known and math.isfinite(limit):
            seconds = self._fastest(half, limit)
            if math.isfinite(seconds):
                self._known[half] = seconds
        return self._known.get(half, math.inf) < limit

    def _fastest(self, size: int, within: float) -> float:
        """Seconds a sequence of the fastest layout on at most so many devices; inf where that is more than `within`."""
        seconds, used = fastest_on(self.case, self.settings, size, within, self._sieve)
        if math.isfinite(seconds):
            for other in self._all:
                # The fastest on more devices than it uses is the fastest on as many as it uses.
                if used <= other < size:
                    self._known[other] = seconds
        return seconds
