"""Hops: what a send from one cell of a placement to another gets of the links on its way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimaran.cost.grid import Bools, Floats, Ints
from trimaran.cost.placed.topology import Topology


@dataclass(frozen=True)
class Hops:
    """Ways from cells to others, arrays of one shape: whether they leave the node, and what each rank gets there.

    `gbps` is the slower of the two directions and `delay_us` the longer, since activations go one way and gradients
    the other; inside a node they are infinite and 0, and its own link counts.
    """

    crosses: Bools
    gbps: Floats
    delay_us: Floats


def hops(topology: Topology, source: Ints, target: Ints, streams: int, together: Ints) -> Hops:
    """The ways between the nodes `source` and `target`, over each of which `streams` ranks send at once.

    Ranks of one node that send in the same turn, by the numbers in `together`, share its port; a line that groups
    share is shared by all that cross it in that turn or any other.
    """
    crosses = source != target
    group, other = topology.group_of[source], topology.group_of[target]
    there, back = topology.gbps[group, other], topology.gbps[other, group]
    line = np.minimum(there, back) / streams
    shared = topology.shared[group, other] & crosses
    if shared.any():
        groups = len(topology.kinds)
        between = np.minimum(group, other) * groups + np.maximum(group, other)
        users = np.bincount(between[shared], minlength=groups * groups)
        line = np.where(shared, line / np.maximum(users[between], 1), line)
    ports = topology.port_gbps
    if len(np.unique(source)) == source.size:
        port = np.minimum(ports[group], ports[other]) / streams  # every cell has a node to itself
    else:
        port = np.minimum(_port(topology, source, crosses, together), _port(topology, target, crosses, together))
        port = port / streams
    delay = np.maximum(topology.delay_us[group, other], topology.delay_us[other, group])
    return Hops(crosses, np.where(crosses, np.minimum(line, port), np.inf), np.where(crosses, delay, 0.0))


def _port(topology: Topology, node: Ints, crosses: Bools, together: Ints) -> Floats:
    """What one of those that cross in the same turn has of its node's port."""
    turns = int(together.max(initial=0)) + 1
    at = node * turns + together
    users = np.bincount(at[crosses], minlength=int(at.max(initial=0)) + 1)
    return np.asarray(topology.port_gbps[topology.group_of[node]] / np.maximum(users[at], 1))
