"""Objective: what makes one layout better than another."""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from trimaran.cost.grid import Bools, Floats, Ints
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import Noun, TrimaranError
from trimaran.nouns.workload import Workload

Goal = Literal["time", "cost", "devices"]
# Layouts within this factor of the fastest are as good: predictions err by ten times as much, and a run that is
# repeated on the same machine differs by about so much. Of them the plainest is the first.
EQUAL = 1.01


class Objective(Noun):
    """`time`: the fastest training; `cost`: the cheapest token; `devices`: the fewest that meet a limit.

    `deadline_days` and `budget` (in the currency of the cluster's price) bound any of the three.
    """

    goal: Goal = "time"
    deadline_days: float | None = Field(default=None, gt=0, le=1e6)
    budget: float | None = Field(default=None, gt=0, le=1e15)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.goal == "devices" and self.deadline_days is None and self.budget is None:
            raise ValueError(
                "objective devices asks for the fewest devices, but names no limit: state deadline_days or budget"
            )
        return self

    @property
    def limited(self) -> bool:
        """Whether a training must meet a deadline or a budget."""
        return self.deadline_days is not None or self.budget is not None

    def check(self, workload: Workload, cluster: Cluster) -> None:
        """Raise TrimaranError where the objective needs a figure that workload or cluster does not state."""
        if (self.deadline_days or self.budget) and workload.tokens is None:
            raise TrimaranError("a deadline or a budget bounds a whole training, but tokens is not stated: state it")
        if self.budget and not cluster.price_per_device_hour:
            raise TrimaranError(
                f"a budget needs a price, but cluster {cluster.name} states no price_per_device_hour: state one"
            )

    def value(self, sec_per_it: Floats, devices: Ints, global_batch: Ints) -> Floats:
        """What ranks: smaller is better. Seconds a sequence, device-seconds a sequence, or devices; shape (n,).

        Per sequence, so that layouts with different global batches compare. Among as many devices the
        faster wins.
        """
        seconds = sec_per_it / global_batch
        if self.goal == "time":
            return np.asarray(seconds)
        if self.goal == "cost":
            return np.asarray(seconds * devices)
        # Squeezed below 1, time only decides between equal device counts.
        return np.asarray(devices + seconds / (1.0 + seconds))

    def in_parts(self, value: Floats) -> tuple[Floats, Floats]:
        """What ranks values, and what those that are equal in it, shape (n,) each: devices, and seconds a sequence.

        Of another goal the second is the value. Values of many devices differ by their seconds in digits that no ratio
        of them shows.
        """
        if self.goal != "devices":
            return np.zeros_like(value), value
        devices = np.floor(value)
        squeezed = np.maximum(value - devices, np.finfo(np.float64).tiny)
        return devices, squeezed / (1.0 - squeezed)

    def times(self, value: Floats, least: float) -> Floats:
        """How many times as much as `least` each value is, shape (n,): by their time of layouts on as many devices.

        Where the fewest devices are the goal, a layout on more of them is infinitely worse.
        """
        (devices, part), (fewest, least_part) = self.in_parts(value), self.in_parts(np.array([least]))
        return np.where(devices == fewest, part / least_part, np.where(devices > fewest, np.inf, 0.0))

    def meets(
        self, sec_per_it: Floats, devices: Ints, global_batch: Ints, workload: Workload, cluster: Cluster
    ) -> Bools:
        """Which layouts finish within the deadline and the budget, shape (n,)."""
        met = np.ones(len(devices), dtype=np.bool_)
        if workload.tokens is None:
            return met
        hours = sec_per_it * np.ceil(workload.tokens / (global_batch * workload.seq_len)) / 3600.0
        if self.deadline_days is not None:
            met &= hours / 24.0 <= self.deadline_days
        if self.budget is not None:
            met &= hours * devices * (cluster.price_per_device_hour or 0.0) <= self.budget
        return met
