"""How much longer ranks take because they wait for the slowest of them.

On a CPU they do so the longer, the more often they meet: at sums over TP, or stage by stage. The shorter the pieces of
work between two meetings, the more differ they: a system that runs another process for a moment, or lets more ranks
than it has cores take turns, does so between a few meetings. GPUs of one kind differ by what their power limit lets
each of them do, and the more there are, the slower is the slowest.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.grid import Floats, LayoutGrid
from trimaran.cost.layers.layer_work import LayerWork
from trimaran.nouns.hardware.measured import OFTEN_S, SELDOM_S

# Sums over TP of a layer's forward and backward; exchanges of CP and EP come about as often.
SUMS = 4.0
# GPUs of one kind in one cluster differ by 8% on average (Sinha et al., SC22, arXiv 2208.11035), read as the width of
# their times without outliers: between the whiskers of a box plot a normal distribution has 5.4 deviations.
GPU_DEVIATION = 0.08 / 5.4
# The rates that are known of GPUs are those of nodes of so many.
KNOWN_GPUS = 8
# The largest of 2^k values of a standard normal distribution, as expected (Blom, 1958).
_DOUBLED = range(32)
_LARGEST = [NormalDist().inv_cdf((2**k - 0.375) / (2**k + 0.25)) for k in _DOUBLED]


def waiting_factor(case: Case, grid: LayoutGrid, layer: LayerWork) -> Floats:
    """By what factor compute is longer than it is between meetings of SELDOM_S, shape (n,); 1 where nothing was probed.

    A probe measures it between meetings of OFTEN_S. In between it goes by the logarithm of a layout's own seconds.
    """
    cluster = case.cluster
    known = sorted((c for c in cluster.contention if c.often is not None), key=lambda c: c.ranks)
    if not known:
        return np.ones(len(grid))
    slots = np.minimum(grid.devices, cluster.devices_per_machine).astype(np.float64)
    ranks, factors = [1.0, *(c.ranks for c in known)], [1.0, *(c.of_meetings for c in known)]
    often = np.interp(np.log(slots), np.log(ranks), factors)
    weight = np.log(SELDOM_S / np.maximum(_seconds_between(grid, layer), OFTEN_S)) / np.log(SELDOM_S / OFTEN_S)
    return np.asarray(1.0 + (often - 1.0) * np.clip(weight, 0.0, 1.0))


def slowest_factor(case: Case, grid: LayoutGrid) -> Floats:
    """By what factor the slowest GPU of a layout takes longer than that of one node, shape (n,); 1 within a node.

    Every iteration waits for it, wherever it is: in a stage, among those of a sum over TP, or among replicas.
    """
    if case.cluster.device.kind != "gpu":
        return np.ones(len(grid))
    largest = np.interp(np.log2(np.maximum(grid.devices, KNOWN_GPUS)), _DOUBLED, _LARGEST)
    return np.asarray(1.0 + GPU_DEVIATION * (largest - _LARGEST[KNOWN_GPUS.bit_length() - 1]))


def _seconds_between(grid: LayoutGrid, layer: LayerWork) -> Floats:
    """Seconds of compute between two meetings: of a layer's sums, of a stage's passes, or of a step's ends."""
    passes = np.asarray(layer.forward + layer.backward)
    in_layers = (grid.tp > 1) | (grid.cp > 1) | (grid.ep > 1)
    stage = passes * grid.splits.layers(grid.split_row).max(axis=(1, 2))
    return np.where(in_layers, passes / SUMS, np.where(grid.pp > 1, stage / 2.0, stage * grid.micro_batches))
