"""How much longer ranks of a CPU take because they wait for each other often: at sums over TP, or stage by stage.

Whoever meets waits for the slowest of each piece of work, and the shorter the pieces, the more differ they: a system
that runs another process for a moment, or lets more ranks than it has cores take turns, does so between a few meetings.
"""

from __future__ import annotations

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.grid import Floats, LayoutGrid
from trimaran.cost.layers.layer_work import LayerWork
from trimaran.nouns.hardware.measured import OFTEN_S, SELDOM_S

# Sums over TP of a layer's forward and backward; exchanges of CP and EP come about as often.
SUMS = 4.0


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


def _seconds_between(grid: LayoutGrid, layer: LayerWork) -> Floats:
    """Seconds of compute between two meetings: of a layer's sums, of a stage's passes, or of a step's ends."""
    passes = np.asarray(layer.forward + layer.backward)
    in_layers = (grid.tp > 1) | (grid.cp > 1) | (grid.ep > 1)
    stage = passes * grid.splits.layers(grid.split_row).max(axis=(1, 2))
    return np.where(in_layers, passes / SUMS, np.where(grid.pp > 1, stage / 2.0, stage * grid.micro_batches))
