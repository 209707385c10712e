"""What one process makes of a training, which every layout is laid beside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pool import Pool, Run
from shapes import SMALL
from trimaran.nouns.model import Model
from trimaran.protocol.job import TrainJob

ONE_PROCESS = "dp1,mbs24"


@dataclass
class Reference:
    """Results of one process, each model's made once."""

    pool: Pool
    make_job: Callable[..., TrainJob]
    runs: dict[str, Run] = field(default_factory=dict)

    def run(self, model: Model = SMALL, **train: object) -> Run:
        key = repr((model, train))
        if key not in self.runs:
            self.runs[key] = self.pool.run(self.make_job(ONE_PROCESS, model=model, **train))
        return self.runs[key]
