"""Nodes whose links are alike become a group: clusters of the measured matrix.

Two nodes are alike where their devices are, and where each third node has links of about the same delay and bandwidth
with both, each way. Groups are of nodes that are all alike to each other (complete linkage), so that one link between
two groups, and one inside of each, says what was measured between any of their nodes within twice the tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

Floats = NDArray[np.float64]

# Factors within which two are alike. A bandwidth varies most, as pairs of one round may share a line; a speed, by what
# the other thread of a core does.
DELAY_ALIKE, BANDWIDTH_ALIKE, SPEED_ALIKE = 1.5, 2.0, 1.5
# Differences of a delay below this are the hosts' own: microseconds.
SAME_DELAY_US = 100.0
_APART = 1e9


def filled(latency_us: Floats, bandwidth_gbps: Floats) -> tuple[Floats, Floats]:
    """The matrices (n, n) with what was not measured (bandwidth 0) taken as of a node nearby.

    Of u and v the way is that of w and v, or of u and w, for the w that is nearest to u or to v and whose other way was
    measured; where there is none yet, another pass may find one.
    """
    latency, bandwidth = latency_us.copy(), bandwidth_gbps.copy()
    count = len(latency)
    while True:
        known = (bandwidth > 0) & (bandwidth.T > 0)
        missing = [(u, v) for u in range(count) for v in range(u + 1, count) if not known[u, v]]
        found: list[tuple[int, int, int, int]] = []
        for u, v in missing:
            between = np.flatnonzero(known[u] & known[v])
            if between.size:
                legs = [(min(latency[u, w], latency[v, w]), w) for w in between]
                near = min(legs)[1]
                found.append((u, v, *((near, v) if latency[u, near] <= latency[v, near] else (u, near))))
        if not found:
            return latency, bandwidth
        for u, v, first, second in found:
            for matrix in (latency, bandwidth):
                matrix[u, v], matrix[v, u] = matrix[first, second], matrix[second, first]


def distances(latency_us: Floats, bandwidth_gbps: Floats, speeds: Sequence[float], kinds: Sequence[str]) -> Floats:
    """How unlike each two nodes are, (n, n): the largest ratio of anything in tolerances, 1 being just alike.

    Matrices (n, n) are of the way from row to column, bandwidth 0 where it was not measured.
    """
    count = len(speeds)
    delay = np.log(np.maximum(latency_us, SAME_DELAY_US)) / np.log(DELAY_ALIKE)
    rate = np.log(np.where(bandwidth_gbps > 0, bandwidth_gbps, 1.0)) / np.log(BANDWIDTH_ALIKE)
    speed = np.log(np.asarray(speeds, dtype=np.float64)) / np.log(SPEED_ALIKE)
    apart = np.abs(speed[:, None] - speed[None, :])
    measured = bandwidth_gbps > 0
    for u in range(count):
        for v in range(u + 1, count):
            third = np.ones(count, dtype=bool)
            third[[u, v]] = False
            for value, seen in ((delay, measured), (rate, measured), (delay.T, measured.T), (rate.T, measured.T)):
                both = third & seen[u] & seen[v]
                if both.any():
                    apart[u, v] = max(apart[u, v], np.abs(value[u] - value[v])[both].max())
            apart[v, u] = apart[u, v] = _APART if kinds[u] != kinds[v] else apart[u, v]
    return np.asarray(apart)


def alike_groups(
    latency_us: Floats, bandwidth_gbps: Floats, speeds: Sequence[float], kinds: Sequence[str]
) -> tuple[tuple[int, ...], ...]:
    """The nodes of each group, in order; the groups in order of their first node."""
    if len(speeds) == 1:
        return ((0,),)
    apart = distances(*filled(latency_us, bandwidth_gbps), speeds, kinds)
    labels = fcluster(linkage(squareform(apart, checks=False), method="complete"), t=1.0, criterion="distance")
    groups = [tuple(int(node) for node in np.flatnonzero(labels == label)) for label in np.unique(labels)]
    return tuple(sorted(groups))
