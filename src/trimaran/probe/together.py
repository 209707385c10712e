"""What is measured with several ranks: collectives, sends, and what slots cost each other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.distributed as dist

from trimaran.nouns.hardware.measured import OFTEN_S, CollectiveTime, Contention
from trimaran.probe.alone import Operands, activation_passes, small_operators, stream
from trimaran.probe.probe_settings import MIB, ProbedProduct, ProbeSettings
from trimaran.probe.timing import seconds_of, synchronize
from trimaran.train.comm.group import Group, GroupFactory

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"]
_OPS: tuple[Op, ...] = ("all_reduce", "send", "all_gather", "reduce_scatter", "broadcast")
_OPS_QUICK: tuple[Op, ...] = ("all_reduce", "send")
# What one sample moves at least, so that it is long against the skew of the barrier before it.
_SAMPLE_BYTES = 2 * MIB
_MOST_RUNS_A_SAMPLE = 8
# Waking ranks takes one time or another for seconds on end, so many short samples beat few long ones.
_ROUNDS = 3
# How many looks at contention are taken at least, and the side of the product that it looks at.
_LOOKS = 6
_SIDE = 512


def make_groups(settings: ProbeSettings, rank: int, device: torch.device) -> dict[int, Group | None]:
    """The trainer's own group of the first n ranks for every n; None on ranks outside. All ranks must call this."""
    factory = GroupFactory(device)
    return {size: factory.get(tuple(range(size)), rank) for size in settings.groups}


