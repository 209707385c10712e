"""Nodes that compute more slowly than others: a quota of CPU time for each of their ranks, measured before a trial."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing

from trimaran.bench.launch.cgroup import SpeedGroup, speed_group
from trimaran.bench.launch.contract import NoNetworkError, TrialRefusedError
from trimaran.bench.launch.network.measure import TOLERANCE
from trimaran.nouns.shaped_network import ShapedNetwork

# A busy machine may fail a check that it passes a second later.
_CHECKS = 4
_SPIN_S = 0.4
# What a process gets of a core while it does nothing but compute, in the group of which it is told.
_SPIN = f"""
import sys, time
with open(sys.argv[1], "w") as processes:
    processes.write("0")
begin, used = time.perf_counter(), time.process_time()
while (seconds := time.perf_counter() - begin) < {_SPIN_S}:
    pass
print((time.process_time() - used) / seconds)
"""


class Paces:
    """The control groups of the ranks that sit on slow nodes, which end with their trial.

    `nodes` are those that the ranks sit on, by rank. Raises TrialRefusedError with both numbers where a quota does not
    give what was asked for, and TrimaranError where none can be set here.
    """

    def __init__(self, network: ShapedNetwork, nodes: Sequence[int], threads: int) -> None:
        self._groups: dict[int, SpeedGroup] = {}
        self._measured = {share: _measured(network, share) for share in _shares(network, nodes)}
        self._network, self._nodes = network, nodes
        try:
            for rank, node in enumerate(nodes):
                if (share := network.speed(node)) < 1:
                    self._groups[rank] = _group(network, share * threads)
        except BaseException:
            self.close()
            raise

    @property
    def files(self) -> list[str]:
        """Where each rank joins its group; empty for ranks at full speed."""
        groups = self._groups
        return [str(groups[rank].processes_file) if rank in groups else "" for rank in range(len(self._nodes))]

    def __str__(self) -> str:
        slow = sorted({node for node in self._nodes if self._network.speed(node) < 1})
        return "".join(
            f"; node {node} measured {self._measured[self._network.speed(node)]:.3g} of its speed" for node in slow
        )

    def close(self) -> None:
        """End what is left in the groups, and remove them."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()


def require_quotas(network: ShapedNetwork) -> None:
    """Raise TrimaranError where a network has slow nodes and no quota can be set here."""
    if network.nodes:
        _group(network, network.nodes[0].cpu_share).close()


def _shares(network: ShapedNetwork, nodes: Iterable[int]) -> list[float]:
    return sorted({share for node in nodes if (share := network.speed(node)) < 1})


def _measured(network: ShapedNetwork, share: float) -> float:
    """The part of a core that a process gets which may have `share` of it."""
    with closing(_group(network, share)) as group:
        group.go_first()  # what others compute meanwhile is no part of the quota
        for _ in range(_CHECKS):
            got = _spin(group)
            if abs(got / share - 1) <= TOLERANCE:
                return got
    raise TrialRefusedError(
        f"network {network.name!r}: a rank at cpu_share {share:g} gets {got:.3g} of a core, {got / share - 1:+.0%} "
        f"where {TOLERANCE:.0%} are allowed; use a machine that is less busy"
    )


def _spin(group: SpeedGroup) -> float:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _SPIN, str(group.processes_file)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def _group(network: ShapedNetwork, cores: float) -> SpeedGroup:
    group = speed_group(cores)
    if group is None:
        slow = network.nodes[0]
        raise NoNetworkError(
            f"network {network.name!r} gives node {slow.node} cpu_share {slow.cpu_share:g}, and no quota of CPU time "
            f"can be set here: run as root with the cpu controller of control groups, or leave nodes out"
        )
    return group
