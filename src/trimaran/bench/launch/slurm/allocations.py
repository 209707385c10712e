"""Allocations: nodes that Slurm gives to a sweep and that are held for it, trial after trial."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

from trimaran.bench.launch.contract import Launch, Say
from trimaran.bench.launch.slurm.queue import ASK_EVERY_S, Job, Queue, never_starts, submit
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.slurm_settings import SlurmSettings

# States of a job that nobody and nothing but its own program has ended.
_ENDED_BY_ITSELF = ("FAILED", "COMPLETED")
_ALIVE = ("PENDING", "CONFIGURING", "RUNNING")


class Allocations:
    """One or more equal allocations, a job array where they are more, each held until `close`."""

    def __init__(
        self,
        settings: SlurmSettings,
        nodes: int,
        launch: Launch,
        hold: Sequence[str],
        folder: Path,
        dead_nodes: Collection[str],
        hosts: Sequence[str],
        say: Say,
        stop: threading.Event,
    ) -> None:
        self._nodes = nodes
        array = settings.at_once if settings.at_once > 1 else None
        self._python, self._log = hold[0], folder / "allocation.log"
        self._job = submit(settings, nodes, launch, hold, self._log, dead_nodes, say, stop, array=array, hosts=hosts)
        self._queue = Queue(f"{self._job.number}|PENDING|")
        self._busy: set[str] = set()
        self._lost: set[str] = set()
        self._began = self._served = False  # whether any had nodes, and a trial on them
        self._lock = threading.Lock()

    def serve(self, nodes: int) -> bool:
        """Whether the allocations stand, or are to come, and are large enough."""
        return nodes <= self._nodes and any(state in _ALIVE for _, state, _ in self._members())

    def held_nodes(self) -> int:
        """How many nodes Slurm has given."""
        return self._nodes * sum(state == "RUNNING" for _, state, _ in self._members())

    def take(self, say: Say, stop: threading.Event) -> Job | None:
        """A free allocation, waited for; None where those that trials ran on have ended, and others are to come.

        Raises TrimaranError where none can ever start.
        """
        last_reason = ""
        while not stop.is_set():
            members = self._members()
            with self._lock:
                for number, state, _ in members:
                    self._began = self._began or state == "RUNNING"
                    if state == "RUNNING" and number not in self._busy:
                        self._busy.add(number)
                        self._served = True
                        return Job(number)
            waiting = [(number, reason) for number, state, reason in members if state == "PENDING"]
            if not any(state in _ALIVE for _, state, _ in members):
                if self._served:
                    return None
                raise TrimaranError(self._why_ended())
            for number, reason in waiting:
                if never_starts(reason):
                    raise TrimaranError(
                        f"Slurm job {number} can never start ({reason}): check partition, constraint, account, "
                        f"nodes and time_limit_min in [sweep.slurm]"
                    )
            if waiting and not self._busy and waiting[0][1] not in (last_reason, "None", "Priority"):
                last_reason = waiting[0][1]
                say(f"Slurm job {waiting[0][0]} waits ({last_reason})")
            stop.wait(ASK_EVERY_S)
        raise TrimaranError(f"Slurm job {self._job.number}: the sweep ended before the job began")

    def give_back(self, job: Job, lost: bool) -> None:
        """Let another trial have the allocation, unless Slurm is about to end it."""
        with self._lock:
            self._busy.discard(job.number)
            if lost:
                self._lost.add(job.number)

    def close(self) -> None:
        """End the allocations."""
        self._job.cancel()

    def _why_ended(self) -> str:
        """Why none has begun to serve: what was to hold the nodes may have ended by itself, at once."""
        state = self._job.state()
        if state not in _ENDED_BY_ITSELF:
            return self._job.why_ended(state, began=self._began)
        said = ""
        with contextlib.suppress(OSError):
            said = self._log.read_text(errors="replace")
        _, interpreter, lacks = said.partition(self._python)
        if interpreter:  # of a shell: "slurm_script: 3: exec: /opt/python: not found"
            why = f"{interpreter}{lacks.partition(chr(10))[0]}; name an interpreter of theirs as python"
            return f"Slurm job {self._job.number} cannot hold its nodes: {why} in [sweep.slurm]"
        return (
            f"Slurm job {self._job.number} cannot hold its nodes ({state}): see that they have the folder "
            f"{self._log.parent.parent}, which all nodes must share"
        )

    def _members(self) -> list[tuple[str, str, str]]:
        """(job number, state, reason) of every allocation; a pending array is one line."""
        lines = self._queue.ask("--array", f"--jobs={self._job.number}", "--format=%A|%T|%r").splitlines()
        members = [(number, state, reason) for number, state, reason in (line.split("|") for line in lines if line)]
        return [member for member in members if member[0] not in self._lost]
