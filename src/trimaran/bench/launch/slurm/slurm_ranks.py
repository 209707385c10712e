"""The ranks of a trial that Slurm has started: how they end, and what is known of those that leave no word."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import IO

from trimaran.bench.launch.contract import Launch, Loss
from trimaran.bench.launch.slurm.node import ASKING, answer_file, exit_file, meeting_file, node_file
from trimaran.bench.launch.slurm.queue import CANCELLED, TIME_IS_OVER, Job, run, step_environment
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.exits import USER_ERROR
from trimaran.protocol.files import RunFile

_LOOK_EVERY_S = 0.25
# A file that another node wrote may be seen a while after the job has ended.
_SEEN_WITHIN_S = 15.0
_GONE_WITHIN_S = 60.0
# Of nodes that do not answer Slurm waits for minutes.
_DEAD_NODES_GONE_WITHIN_S = 5.0
_NODE_FAULTS, _TAKEN, _CANCELLED = ("NODE_FAIL", "BOOT_FAIL"), ("PREEMPTED", "REQUEUED"), ("TIMEOUT", "CANCELLED")
# What srun or Pyxis says of a container that it cannot make, before any rank is started.
_NO_CONTAINER = re.compile(r"(?:error: pyxis: +(?!printing)|(?=unrecognized option '--container-))(.*)")
# What Slurm's daemon on a node says where the program of a step is not there, or is none.
_NO_PROGRAM = re.compile(r"slurmstepd\S*: error: execve\(\): (.*)")
_SRUN_ERROR = re.compile(r"srun: (?:error|fatal): (.+)")


class SlurmRanks:
    """The ranks of one trial: a step that a local srun stands for, or a batch job."""

    def __init__(
        self,
        launch: Launch,
        job: Job,
        *,
        step: Sequence[str] | None,
        requeue: bool = False,
        give_back: Callable[[Job, bool, Sequence[str]], None] = lambda job, lost, dead_nodes: None,
    ) -> None:
        """`give_back` is told of the job, whether it was lost, and which of its nodes do not answer.

        Raises TrimaranError where srun cannot be started: the job is then given back.
        """
        self._launch, self._job, self._requeue, self._give_back = launch, job, requeue, give_back
        self._codes: list[int | None] = [None] * launch.ranks
        self._oom = self._asked_to_end = False
        self._unheard: list[int] = []  # ranks without an exit status whose parents do not answer
        self._suspended = False  # whether the job stood still when their parents were to be asked
        self._looked_at = -math.inf
        self._ended_at: float | None = None
        self._killed = self._asked_to_leave = False
        self._srun: subprocess.Popen[bytes] | None = None
        if step is not None:
            try:
                self._srun = self._started(step)
            except OSError as error:
                give_back(job, False, ())
                raise TrimaranError(
                    f"srun cannot be started ({error.strerror}): free space on the disk of {launch.out_dir}, or raise "
                    f"the limits on processes and open files (ulimit -a)"
                ) from None

    def _started(self, step: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._log("wb") as log:
            return subprocess.Popen(
                step, env=step_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def exit_codes(self) -> tuple[int | None, ...]:
        """Exit status by rank, as the parent of each wrote it down on its node; None while unknown."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_EVERY_S and None in self._codes:
            self._looked_at = now
            self._read_codes()
            if None in self._codes and self._has_ended() and self._was_refused():
                self._codes = [USER_ERROR if code is None else code for code in self._codes]
            elif None in self._codes and self._has_ended() and now - (self._ended_at or now) > _SEEN_WITHIN_S:
                # whoever could have written it down was ended too
                self._unheard = [rank for rank, code in enumerate(self._codes) if code is None]
                self._codes = [-9 if code is None else code for code in self._codes]
        return tuple(self._codes)

    def process_ids(self) -> tuple[int, ...]:
        """None: they run on other machines."""
        return ()

    def over_memory(self) -> bool:
        """Whether a node's kernel, or Slurm's memory limit, ended a rank."""
        log = self._log_text()
        return self._oom or "oom_kill" in log or "Out Of Memory" in log

    def taken_away(self) -> Loss | None:
        """What ended the job, a node or what watches the ranks, where that is not of the ranks' doing."""
        ended = self._asked_to_end or self._has_ended()
        suspect = self._unheard or self._suspended or (ended and not self._asked_to_leave)
        if self._killed or not suspect or self.over_memory():
            return None
        job, state, log = self._job.number, self._job.state(), self._log_text()
        node_failed = state in _NODE_FAULTS or "NODE FAILURE" in log
        if not node_failed and (state in _TAKEN or "DUE TO PREEMPTION" in log):
            return Loss(f"Slurm took the nodes of job {job} away ({state or 'PREEMPTED'})", self._requeue)
        if not node_failed and (self._asked_to_end or state in _CANCELLED or TIME_IS_OVER in log or CANCELLED in log):
            return Loss(self._job.why_ended(state, log, began=self._has_begun()), self._requeue)
        if self._suspended:
            return Loss(f"Slurm suspended job {job}, as for one of higher priority: look who did", self._requeue)
        if (number := self._srun_ended_by()) is not None:
            return Loss(f"srun, which stands for the ranks, was ended by signal {number}")
        if refused := self._srun_refused(log):
            return Loss(f"srun started no rank in Slurm job {job}: {refused}")
        if self._unheard:
            return Loss(self._of_the_unheard(), nodes=tuple(self._dead_nodes()), silence_s=_SEEN_WITHIN_S)
        if node_failed:
            return Loss(f"Slurm took the nodes of job {job} away ({state or 'node failure'})")
        return None

    def remarks(self) -> dict[int, str]:
        """Which ranks are stopped, and where those ran that do not answer."""
        stopped = dict.fromkeys(self.stopped(), "was stopped (by SIGSTOP or a debugger)")
        unheard = {
            rank: f"was on node {self.node_of(rank) or 'unknown'}, and nothing answers for it" for rank in self._unheard
        }
        return {**stopped, **unheard}

    def stopped(self) -> tuple[int, ...]:
        """Ranks whose parents answered that they stand still."""
        return tuple(rank for rank in range(self._launch.ranks) if self._answer_of(rank) in ("T", "t"))

    def find_lost(self) -> None:
        """Ask the parents of all ranks without an exit status: one that lives answers at once."""
        self._read_codes()
        if None not in self._codes:
            return
        self._suspended = self._job.is_suspended()
        if self._suspended:
            return  # their parents stand still too
        for rank in range(self._launch.ranks):
            answer_file(self._launch.out_dir, rank).unlink(missing_ok=True)  # of an earlier question
        if not self._signal(ASKING.name.removeprefix("SIG")):
            if not self._job.can_be_asked_for():
                return  # the controller is away: nobody was asked, so that silence says nothing
            self._signal(ASKING.name.removeprefix("SIG"))  # a step that has just ended has nobody to ask
        deadline = time.monotonic() + _SEEN_WITHIN_S
        while (silent := self._without_answer()) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
        self._unheard = silent

    def ask_for_stacks(self) -> None:
        """SIGUSR1 to all ranks."""
        self._signal("USR1")
        self.find_lost()

    def are_to_come(self) -> bool:
        """Whether a rank is not on its node yet and may still come: none has ended, nor was refused a container."""
        self._read_codes()
        on_nodes = all(node_file(self._launch.out_dir, rank).exists() for rank in range(self._launch.ranks))
        ended = self._has_ended() or any(code is not None for code in self._codes)
        return not (on_nodes or ended or _NO_CONTAINER.search(self._log_text()))

    def ask_to_leave(self) -> None:
        """SIGTERM to all ranks, which is then not of Slurm's doing."""
        self._asked_to_leave = True
        self._signal("TERM")

    def kill(self) -> None:
        """Cancel the step or the job, and wait until Slurm has ended all its processes, as far as it answers."""
        if self._killed:
            return
        finished, lost = None not in self._codes, False
        # why the ranks are ended matters more than what Slurm then says; ranks that it leaves end with the sweep
        with contextlib.suppress(TrimaranError):
            lost = self.taken_away() is not None
        dead_nodes = self._dead_nodes()
        self._killed = True
        if self._srun is None:
            within_s = _DEAD_NODES_GONE_WITHIN_S if dead_nodes else _GONE_WITHIN_S
            with contextlib.suppress(TrimaranError):
                if not finished or self._job.is_queued():
                    self._job.cancel(within_s)
                self._job.wait_until_gone(within_s)
        else:
            try:
                self._srun.wait(2.0 if finished else 0.0)
            except subprocess.TimeoutExpired:
                self._signal("KILL")
            try:
                self._srun.wait(_DEAD_NODES_GONE_WITHIN_S if dead_nodes else _GONE_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._srun.kill()
                self._srun.wait()
        self._give_back(self._job, lost, dead_nodes)

    def node_of(self, rank: int) -> str | None:
        """The node that its parent wrote down, where it has."""
        with contextlib.suppress(OSError):
            return node_file(self._launch.out_dir, rank).read_text().strip() or None
        return None

    def _dead_nodes(self) -> list[str]:
        """Nodes on which nothing answers for any rank; where one still does, only what watched a rank was ended.

        None where srun was ended, as all that it stands for is ended with it.
        """
        if self._srun_ended_by() is not None:
            return []
        nodes = {rank: self.node_of(rank) or "unknown" for rank in range(self._launch.ranks)}
        answering = {node for rank, node in nodes.items() if rank not in self._unheard}
        return sorted({nodes[rank] for rank in self._unheard} - answering - {"unknown"})

    def _srun_ended_by(self) -> int | None:
        """The signal that ended srun, if one did."""
        status = self._srun.poll() if self._srun else None
        return None if status is None or status >= 0 else -status

    def _srun_refused(self, log: str) -> str:
        """What srun said first where it has ended before any rank was on its node; empty where it did not."""
        if not self._srun or not self._srun.poll() or self._has_begun():
            return ""
        return next(iter(_SRUN_ERROR.findall(log)), "")[:200]

    def _has_begun(self) -> bool:
        """Whether any rank was on its node."""
        return any(node_file(self._launch.out_dir, rank).exists() for rank in range(self._launch.ranks))

    def _answer_of(self, rank: int) -> str | None:
        """The state of the rank's process when its parent was asked; None where that has not answered."""
        with contextlib.suppress(OSError):
            return answer_file(self._launch.out_dir, rank).read_text()
        return None

    def _of_the_unheard(self) -> str:
        ranks, job = ", ".join(map(str, self._unheard)), f"Slurm job {self._job.number}"
        if nodes := ", ".join(self._dead_nodes()):
            return f"node {nodes} of rank {ranks} does not answer ({job}): see whether it is down"
        if not self._has_begun():
            folder = self._launch.out_dir.parent
            return f"no rank has begun ({job}): see that its nodes have the folder {folder}, which all nodes must share"
        node = self.node_of(self._unheard[0]) or "unknown"
        return f"what watches rank {ranks} on node {node} was ended ({job}): see who did"

    def _without_answer(self) -> list[int]:
        self._read_codes()
        folder = self._launch.out_dir
        os.listdir(folder)  # noqa: PTH208 - makes a network file system look anew
        return [
            rank for rank, code in enumerate(self._codes) if code is None and not answer_file(folder, rank).exists()
        ]

    def _read_codes(self) -> None:
        for rank, code in enumerate(self._codes):
            if code is None:
                with contextlib.suppress(OSError, ValueError, KeyError):
                    ending = json.loads(exit_file(self._launch.out_dir, rank).read_text())
                    self._codes[rank], self._oom = int(ending["code"]), self._oom or bool(ending["oom"])
                    self._asked_to_end = self._asked_to_end or bool(ending["asked_to_end"])

    def _has_ended(self) -> bool:
        if self._ended_at is None:
            ended = self._srun.poll() is not None if self._srun else not self._job.is_queued()
            self._ended_at = time.monotonic() if ended else None
        return self._ended_at is not None

    def _was_refused(self) -> bool:
        """Whether no rank was started for want of its container or interpreter; why, is left as rank 0's words."""
        folder, log = self._launch.out_dir, self._log_text()
        container, program = _NO_CONTAINER.findall(log), _NO_PROGRAM.findall(log)
        said, field = (container, "container_image") if container else (program, "python")
        if not said or self._has_begun():
            return False
        words = "; ".join(dict.fromkeys(said))[:200]  # of each node the same
        RunFile.STDERR.of(folder, 0).write_text(f"srun: {words} ({field} of [sweep.slurm])\n")
        return True

    def _signal(self, name: str) -> bool:
        """Have Slurm send a signal to all processes of the step; whether it took the wish."""
        if self._srun is None and self._job.is_suspended():
            return False  # scancel would try again for minutes
        try:
            run("scancel", f"--signal={name}", self._step_name())
        except TrimaranError:
            return False
        return True

    def _step_name(self) -> str:
        """The job, or the trial's step of it, as scancel takes it."""
        if self._srun is None:
            return self._job.number
        with contextlib.suppress(OSError, ValueError, KeyError):
            step = int(json.loads(meeting_file(self._launch.out_dir).read_text())["step"])
            return f"{self._job.number}.{step}"
        name = token(self._launch)
        for line in run("squeue", "--noheader", "--steps", f"--jobs={self._job.number}", "--format=%i %j").splitlines():
            number, _, step_name = line.partition(" ")
            if step_name.strip() == name:
                return number
        return f"{self._job.number}.-1"  # no step yet: nothing to signal

    def _log(self, mode: str) -> IO[bytes]:
        return (self._launch.out_dir / "launcher.log").open(mode)

    def _log_text(self) -> str:
        with contextlib.suppress(OSError), self._log("rb") as log:
            return log.read(1 << 20).decode(errors="replace")
        return ""


def token(launch: Launch) -> str:
    """A name for the step that no other of its job has: folders of two trainings end alike, and lie apart."""
    return f"trimaran-{hashlib.sha256(os.fsencode(launch.out_dir)).hexdigest()[:8]}"
