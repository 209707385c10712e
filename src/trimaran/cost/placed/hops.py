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
    """The ways between the nodes `source` and `target` of cells, over each of which `streams` ranks send at once.

    Ranks of one node that send in the same turn, by the numbers in `together`, share its port, and those that send to
    the same node share the way there; a line that groups share is shared by all that cross it in that turn or any
    other. A cell of more ranks than its node has devices stands on whole nodes, of which each sends for its own ranks.
    """
    crosses = source != target
    group, other = topology.group_of[source], topology.group_of[target]
    sends, takes = (np.minimum(streams, topology.per_node[each]) for each in (group, other))
    there, back = topology.gbps[group, other], topology.gbps[other, group]
    ports = topology.port_gbps[group] / sends, topology.port_gbps[other] / takes
    of_pair = np.minimum(sends, takes)
    if len(np.unique(source)) != source.size:  # else every cell has a node to itself
        turns = int(together.max(initial=0)) + 1
        ports = (
            ports[0] / _users(source * turns + together, crosses),
            ports[1] / _users(target * turns + together, crosses),
        )
        of_pair = of_pair * _users(_numbered(source, target, together), crosses)
    line = np.minimum(there, back) / of_pair
    shared = topology.shared[group, other] & crosses
    if shared.any():
        groups = len(topology.kinds)
        between = np.minimum(group, other) * groups + np.maximum(group, other)
        users = np.bincount(between[shared], minlength=groups * groups)
        line = np.where(shared, np.minimum(there, back) / streams / np.maximum(users[between], 1), line)
    delay = np.maximum(topology.delay_us[group, other], topology.delay_us[other, group])
    return Hops(crosses, np.where(crosses, np.minimum(line, np.minimum(*ports)), np.inf), np.where(crosses, delay, 0.0))


def _users(at: Ints, crosses: Bools) -> Ints:
    """How many of those that cross have the number of each, 1 at least."""
    return np.maximum(np.bincount(at[crosses], minlength=int(at.max(initial=0)) + 1)[at], 1)


def _numbered(source: Ints, target: Ints, together: Ints) -> Ints:
    """A number for each way from node to node and turn, from 0 on."""
    nodes, turns = int(target.max(initial=0)) + 1, int(together.max(initial=0)) + 1
    _, numbers = np.unique((source * nodes + target) * turns + together, return_inverse=True)
    return np.asarray(numbers).reshape(source.shape)
