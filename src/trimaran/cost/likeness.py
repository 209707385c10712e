"""Likeness: how far two runs resemble each other, and so how far the cost model errs alike on them.

Errors of runs are a Gaussian process over what was run (Rasmussen and Williams, Gaussian Processes for Machine
Learning, eq. 4.9): doubling a degree, or what else is one length scale in `Choice.coordinates`, and in the shape of the
model and the batch here, leaves a correlation of 0.6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from trimaran.layout.axes import devices_of
from trimaran.layout.choices import IN_GRID
from trimaran.layout.notation import parse_layout
from trimaran.nouns.noun import Noun, TrimaranError

Floats = NDArray[np.floating[Any]]

# Layouts that differ in another choice hold and take the same, but for what waits on links.
CHOSEN = tuple(choice for choice in IN_GRID if choice.distinct)
# Length scales that doubling is worth: of the hidden size, of layers, of the sequence, of the size of a head, of the
# micro-batches of a replica and of the tokens of a device.
HIDDEN, LAYERS, SEQUENCE, HEAD, MICRO_BATCHES, TOKENS = 1.0, 0.5, 0.5, 0.5, 0.3, 0.3


class Similar(Noun):
    """A measured run, and what it adds to the log time of runs that resemble it."""

    layout: str
    hidden: int = Field(gt=0)
    layers: int = Field(gt=0)
    heads: int = Field(gt=0)
    seq_len: int = Field(gt=0)
    global_batch: int = Field(gt=0)
    time: float

    @field_validator("layout")
    @classmethod
    def _parsed(cls, layout: str) -> str:
        try:
            parse_layout(layout)
        except TrimaranError as error:
            raise ValueError(str(error)) from None
        return layout


@dataclass(frozen=True)
class Places:
    """Measured runs as coordinates, shape (m, coordinates), and what they add to others."""

    runs: tuple[Similar, ...]

    @cached_property
    def at(self) -> Floats:
        """Coordinates of the runs."""
        layouts = [parse_layout(run.layout) for run in self.runs]
        columns = {
            choice.name: np.array([choice.index(getattr(layout, choice.name)) for layout in layouts])
            for choice in CHOSEN
        }
        names = ("hidden", "layers", "heads", "seq_len", "global_batch")
        return coordinates(columns, *(np.array([getattr(run, name) for run in self.runs]) for name in names))

    def added(self, to: Floats) -> Floats:
        """Log time that the runs add at the coordinates `to`, shape (n,).

        No run is moved further than a measured one was.
        """
        low, high = self.reach
        return np.asarray(np.clip(likeness(to, self.at) @ self._weights, low, high))

    @cached_property
    def _weights(self) -> Floats:
        return np.array([run.time for run in self.runs])

    @cached_property
    def reach(self) -> tuple[float, float]:
        """The least and the most that any run can be moved, as logs; 0 lies between them."""
        there = likeness(self.at, self.at) @ self._weights
        return min(0.0, float(there.min())), max(0.0, float(there.max()))


def coordinates(
    columns: Mapping[str, Any], hidden: Any, layers: Any, heads: Any, seq_len: Any, global_batch: Any
) -> Floats:
    """Runs as points, a length scale apart in what leaves errors little alike; shape (n, coordinates).

    `columns` are a grid's choices by name, each of shape (n,); the shapes of model and batch broadcast to that.
    """
    replicas = columns["dp"] * columns["mbs"]
    of_shape = (
        HIDDEN * np.log2(hidden),
        LAYERS * np.log2(layers),
        SEQUENCE * np.log2(seq_len),
        HEAD * np.log2(hidden / heads),
        MICRO_BATCHES * np.log2(np.maximum(global_batch / replicas, 1.0)),
        TOKENS * np.log2(global_batch * seq_len / devices_of(columns)),
    )
    chosen = [_of_choice(choice, columns[choice.name]) for choice in CHOSEN]
    shape = [np.broadcast_to(np.asarray(value, dtype=np.float64), replicas.shape)[:, None] for value in of_shape]
    return np.hstack([*chosen, *shape])


def _of_choice(choice: Any, indexes: NDArray[Any]) -> Floats:
    """Coordinates of one choice, looked up for each of the values that occur; shape (n, its coordinates)."""
    numbers = indexes.astype(np.int64)
    occurs = np.flatnonzero(np.bincount(numbers))
    table = np.array([choice.coordinates(choice.value(value)) for value in occurs.tolist()], dtype=np.float64)
    place = np.zeros(int(occurs[-1]) + 1, dtype=np.int64)
    place[occurs] = np.arange(len(occurs))
    return np.asarray(table[place[numbers]])


def likeness(a: Floats, b: Floats) -> Floats:
    """Correlation of the errors at points a and b, shape (len(a), len(b)): 1 where they are one point."""
    squared = np.sum(a * a, axis=1)[:, None] + np.sum(b * b, axis=1)[None, :] - 2.0 * (a @ b.T)
    return np.asarray(np.exp(-0.5 * np.maximum(squared, 0.0)))


def fewer(runs: Sequence[Similar], most: int) -> tuple[Similar, ...]:
    """At most so many of the runs, with weights under which they add what all of them did, as nearly as they can.

    The runs are those that leave least of the others unsaid: pivots of a Cholesky decomposition of the likeness.
    """
    if len(runs) <= most:
        return tuple(runs)
    at = Places(tuple(runs)).at
    alike = likeness(at, at)
    left, rows = np.ones(len(runs)), np.zeros((0, len(runs)))
    pivots: list[int] = []
    for _ in range(most):
        pivot = int(np.argmax(left))
        row = (alike[pivot] - rows[:, pivot] @ rows) / np.sqrt(max(float(left[pivot]), 1e-12))
        rows, left = np.vstack([rows, row]), left - row**2
        left[pivot] = -np.inf
        pivots.append(pivot)
    kept = np.linalg.lstsq(alike[:, pivots], alike @ np.array([run.time for run in runs]), rcond=1e-6)[0]
    return tuple(
        runs[pivot].model_copy(update={"time": time}) for pivot, time in zip(pivots, kept.tolist(), strict=True)
    )
