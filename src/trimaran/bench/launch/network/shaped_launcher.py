"""The launcher of shaped networks: every node of the layout in its network namespace."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from trimaran.bench.launch.contract import RESTARTS, Launch, Loss, Ranks, Say, TrialRefusedError
from trimaran.bench.launch.local import LocalLauncher
from trimaran.bench.launch.network.measure import LinkCheck, measure_links
from trimaran.bench.launch.network.pace import Paces, require_quotas
from trimaran.bench.launch.network.switch import DEVICE
from trimaran.bench.launch.network.switched import SwitchedNetwork
from trimaran.files.catalogue import write_atomically
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.shaped_network import ShapedNetwork
from trimaran.protocol.environment import RENDEZVOUS_FD
from trimaran.recipe.sweep_settings import SweepSettings

_ENTER = Path(__file__).with_name("enter.py")
_CHECK_FILE = "network.txt"
# No other program can hold this port: the namespace belongs to the trial alone.
_PORT = 29400
# A busy machine may fail a check that it passes a second later.
_CHECKS = 3


class ShapedLauncher:
    """Starts a trial's ranks on the nodes of a virtual switch, once its links are measured to be as asked."""

    at_once = 1
    restarts = RESTARTS
    on_this_machine = True
    job: str | None = None
    tells_groups = False

    def __init__(self, network: ShapedNetwork) -> None:
        self.network = network

    @classmethod
    def asked_for(cls, sweep: SweepSettings, cluster: Cluster, say: Say) -> Self | None:
        """One where the cluster's network is shaped. Raises TrimaranError where Slurm or Ray is asked for besides."""
        if cluster.shaped and (sweep.slurm or sweep.ray):
            raise TrimaranError(
                f"networks are shaped inside one machine, and sweep.{'slurm' if sweep.slurm else 'ray'} asks for "
                f"others: drop one of them"
            )
        if cluster.shaped is None:
            return None
        if beyond := [slow.node for slow in cluster.shaped.nodes if slow.node >= cluster.nodes]:
            raise TrimaranError(
                f"network {cluster.shaped.name!r} states a cpu_share of node {beyond[0]}, but the machine has "
                f"{cluster.nodes} nodes of {cluster.devices_per_node} ranks: 0 to {cluster.nodes - 1}; correct "
                f"nodes or ranks_per_node"
            )
        return cls(cluster.shaped)

    def close(self) -> None:
        """A network ends with its trial."""

    def expect(self, nodes: int) -> None:
        """A virtual switch has as many nodes as it is asked for."""

    def nodes_left(self) -> int | None:
        """A network is made anew for each trial."""
        return None

    def has_nodes(self, nodes: int) -> bool:
        """A virtual switch has as many nodes as it is asked for."""
        return True

    def start(self, launch: Launch) -> ShapedRanks:
        """Make the network, check it, start the ranks in it.

        Raises TrialRefusedError with both numbers where a link or a node's speed is not what was asked for, and
        NoNetworkError where this machine or user can make no network at all.
        """
        network = self.network
        if launch.places:
            nodes = [place.node for place in launch.places]
        else:
            nodes = [rank // network.ranks_per_node for rank in range(launch.ranks)]
        slots = [launch.slot(rank) for rank in range(launch.ranks)]
        paces = Paces(network, nodes, launch.threads_per_rank)
        try:
            switched = SwitchedNetwork(network, 1 + max(nodes))
        except BaseException:
            paces.close()
            raise
        try:
            check = _checked(switched)
            switched.carried()  # from here on it counts for the trial
            seats = {
                "namespaces": switched.namespaces,
                "addresses": switched.addresses,
                "nodes": nodes,
                "slots": slots,
                "paces": paces.files,
                "device": DEVICE,
                "port": _PORT,
                "rendezvous_fd": RENDEZVOUS_FD,
            }
            command = (sys.executable, "-I", "-S", str(_ENTER), json.dumps(seats), *launch.command)
            ranks = LocalLauncher().start(replace(launch, command=command, places=()))
        except BaseException:
            switched.close()
            paces.close()
            raise
        return ShapedRanks(ranks, switched, paces, check, launch.out_dir)


def _checked(switched: SwitchedNetwork) -> LinkCheck:
    for _ in range(_CHECKS):
        check = measure_links(switched)
        if check.refusal is None:
            return check
    raise TrialRefusedError(
        f"network {switched.network.name!r}: {check.refusal}; raise scale, or use a machine that is less busy"
    )


class ShapedRanks:
    """Ranks on a virtual switch that ends with them."""

    def __init__(self, ranks: Ranks, switched: SwitchedNetwork, paces: Paces, check: LinkCheck, out_dir: Path) -> None:
        self._ranks, self._switched, self._paces = ranks, switched, paces
        self._check, self._out_dir = check, out_dir
        self._closed = False

    def exit_codes(self) -> tuple[int | None, ...]:
        """Exit status by rank."""
        return self._ranks.exit_codes()

    @property
    def slowed_by(self) -> list[str]:
        """Where each rank joined the control group that keeps it slow; empty for ranks at full speed."""
        return self._paces.files

    def process_ids(self) -> tuple[int, ...]:
        """Ids of the ranks that still run."""
        return self._ranks.process_ids()

    def over_memory(self) -> bool:
        """Whether the kernel ended the ranks for what they held."""
        return self._ranks.over_memory()

    def taken_away(self) -> Loss | None:
        """Where the switch has ended before the ranks."""
        if not self._closed and (ended := self._switched.ended()):
            return Loss(ended)
        return self._ranks.taken_away()

    def stopped(self) -> tuple[int, ...]:
        """Ranks that stand still until they are told to go on."""
        return self._ranks.stopped()

    def node_of(self, rank: int) -> str | None:
        """This machine, whose namespaces the nodes are."""
        return self._ranks.node_of(rank)

    def remarks(self) -> dict[int, str]:
        """What is to be said of the ranks beyond their exit statuses."""
        return self._ranks.remarks()

    def find_lost(self) -> None:
        """Processes of this machine have an exit status as soon as they have ended."""
        self._ranks.find_lost()

    def ask_for_stacks(self) -> None:
        """Have every living rank write its stacks."""
        self._ranks.ask_for_stacks()

    def ask_to_leave(self) -> None:
        """SIGTERM to every living rank."""
        self._ranks.ask_to_leave()

    def kill(self) -> None:
        """End the ranks, note what the switch did for them, and end it too."""
        try:
            self._ranks.kill()
            if not self._closed:
                self._note()
        finally:
            self._closed = True
            self._switched.close()
            self._paces.close()

    def _note(self) -> None:
        try:
            carried = self._switched.carried()
        except TrimaranError:
            return  # the switch ended first, which `taken_away` tells
        note = (
            f"{self._check}{self._paces}; switch carried {carried.carried_bytes / 2**20:.1f} MiB, "
            f"dropped {carried.dropped} packets, was {carried.worst_late_s * 1e3:.2f} ms late at worst"
        )
        write_atomically(self._out_dir / _CHECK_FILE, note)


def network_note(out_dir: Path) -> str | None:
    """What a trial's links were measured to be and what the switch carried; None for a trial without one."""
    path = out_dir / _CHECK_FILE
    return path.read_text() if path.exists() else None


def require_shaping(networks: Sequence[ShapedNetwork]) -> None:
    """Raise NoNetworkError where a sweep names networks and this machine or user can make none."""
    if networks:
        SwitchedNetwork(networks[0], 1).close()
    for network in networks:
        require_quotas(network)


def network_variant(network: ShapedNetwork | None) -> str:
    """What the variant column says of a shaped network, besides its delay and rate, which have columns."""
    if network is None:
        return ""
    return f"network={network.name}" + (f";network_scale={network.scale:g}" if network.scale != 1 else "")
