"""Files of a run: written by its ranks and its launcher, read by whoever watches it or comes later."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

# A training's checkpoints lie in this folder beside its own, each in a folder that this pattern names.
CHECKPOINTS, CHECKPOINT = "checkpoints", "step-*"


class RunFile(StrEnum):
    """The files in a run's folder: their names, `{}` being the number of the rank (of a timeline: of the stage)."""

    JOB = "job.json"  # trimaran.protocol.job.TrainJob
    CIRCUMSTANCES = "circumstances.json"  # trimaran.bench.trial.circumstances.Circumstances, as the ranks start
    LOG = "log.jsonl"  # a line for each step: trimaran.train.run.log.Iteration
    LOG_TEXT = "log.txt"  # the same for people
    NOTICES = "notices.jsonl"  # a line for each trimaran.protocol.notices.Notice
    RESULT = "result.json"  # trimaran.protocol.result.RunResult, once all steps are made
    HEARTBEAT = "heartbeat.{}"  # trimaran.protocol.phases.Heartbeat
    ERROR = "error.{}.json"  # trimaran.protocol.exits.note_out_of_memory
    FLIGHT = "flight.{}.json"  # collectives that a silent rank waits in, by PyTorch's flight recorder
    MEMORY = "memory.{}.json"  # parts of the rank's memory at its peak, GiB
    TRACE = "trace.{}.json"  # what PyTorch's profiler saw
    TIMELINE = "timeline.{}.json"  # trimaran.nouns.timeline.Timeline of the last step, first replica
    STDOUT = "stdout.{}"
    STDERR = "stderr.{}"

    def of(self, folder: str | Path, number: int | str = "") -> Path:
        """The file in `folder`, of the rank (or stage) `number` where there is one each."""
        return Path(folder) / self.format(number)
