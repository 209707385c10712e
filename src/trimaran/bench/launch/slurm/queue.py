"""Slurm's queue: jobs submitted, waited for and cancelled."""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

from trimaran.bench.launch.contract import Launch, Say
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.slurm_settings import SlurmSettings

_Answer = TypeVar("_Answer")
_SCRIPT = Path(__file__).with_name("job.sh")
ASK_EVERY_S = 1.0
_COMMAND_WITHIN_S = 120.0
# Jobs run on while Slurm's controller is away. One that is started anew, or whose backup takes over (after 120 s where
# SlurmctldTimeout is as usual) and reads what was saved, answers well within these minutes.
_AWAY_WITHIN_S = 600.0
# Reasons for which a pending job never starts by itself.
HOPELESS = frozenset(
    {"BadConstraints", "PartitionNodeLimit", "PartitionTimeLimit", "InvalidAccount", "InvalidQOS", "AccountNotAllowed",
     "QOSNotAllowed", "ReservationDeleted", "JobHeldAdmin", "JobHeldUser", "NodeDown"}
)  # fmt: skip
# ... nor for what an account or a QOS allows a single job: nodes, cores, minutes (src/common/job_state_reason.c).
_MORE_THAN_A_JOB_MAY = re.compile(r"(?:QOS|Assoc)Max\w+PerJob(?:Limit)?")
# A controller that was never reached has queued no job; of one that gave no answer nobody knows (slurm_errno.c).
_NEVER_REACHED = ("(connect failure)", "(send failure)", "backup controller in standby mode")
_CLUSTER = "CLUSTER: "
_FORGOTTEN = "Invalid job id"  # what squeue says of a job that ended a while ago
TIME_IS_OVER, CANCELLED = "DUE TO TIME LIMIT", "CANCELLED AT"  # slurmstepd's words of what it ends
# Variables by which a user's shell has Slurm's commands show fewer jobs, ask before they cancel one, wait for a job's
# end, or make an array of it: none of them is the wish of a sweep, which says all that it means.
_OF_A_SHELL = re.compile(r"(SQUEUE|SCANCEL|SINFO|SCONTROL)_.*|SBATCH_(WAIT|ARRAY_INX)|SLURM_TIME_FORMAT")
# How sbatch was told to lay out the tasks of the job around a sweep: srun would take that for its steps too, beside
# what they are told, and refuses where the two do not go together.
_OF_A_JOB = re.compile(
    r"SLURM_(NTASKS_PER_\w+|GPUS(_PER_\w+)?|GPU_BIND|TRES_(PER_TASK|BIND)|CPUS_PER_\w+|CPU_BIND\w*|MEM_\w+|HINT|"
    r"THREADS_PER_CORE|DISTRIBUTION|EXACT|EXCLUSIVE)|SRUN_\w+"
)
_STILL_QUEUED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT", "REQUEUED")


