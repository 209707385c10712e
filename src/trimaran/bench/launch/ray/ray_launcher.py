"""The Ray launcher: an actor on each node of a placement group starts the ranks there and watches over them.

The folder of the trials must be shared by all nodes, as heartbeats, logs and checkpoints are files in it; how ranks end
is asked of the actors.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Self

from trimaran.bench.launch.contract import RESTARTS, Launch, Say
from trimaran.bench.launch.ray.ray_cluster import NodePlace, RayCluster, RayNodes
from trimaran.bench.launch.ray.ray_ranks import RayRanks
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.variant import TUNING_PREFIXES
from trimaran.protocol.environment import GLOO_INTERFACE, SHOWN_GPUS
from trimaran.recipe.ray_settings import RaySettings
from trimaran.recipe.sweep_settings import SweepSettings

# What tunes ranks and is not the same on all nodes.
_OF_A_NODE = (SHOWN_GPUS, GLOO_INTERFACE)


class RayLauncher:
    """Starts trials on nodes that Ray gives, which are held from trial to trial; `close` gives them back."""

    at_once = 1
    restarts = RESTARTS
    on_this_machine = False
    job: str | None = None
    tells_groups = False

    def __init__(self, settings: RaySettings, cluster: Cluster, say: Say = lambda text: None) -> None:
        """Connect to Ray. Raises TrimaranError where that is not installed, or not there."""
        self._settings, self._say = settings, say
        self._bundle = bundle_of(cluster)
        self._ray = RayCluster(settings)
        self._nodes: RayNodes | None = None
        self._largest = 0
        self._gone: set[str] = set()

    @classmethod
    def asked_for(cls, sweep: SweepSettings, cluster: Cluster, say: Say) -> Self | None:
        """One where the sweep has a section `ray`."""
        return cls(sweep.ray, cluster, say) if sweep.ray else None

    def expect(self, nodes: int) -> None:
        """Take that many nodes, which then serve all trials."""
        self._largest = max(self._largest, nodes)
        self._held(nodes)

    def nodes_left(self) -> int | None:
        """Nodes that are there, as Ray knows, and did not go in a trial."""
        places = self._ray.places(self._bundle)
        # one that was taken for gone and answers was only cut off for a while
        self._gone = {number for number in self._gone if number in places and not places[number].answers()}
        return len(places.keys() - self._gone)

    def has_nodes(self, nodes: int) -> bool:
        """Whether so many are held, or Ray can give those that are missing now."""
        held = {place.number for place in self._nodes.places} if self._nodes else set()
        if (self.nodes_left() or 0) < nodes:
            return False
        return len(held) >= nodes or self._ray.could_give(nodes - len(held), self._bundle, held)

    def start(self, launch: Launch) -> RayRanks:
        """Start the ranks, on nodes that are waited for where there are not enough.

        Raises TrimaranError where Ray does not give them, or a node cannot start them.
        """
        nodes = self._held(len(launch.shares))
        return RayRanks(launch, self._ray, nodes, self._give_back)

    def close(self) -> None:
        """Give the nodes back and end what still runs on them."""
        self._drop()
        self._ray.close()

    def _held(self, count: int) -> RayNodes:
        if self._nodes is None or len(self._nodes.places) < count:
            self._drop()
            most = max(count, self._largest)
            there = self.nodes_left() or 0
            wanted = most if there >= most else count  # of nodes that went, fewer may be enough
            environment = {
                name: value
                for name, value in os.environ.items()
                if name.startswith(TUNING_PREFIXES) and name not in _OF_A_NODE
            }
            wait_s = self._settings.wait_min * 60
            self._nodes = self._ray.nodes(wanted, self._bundle, wait_s, self._say, environment)
        return self._nodes

    def _give_back(self, nodes: RayNodes, serves: bool, gone: Sequence[NodePlace]) -> None:
        self._gone |= {place.number for place in gone}
        if not serves and nodes is self._nodes:
            self._drop()

    def _drop(self) -> None:
        nodes, self._nodes = self._nodes, None
        if nodes:
            nodes.close()


def bundle_of(cluster: Cluster) -> dict[str, float]:
    """What a whole node, which is a host, is to Ray: its GPUs, or the cores that its slots compute with."""
    cluster = cluster.of_hosts
    if cluster.device.kind == "gpu":
        return {"GPU": float(cluster.devices_per_node)}
    cores = cluster.devices_per_node * max(1, cluster.device.cores)
    return {"CPU": float(min(cores, cluster.cores_per_node) if cluster.cores_per_node else cores)}
