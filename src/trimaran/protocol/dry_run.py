"""What a dry run is asked, and what it answers of each rank."""

from __future__ import annotations

from collections.abc import Mapping

from trimaran.nouns.noun import Noun
from trimaran.protocol.job import TrainJob


class DryRunJob(Noun):
    """What `python -m trimaran.train.programs.dry_run JOB.json` is asked: these ranks of a training, one step each."""

    job: TrainJob
    ranks: tuple[int, ...]


class TracedCollective(Noun):
    """Collectives of one kind over the ranks of one axis in a step: how many, and bytes of what they are about."""

    axis: str
    kind: str
    count: int
    size: int


class TracedRank(Noun):
    """One rank's step as it was traced: bytes at its memory's peak by part, operations of its matrix products."""

    rank: int
    stage: int
    layers: int
    parameters: int
    memory: Mapping[str, int]
    operations: float
    collectives: tuple[TracedCollective, ...]
    seconds: float
