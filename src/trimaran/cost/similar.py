"""Similar runs: what measured ones say of the layouts of a grid beyond efficiencies, as factors."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from trimaran.cost.calibration import Calibration
from trimaran.cost.case import Case
from trimaran.cost.grid import Floats, LayoutGrid
from trimaran.cost.likeness import Places, Similar, coordinates


def time_scales(case: Case, grid: LayoutGrid) -> Floats | float:
    """Factor on the time of every layout: the machine's scale, and what measured runs like it took longer."""
    return case.calibration.time_scale * _added(case, grid)


def at_least(calibration: Calibration) -> Calibration:
    """A calibration under which no layout takes longer than under this one, and all are moved alike.

    Bounds of a search need it: a partial layout resembles none.
    """
    if not calibration.similar:
        return calibration
    lowest = calibration.time_scale * float(np.exp(_places(calibration.similar).reach[0]))
    return calibration.model_copy(update={"time_scale": lowest, "similar": ()})


def _added(case: Case, grid: LayoutGrid) -> Floats | float:
    similar = case.calibration.similar
    if not similar:
        return 1.0
    model = case.model
    columns = vars(grid)
    at = coordinates(columns, model.hidden, model.layers, model.heads, case.workload.seq_len, grid.global_batch)
    return np.asarray(np.exp(_places(similar).added(at)))


@lru_cache(maxsize=64)
def _places(similar: tuple[Similar, ...]) -> Places:
    return Places(similar)
