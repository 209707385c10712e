"""SlurmSettings: how a sweep asks Slurm for nodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trimaran.nouns.noun import Noun

_Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,:@+-]{0,199}$")]
_Features = Annotated[str, Field(pattern=r"^[A-Za-z0-9_\[(][A-Za-z0-9_.,:@+&|*()\[\]-]{0,199}$")]


class SlurmSettings(Noun):
    """`[sweep.slurm]`: its presence has a recipe's ranks started by Slurm.

    `submit` says what is asked of a login node's queue: `allocation`, nodes that are held while trial after trial
    runs on them, or `job`, a job for each trial. With `at_once` above one, so many trials run side by side, on as
    many allocations (a job array) or jobs. Inside a Slurm job, trials are steps of that job. Trials whose
    nodes fail are run again; with `requeue` also those whose job was preempted, cancelled or out of time.
    """

    submit: Literal["allocation", "job"] = "allocation"
    partition: _Word | None = None
    account: _Word | None = None
    constraint: _Features | None = None
    time_limit_min: int | None = Field(default=None, gt=0, le=525_600, description="None: the partition's")
    nodes: int | None = Field(default=None, gt=0, description="of an allocation; None: as many as a trial needs")
    at_once: int = Field(default=1, gt=0, le=1000)
    requeue: bool = False
