"""MeasuredLink: what one file of another tool says of one link, and how its start-up time becomes a delay."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2


@dataclass(frozen=True)
class StartUp:
    """Microseconds that a collective takes before its bytes count, which are `hops` of a ring or of a tree.

    `passes` times the first byte goes around `hosts` hosts of `per_host` ranks each. The hops are those that the cost
    model counts (`cost/network.py`, `_hops`; NVIDIA/nccl 2.23, src/graph/tuning.cc): a ring crosses each host's border
    once; an all-reduce may take a tree over the hosts, whichever is faster. `around` is False where every rank sends
    straight to the others, which is one hop.
    """

    start_us: float
    passes: int
    hosts: int
    per_host: int
    around: bool = True

    def latency_us(self, intra_us: float) -> float:
        """Delay of one hop of the link that was measured: between hosts, whose devices are `intra_us` apart, or inside.

        Not below a hop's even share, should the hops inside be shorter than the cluster states.
        """
        if not self.around:
            return self.start_us
        ranks = self.hosts * self.per_host
        if self.hosts == 1:
            return self.start_us / (self.passes * (ranks - 1))
        borders = min(self.hosts, ranks - 1)
        ways = [(ranks - 1 - borders, borders)]
        if self.passes == 2:
            ways.append((self.per_host - 1, ceil(log2(self.hosts))))
        # the faster of two ways took this long, so a hop is as long as the way of fewer hops allows
        return max(
            max(
                self.start_us / self.passes - inside * intra_us,
                self.start_us / self.passes / (inside + across) * across,
            )
            / across
            for inside, across in ways
        )


@dataclass(frozen=True)
class MeasuredLink:
    """A link as one file has it: between `hosts`, each of `per_host` ranks, or inside of one.

    Rates are gigabit/s of a host (of a device, inside of one): from the first host to the second and back, None
    where that way was not measured. The delay is `delay_us`, or follows from a collective's `start_up`; neither
    where the file tells none. `bus_gb_s` is a collective's bus bandwidth between hosts, 0 where there was none.
    """

    file: str
    tool: str
    said: str
    hosts: tuple[str, ...]
    per_host: int
    there_gbps: float | None
    back_gbps: float | None
    delay_us: float | None = None
    start_up: StartUp | None = None
    bus_gb_s: float = 0.0
    remarks: tuple[str, ...] = ()