class CollectiveTiming:
    """Microseconds of every operation by size and number of ranks, as rank 0 sees them.

    An all_reduce is the trainer's own, which on a CPU node goes through shared memory; the others are
    the backend's. A size is that of the whole tensor: what all_gather ends with and reduce_scatter starts from.
    A send is half of a there-and-back between the first two ranks.
    """

    def __init__(self, settings: ProbeSettings, groups: Mapping[int, Group | None], device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._rounds = _ROUNDS * settings.rounds
        self._samples: dict[tuple[Op, int, int], list[float]] = {
            (op, ranks, size): []
            for op in (_OPS_QUICK if settings.quick else _OPS)
            for ranks in settings.groups
            for size in settings.collective_bytes
            if op != "send" or ranks == 2
        }
        self._taken = 0

    def spell(self, share: float) -> None:
        """Take samples until `share` of all has been taken; all ranks enter it together."""
        if not self._taken:
            self._round(kept=False)  # opens the connections
        while self._taken < share * self._rounds:
            self._round(kept=True)
            self._taken += 1

    def _round(self, *, kept: bool) -> None:
        for (op, ranks, size), taken in self._samples.items():
            dist.barrier()
            group = self._groups[ranks]
            if group is None:
                continue
            run = _operation(op, size, group, self._device)
            runs = max(1, min(_MOST_RUNS_A_SAMPLE, _SAMPLE_BYTES // size))
            seconds = seconds_of(run, runs, self._device)
            if kept:
                taken.append(seconds / (2 if op == "send" else 1))

    def result(self) -> tuple[CollectiveTime, ...]:
        """What all spells together say, on rank 0."""
        return tuple(
            CollectiveTime(op=op, ranks=ranks, bytes=size, time_us=statistics.median(taken) * 1e6)
            for (op, ranks, size), taken in self._samples.items()
        )


def _operation(op: Op, size: int, group: Group, device: torch.device) -> Callable[[], object]:
    tensor = torch.zeros(size // 4, device=device)
    if op == "all_reduce":
        return lambda: group.all_reduce(tensor)
    if op == "broadcast":
        return lambda: dist.broadcast(tensor, 0, group=group.handle)
    if op == "send":
        return lambda: _there_and_back(tensor, group)
    share = torch.zeros(size // 4 // group.size, device=device)
    whole = tensor[: share.numel() * group.size]
    if op == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, share, group=group.handle)
    return lambda: dist.reduce_scatter_tensor(share, whole, group=group.handle)


def _there_and_back(tensor: torch.Tensor, group: Group) -> None:
    if group.index == 0:
        dist.send(tensor, 1, group=group.handle)
        dist.recv(tensor, 1, group=group.handle)
    else:
        dist.recv(tensor, 0, group=group.handle)
        dist.send(tensor, 0, group=group.handle)


class ContentionLooks:
    """How much slower each kind of work gets as more slots do it at once.

    Ranks of a training meet, at sums and at the ends of its steps, and wait for the slowest of each piece of work. So
    a look takes the slowest slot of a whole window, as those that meet seldom do, and one more kind of look products of
    slots that meet most often. On 2 cores of a Xeon whose neighbours come and go for seconds, 2 slots took 1.12 times
    as long as one however often they met, which their mean pace hides; 4 slots 2.5 times between meetings every 2 ms,
    2.3 at 50 ms and 2.1 at a quarter of a second or more. Looks are taken in spells that lie apart, since neighbours
    take of a host's memory bandwidth for minutes.
    """

    def __init__(
        self, settings: ProbeSettings, groups: Mapping[int, Group | None], rank: int, device: torch.device
    ) -> None:
        self._settings, self._groups, self._rank, self._device = settings, groups, rank, device
        self._works: dict[str, Callable[[], object]] = {
            "matmul": Operands(device).product(ProbedProduct(m=_SIDE, n=_SIDE, k=_SIDE), torch.float32),
            "memory": stream(settings.stream_mib, device),  # the arrays whose rate alone is the bandwidth
            "passes": activation_passes(device),
            "overhead": small_operators(device),
        }
        self._works["often"] = self._works["matmul"]
        looks = [(name, ranks) for name in self._works for ranks in (1, *settings.groups) if settings.groups]
        self._samples: dict[tuple[str, int], list[float]] = {look: [] for look in looks}
        self._runs = {name: self._runs_of_a_piece(name) for name in self._works}
        self._taken, self._rounds = 0, max(_LOOKS, settings.rounds // 2)
        self._round(kept=False)  # opens what the groups meet by

    def spell(self, share: float) -> None:
        """Look until `share` of all looks has been taken; all ranks enter it together."""
        while self._taken < share * self._rounds:
            self._round(kept=True)
            self._taken += 1

    def result(self) -> tuple[Contention, ...]:
        """What all spells together say, by the number of ranks at work; of one slot there is nothing to say."""
        return tuple(self._of(ranks) for ranks in self._settings.groups)

    def _of(self, ranks: int) -> Contention:
        """Medians of the ratios of looks that follow each other, which neighbours on the host disturb alike.

        Of five probes of one machine they repeat within 1 to 3%, ratios of lower quartiles within 18% for memory.
        """
        felt = {
            name: max(1.0, statistics.median(several / one for one, several in zip(*looks, strict=True)))
            for name in self._works
            for looks in [(self._samples[name, 1], self._samples[name, ranks])]
        }
        # slots help each other in nothing, and wait no less where they meet more often: less is a disturbed look
        return Contention(ranks=ranks, **felt | {"often": max(felt["matmul"], felt["often"])})

    def _runs_of_a_piece(self, name: str) -> int:
        """How many runs make a piece of OFTEN_S, on all ranks alike."""
        run = self._works[name]
        run()  # builds kernels, touches memory
        runs = torch.tensor([OFTEN_S / seconds_of(run, 1, self._device)], device=self._device)
        dist.broadcast(runs, 0)
        return max(1, round(runs.item()))

    def _round(self, *, kept: bool) -> None:
        for (name, ranks), taken in self._samples.items():
            dist.barrier()
            if self._rank >= ranks:
                continue
            group = None if ranks == 1 else self._groups[ranks]
            run, runs, window_s = self._works[name], self._runs[name], self._settings.window_s
            if name == "often":
                pieces = max(1, round(window_s / OFTEN_S))
                seconds = seconds_between_meetings(run, runs, pieces, group, self._device)
                seconds -= seconds_between_meetings(run, 0, pieces, group, self._device)
            else:
                seconds = seconds_of_the_slowest(run, runs, window_s, group, self._device)
            if kept:
                taken.append(seconds)


def seconds_between_meetings(
    run: Callable[[], object], runs: int, pieces: int, group: Group | None, device: torch.device
) -> float:
    """Mean seconds of a piece of `runs` runs, after each of which this rank meets the others of its group."""
    met = torch.zeros(1, device=device)
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(pieces):
        for _ in range(runs):
            run()
        if group is not None:
            group.all_reduce(met)
    synchronize(device)
    return (time.perf_counter() - begin) / pieces


def seconds_of_the_slowest(
    run: Callable[[], object], runs: int, window_s: float, group: Group | None, device: torch.device
) -> float:
    """Seconds of a piece of `runs` runs by the slowest of the group's ranks, all at work until `window_s` is over."""
    index, size = (0, 1) if group is None else (group.index, group.size)
    seconds = torch.zeros(size, device=device)
    if group is not None:
        group.all_reduce(seconds)  # begin together
    synchronize(device)
    begin, pieces, past = time.perf_counter(), 0, 0.0
    while past < window_s:
        for _ in range(runs):
            run()
        synchronize(device)
        pieces, past = pieces + 1, time.perf_counter() - begin
    seconds[index] = past / pieces
    if group is not None:
        group.all_reduce(seconds)
    return seconds.max().item()