def run(*command: str) -> str:
    """A Slurm command's standard output. Raises TrimaranError with its complaint where it fails."""
    environment = {name: value for name, value in os.environ.items() if not _OF_A_SHELL.fullmatch(name)}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            check=False, timeout=_COMMAND_WITHIN_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TrimaranError(
            f"{command[0]} did not answer within {_COMMAND_WITHIN_S:.0f} s: see whether Slurm's controller is up"
        ) from None
    except OSError as error:
        raise TrimaranError(f"{command[0]} cannot be run: {error.strerror or error}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        # what Slurm gives up for, else what it complained of first
        line = next((line for line in lines if ": fatal: " in line), lines[0] if lines else f"status {done.returncode}")
        complaint = re.sub(rf"^{re.escape(command[0])}: (?:error|fatal): ", "", line)
        away = any(words in complaint for words in _NEVER_REACHED)
        see = "whether Slurm's controller is up" if away else "[sweep.slurm] of the recipe"
        raise TrimaranError(f"{command[0]} refused: {complaint}; see {see}")
    # of the clusters that SLURM_CLUSTERS names, a line before what each has to say
    return "".join(line for line in done.stdout.splitlines(keepends=True) if not line.startswith(_CLUSTER))


def step_environment() -> dict[str, str]:
    """The environment of an srun, which says all that it means of its step."""
    return {name: value for name, value in os.environ.items() if not _OF_A_JOB.fullmatch(name)}


def when_there(ask: Callable[[], _Answer], say: Say, stop: threading.Event) -> _Answer:
    """What `ask` gives; a controller that is away is asked again for minutes, and until `stop`.

    Raises TrimaranError as `ask` does.
    """
    deadline = time.monotonic() + _AWAY_WITHIN_S
    is_told = False
    while True:
        try:
            return ask()
        except TrimaranError as error:
            away = any(words in str(error) for words in _NEVER_REACHED)
            if not away or time.monotonic() > deadline or stop.wait(ASK_EVERY_S):
                raise
        if not is_told:
            is_told = True
            say("Slurm's controller is away: the job is submitted when it answers again")


def largest_partition(names: str | None) -> tuple[int | None, str]:
    """The most nodes that a job can have, and the partition that gives them, of those named or else asked for.

    None where Slurm states no number.
    """
    asked = _asked_partitions(names)
    largest: tuple[int | None, str] = (None, ",".join(asked))
    for name, words in asked.items():
        limits = [int(words[key]) for key in ("TotalNodes", "MaxNodes") if words.get(key, "").isdecimal()]
        if limits and min(limits) > (largest[0] or 0):
            largest = min(limits), name
    return largest


def _asked_partitions(names: str | None) -> dict[str, dict[str, str]]:
    """What Slurm says of the partitions named, else of those that sbatch's own variable names, else of the default one.

    By name; of one that it does not know nothing.
    """
    names = names or os.environ.get("SBATCH_PARTITION")
    said = {}
    for line in run("scontrol", "show", "partition", "--oneliner").splitlines():
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        said[words.get("PartitionName", "")] = words
    if names:
        return {name: said.get(name, {}) for name in names.split(",")}
    return {name: words for name, words in said.items() if words.get("Default") == "YES"}


def usable_nodes(partition: str | None, job: str | None, *, idle: bool = False) -> set[str]:
    """Names of the nodes that answer Slurm and are not down or drained: those of a job, or else of the partition.

    `partition` is None where sbatch is not told of one. `idle`: those alone that no job has.
    """
    states = "--states=idle" if idle else "--states=idle,alloc,mixed,completing"
    asked = "" if job else ",".join(_asked_partitions(partition))
    names = [f"--nodes={nodes_of_job(job)}"] if job else [f"--partition={asked}"] if asked else []
    return set(run("sinfo", "--noheader", "--Node", "--responding", states, *names, "--format=%N").split())


def nodes_of_job(job: str) -> str:
    """The nodes that a job has now, as a list of Slurm's: those that failed are taken from it."""
    return run("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip()


def node_starts() -> dict[str, str]:
    """When the daemon of each node was started, by the node's name and in Slurm's words."""
    starts = {}
    for line in run("scontrol", "show", "node", "--oneliner").splitlines():
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if "NodeName" in words:
            starts[words["NodeName"]] = words.get("SlurmdStartTime", "")
    return starts


def never_starts(reason: str) -> bool:
    """Whether a job that is pending for this reason never starts by itself."""
    return reason in HOPELESS or _MORE_THAN_A_JOB_MAY.fullmatch(reason) is not None


class Queue:
    """What squeue says of a job, or said last where the controller has been away for no more than minutes."""

    def __init__(self, answer: str) -> None:
        """`answer` is what holds until squeue has answered for the first time."""
        self._answer = answer
        self._away_since: float | None = None

    def ask(self, *options: str) -> str:
        """Its standard output; empty for a job that ended a while ago.

        Raises TrimaranError with its complaint where it has not answered for _AWAY_WITHIN_S.
        """
        asked_at = time.monotonic()
        try:
            self._answer, self._away_since = run("squeue", "--noheader", *options), None
        except TrimaranError as error:
            if _FORGOTTEN in str(error):
                self._answer, self._away_since = "", None
            elif self._away_since is None:
                self._away_since = asked_at
            elif asked_at - self._away_since > _AWAY_WITHIN_S:
                raise
        return self._answer

    @property
    def is_away(self) -> bool:
        """Whether it was asked in vain the last time."""
        return self._away_since is not None


class Job:
    """A job of Slurm's, by its number."""

    def __init__(self, number: str) -> None:
        self.number = number
        self._state, self._asked_at = "", -math.inf
        self._queue = Queue("PENDING|")  # a job waits or runs until something else is known of it

    def state(self) -> str:
        """PENDING, RUNNING, ..., by the queue a moment ago; empty where it has left it."""
        if time.monotonic() - self._asked_at > ASK_EVERY_S:
            self._state, self._asked_at = self._ask()[0], time.monotonic()
        return self._state

    def is_queued(self) -> bool:
        """Whether the job waits, runs, or is being ended."""
        return self.state() in _STILL_QUEUED

    def is_suspended(self) -> bool:
        """Whether Slurm has stopped all processes of the job, to let them go on later."""
        return self.state() == "SUSPENDED"

    @property
    def surrounds(self) -> bool:
        """Whether this process runs in the job."""
        return os.environ.get("SLURM_JOB_ID") == self.number

    def time_limit_min(self) -> float | None:
        """How long Slurm lets the job run; None where it sets no limit, or does not answer."""
        with contextlib.suppress(TrimaranError, ValueError):
            words = run("squeue", "--noheader", "--states=all", f"--jobs={self.number}", "--format=%l").split()
            days, _, clock = words[0].rpartition("-") if words else ("", "", "")
            hours, minutes, seconds = map(int, ["0", *clock.split(":")][-3:])
            return int(days or 0) * 1440 + hours * 60 + minutes + seconds / 60
        return None

    def why_ended(self, state: str, log: str = "", *, began: bool) -> str:
        """Why Slurm ended the job, by its state, which is COMPLETING for a while, and by what its steps said.

        `began`: whether it had nodes.
        """
        if state == "TIMEOUT" or TIME_IS_OVER in log:
            limit = self.time_limit_min()
            within = f" of {limit:g} min" if limit else ""
            way_out = "--time of its sbatch" if self.surrounds else "time_limit_min in [sweep.slurm]"
            return f"the time limit{within} of Slurm job {self.number} is over: raise {way_out}"
        if state == "CANCELLED" or CANCELLED in log:
            return f"Slurm job {self.number} was cancelled{'' if began else ' while it waited for nodes'}: look who did"
        if state in _STILL_QUEUED:
            return f"Slurm told the ranks of job {self.number} to end, as scancel does: look who did"
        return f"Slurm ended job {self.number} ({state or 'which it has forgotten'}): see whether a node was lost"

    def can_be_asked_for(self) -> bool:
        """Whether Slurm's controller answers now."""
        with contextlib.suppress(TrimaranError):
            self._ask()
        return not self._queue.is_away

    def wait_until_running(self, say: Say, stop: threading.Event) -> None:
        """Wait in the queue. Raises TrimaranError where the job never can start, or the sweep ends first."""
        last_reason = ""
        while not stop.is_set():
            state, reason = self._ask()
            if state == "PENDING":
                if never_starts(reason):
                    raise TrimaranError(
                        f"Slurm job {self.number} can never start ({reason}): check partition, constraint, account, "
                        f"nodes and time_limit_min in [sweep.slurm]"
                    )
                if reason != last_reason and reason not in ("None", "Priority"):
                    last_reason = reason
                    say(f"Slurm job {self.number} waits ({reason})")
            elif state != "CONFIGURING":
                return
            stop.wait(ASK_EVERY_S)
        raise TrimaranError(f"Slurm job {self.number}: the sweep ended before the job began")

    def wait_until_gone(self, within_s: float) -> None:
        """Wait until Slurm has ended all processes of the job."""
        deadline = time.monotonic() + within_s
        while self.is_queued() and time.monotonic() < deadline:
            time.sleep(0.2)

    def cancel(self, within_s: float = 0.0) -> None:
        """Have Slurm end the job; asked again for `within_s` where it refuses, as a controller that is away."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                run("scancel", "--quiet", self.number)
            except TrimaranError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(ASK_EVERY_S)
            else:
                return

    def _ask(self) -> tuple[str, str]:
        answer = self._queue.ask("--states=all", f"--jobs={self.number}", "--format=%T|%r")
        state, _, reason = answer.strip().partition("|")
        return state, reason


def submit(
    settings: SlurmSettings,
    nodes: int,
    launch: Launch,
    command: Sequence[str],
    log: Path,
    dead_nodes: Collection[str],
    say: Say,
    stop: threading.Event,
    *,
    array: int | None = None,
    hosts: Sequence[str] = (),
) -> Job:
    """Submit a batch job that runs `command` on the first of `nodes` whole nodes, those named `hosts` if any are.

    None of `dead_nodes` is among them, unless Slurm has not enough others: it notices after minutes that a node has
    died, and its nodes may be back by then. A controller that is away is asked again for minutes, and until `stop`.
    Raises TrimaranError where Slurm refuses.
    """
    stated = {
        "partition": settings.partition,
        "account": settings.account,
        "constraint": settings.constraint,
        "time": settings.time_limit_min,
        "array": f"0-{array - 1}" if array else None,
        "nodelist": ",".join(hosts) or None,
        "gpus-per-node": launch.ranks_per_node if launch.gpus else None,
    }
    asked = (
        "sbatch",
        "--parsable",
        "--job-name=trimaran",
        f"--nodes={nodes}",
        "--exclusive",
        *([] if any(name.startswith("SBATCH_MEM_PER_") for name in os.environ) else ["--mem=0"]),  # a node's, all of it
        "--no-requeue",  # a trial that runs again begins with an empty folder, which only the sweep can see to
        "--export=ALL",
        f"--chdir={log.parent}",
        f"--output={str(log).replace('%', '%%')}",
        "--open-mode=append",
        *(f"--{name}={value}" for name, value in stated.items() if value is not None),
    )
    do = (str(_SCRIPT), *command)
    if dead_nodes and not hosts:
        with contextlib.suppress(TrimaranError):
            return _submitted(*asked, f"--exclude={','.join(sorted(dead_nodes))}", *do, say=say, stop=stop)
    return _submitted(*asked, *do, say=say, stop=stop)


def _submitted(*command: str, say: Say, stop: threading.Event) -> Job:
    return Job(when_there(lambda: run(*command), say, stop).strip().split(";")[0])
