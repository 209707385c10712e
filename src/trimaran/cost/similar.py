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
    return case.calibration.time_scale * _added(case, grid, "time")


def memory_scales(case: Case, grid: LayoutGrid) -> Floats | float:
    """Factor on the memory of every layout."""
    return case.calibration.memory_scale * _added(case, grid, "memory")


def at_least(calibration: Calibration) -> Calibration:
    """A calibration under which no layout takes longer or holds more than under this one, and all are moved alike.

    Bounds of a search need it: a partial layout resembles none.
    """
    if not calibration.similar:
        return calibration
    places = _places(calibration.similar)
    lowest = {
        "time_scale": calibration.time_scale * float(np.exp(places.reach("time")[0])),
        "memory_scale": calibration.memory_scale * float(np.exp(places.reach("memory")[0])),
    }
    return calibration.model_copy(update={**lowest, "similar": ()})


def _added(case: Case, grid: LayoutGrid, what: str) -> Floats | float:
    similar = case.calibration.similar
    if not similar:
        return 1.0
    model = case.model
    columns = vars(grid)
    at = coordinates(columns, model.hidden, model.layers, model.heads, case.workload.seq_len, grid.global_batch)
    return np.asarray(np.exp(_places(similar).added(at, what)))


@lru_cache(maxsize=64)
def _places(similar: tuple[Similar, ...]) -> Places:
    return Places(similar)
