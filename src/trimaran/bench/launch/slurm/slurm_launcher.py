"""The Slurm launcher: ranks as the tasks of a job step, on nodes that the sweep holds or asks for.

Slurm is spoken to through its commands, each given a list of arguments: nothing of a sweep file is read by a
shell. The folder of the trials must be shared by all nodes; heartbeats, exit statuses and the ranks' meeting place
are files in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from trimaran.bench.launch.contract import RESTARTS, Launch, Say, TrialRefusedError
from trimaran.bench.launch.slurm.allocations import Allocations
from trimaran.bench.launch.slurm.dead_nodes import DeadNodes
from trimaran.bench.launch.slurm.group_hosts import group_hosts, host_options, hosts_of, require_hosts_in_job
from trimaran.bench.launch.slurm.node import LOST_AFTER_S
from trimaran.bench.launch.slurm.queue import (
    ASK_EVERY_S,
    Job,
    largest_partition,
    nodes_of_job,
    submit,
    usable_nodes,
    when_there,
)
from trimaran.bench.launch.slurm.slurm_ranks import SlurmRanks, token
from trimaran.files.catalogue import write_atomically
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.slurm_settings import SlurmSettings
from trimaran.protocol import rank_process
from trimaran.protocol.environment import RENDEZVOUS_FD, computing
from trimaran.protocol.files import RunFile
from trimaran.recipe.sweep_settings import SweepSettings

_NODE_PROGRAM = Path(__file__).with_name("node.py")
_MODULES = Path(__file__).with_name("modules.sh")
# A node fetches and unpacks an image of tens of GB once. A user is told of what takes longer than one that is there.
_IMAGE_WITHIN_S, _TOLD_AFTER_S = 3600.0, 10.0


class SlurmLauncher:
    """Starts trials through Slurm; `close` gives back what it holds of the cluster."""

    on_this_machine = False  # Slurm gives its nodes to one trial at a time

    def __init__(self, settings: SlurmSettings, say: Say = lambda text: None, cluster: Cluster | None = None) -> None:
        if missing := [name for name in ("sbatch", "srun", "squeue", "scancel") if shutil.which(name) is None]:
            raise TrimaranError(
                f"[sweep.slurm]: {missing[0]} is not found here: run on a Slurm node or drop the section"
            )
        self.at_once = settings.at_once
        self.restarts = RESTARTS
        self._settings, self._say = settings, say
        self.job = os.environ.get("SLURM_JOB_ID") or None
        if self.job:
            self.at_once = 1
        self._allocations: Allocations | None = None
        self._jobs: list[Job] = []
        self._dead_nodes = DeadNodes()
        self._largest = 0
        self._lifeline: Path | None = None
        self._closing = threading.Event()
        self._hosts = group_hosts(settings, cluster) if cluster else ()
        self.tells_groups = bool(self._hosts)
        self._lock = threading.Lock()

    @classmethod
    def asked_for(cls, sweep: SweepSettings, cluster: Cluster, say: Say) -> Self | None:
        """One where the sweep has a section `slurm`."""
        return cls(sweep.slurm, say, cluster) if sweep.slurm else None

    def expect(self, nodes: int) -> None:
        """Ask for no fewer nodes from here on, so that one allocation serves all trials.

        Raises TrimaranError where the partition, or the job that this runs in, has fewer.
        """
        if self.job:
            self._require_in_job(nodes)
            return
        if nodes <= self._largest:
            return  # a sweep that goes on does not end because the controller is away now
        most, partition = when_there(lambda: largest_partition(self._settings.partition), self._say, self._closing)
        if most is not None and nodes > most:
            raise TrimaranError(
                f"a layout needs {nodes} nodes, Slurm's partition {partition} gives {most} at most: "
                f"name another in [sweep.slurm], or leave out the layouts that need more"
            )
        self._largest = max(self._largest, nodes)

    def nodes_left(self) -> int | None:
        """Nodes of the surrounding job, or else of the partition, that answer Slurm and did not die in a trial."""
        try:
            return len(self._dead_nodes.left_of(usable_nodes(self._settings.partition, self.job)))
        except TrimaranError:
            return None  # a controller that does not answer says nothing of its nodes

    def has_nodes(self, nodes: int) -> bool:
        """Whether the surrounding job has so many, or else an allocation and the idle nodes of its partition."""
        if self.job:
            return (self.nodes_left() or 0) >= nodes
        try:
            idle = self._dead_nodes.left_of(usable_nodes(self._settings.partition, None, idle=True))
            with self._lock:
                held = self._allocations.held_nodes() if self._allocations else 0
        except TrimaranError:
            return False
        return held + len(idle) >= nodes

    def start(self, launch: Launch) -> SlurmRanks:
        """Start the ranks; returns when Slurm has given them their nodes.

        Raises TrimaranError where Slurm refuses, or never can give them.
        """
        self._require_open()
        self._dead_nodes.before_a_start()
        hosts = hosts_of(launch, self._hosts)
        if not hosts:
            require_even(launch)
        lifeline = self._hold_lifeline(launch.out_dir.parent)
        _write_launch(launch, lifeline, self._settings.python)
        nodes = len(launch.shares)
        if self.job:
            self._require_in_job(nodes)
            if hosts:
                require_hosts_in_job(hosts, nodes_of_job(self.job), self.job)
            step = step_of(launch, self._settings, nodes, self.job, self._dead_nodes.names(), hosts)
            job = Job(self.job)
            # where this job itself is ended there is nothing to run on again
            return self._begun(SlurmRanks(launch, job, step=step, give_back=self._give_back))
        if self._settings.submit == "job":
            return self._as_job(launch, nodes, hosts)
        job = self._allocated(launch, nodes, lifeline)
        step = step_of(launch, self._settings, nodes, job.number, hosts=hosts)
        ranks = SlurmRanks(launch, job, step=step, requeue=self._settings.requeue, give_back=self._give_back)
        return self._begun(ranks)

    def close(self) -> None:
        """Give nodes back and end what still runs on them."""
        self._closing.set()
        with self._lock:  # nobody asks for nodes from here on
            ends = [self._allocations.close] if self._allocations else []
        for end in (*ends, *(job.cancel for job in self._jobs)):
            # what Slurm does not end now ends by itself, once the lifeline has given no sign for a while
            with contextlib.suppress(TrimaranError):
                end()
        if self._lifeline:
            shutil.rmtree(self._lifeline.parent, ignore_errors=True)

    def _require_open(self) -> None:
        """Raise TrimaranError once this was closed, by whichever thread: nobody would end what is asked for then."""
        if self._closing.is_set():
            raise TrimaranError("the sweep ended before its next trial could be started")

    def _require_in_job(self, nodes: int) -> None:
        have = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        if nodes > have:
            raise TrimaranError(
                f"a layout needs {nodes} nodes, this Slurm job has {have}: ask sbatch for --nodes={nodes}"
            )

    def _as_job(self, launch: Launch, nodes: int, hosts: Sequence[str]) -> SlurmRanks:
        step, log = step_of(launch, self._settings, nodes, None, hosts=hosts), launch.out_dir / "launcher.log"
        job = submit(
            self._settings, nodes, launch, step, log, self._dead_nodes.names(), self._say, self._closing, hosts=hosts
        )
        self._jobs.append(job)
        try:
            job.wait_until_running(self._say, self._closing)
        except BaseException:
            with contextlib.suppress(TrimaranError):
                job.cancel()
            raise
        ranks = SlurmRanks(launch, job, step=None, requeue=self._settings.requeue, give_back=self._give_back)
        return self._begun(ranks)

    def _begun(self, ranks: SlurmRanks) -> SlurmRanks:
        """The ranks, once each is in its container: fetching an image takes minutes, which are none of a trial's."""
        image, begin, told = self._settings.container_image, time.monotonic(), False
        try:
            while image and ranks.are_to_come() and (waited_s := time.monotonic() - begin) < _IMAGE_WITHIN_S:
                if waited_s > _TOLD_AFTER_S and not told:
                    told = True
                    self._say(f"waiting for the nodes to have {image}")
                self._closing.wait(ASK_EVERY_S)
                self._require_open()
        except BaseException:
            ranks.kill()
            raise
        return ranks

    def _allocated(self, launch: Launch, nodes: int, lifeline: Path) -> Job:
        while (job := self._allocations_for(launch, nodes, lifeline).take(self._say, self._closing)) is None:
            pass  # another trial's allocation has ended while this one waited for it
        return job

    def _allocations_for(self, launch: Launch, nodes: int, lifeline: Path) -> Allocations:
        with self._lock:
            self._require_open()
            if self._allocations is None or not self._allocations.serve(nodes):
                if self._allocations:
                    self._allocations.close()
                # nodes are held outside of a container
                python = None if self._settings.container_image else self._settings.python
                hold = _python(python, "hold", str(lifeline))
                # all that are named, since the next trial may stand on others
                asked = len(self._hosts) or max(nodes, self._largest, self._settings.nodes or 0)
                self._allocations = Allocations(
                    self._settings, asked, launch, hold, lifeline.parent, self._dead_nodes.names(), self._hosts,
                    self._say, self._closing,
                )  # fmt: skip
            return self._allocations

    def _give_back(self, job: Job, lost: bool, dead_nodes: Sequence[str]) -> None:
        self._dead_nodes.add(dead_nodes)
        if job in self._jobs:
            self._jobs.remove(job)
        elif self._allocations:
            self._allocations.give_back(job, lost)

    def _hold_lifeline(self, folder: Path) -> Path:
        with self._lock:
            if self._lifeline is None:
                held = folder / f".slurm-{secrets.token_hex(4)}"
                held.mkdir(parents=True)
                self._lifeline = held / "alive"
                self._lifeline.touch()
                threading.Thread(target=self._touch, args=(self._lifeline,), daemon=True).start()
        return self._lifeline

    def _touch(self, lifeline: Path) -> None:
        while not self._closing.wait(LOST_AFTER_S / 12):
            with contextlib.suppress(OSError):
                os.utime(lifeline)


def require_even(launch: Launch) -> None:
    """Raise TrialRefusedError where a layout places more ranks on some nodes than on others: a step has as many tasks
    on each, and where nodes are filled in order fewer on the last alone.
    """
    sizes = [len(share) for share in launch.shares]
    if launch.places and len(set(sizes)) > 1:
        raise TrialRefusedError(
            f"the layout's ranks are placed {max(sizes)} on one node and {min(sizes)} on another, and a step of Slurm "
            f"has as many tasks on each: place as many on every node"
        )


def _write_launch(launch: Launch, lifeline: Path, python: str | None) -> None:
    program, *arguments = launch.command
    content = {
        # a variant's interpreter goes before that of the nodes
        "command": [python if python and program == sys.executable else program, *arguments],
        "environment": {**computing(launch.threads_per_rank), **launch.environment},
        "ranks": launch.ranks,
        # Slurm numbers tasks node by node
        "ranks_of_tasks": [rank for share in launch.shares for rank in share],
        "slots": [launch.slot(rank) for rank in range(launch.ranks)] if launch.places else None,
        "out_dir": str(launch.out_dir),
        "stdout": RunFile.STDOUT,
        "stderr": RunFile.STDERR,
        "rendezvous_fd": RENDEZVOUS_FD,
        "rank_process": rank_process.__file__,
        "memory_gib": launch.memory_gib,
        "lifeline": str(lifeline),
    }
    write_atomically(launch.out_dir / "launch.json", json.dumps(content, indent=1))


def step_of(
    launch: Launch,
    settings: SlurmSettings,
    nodes: int,
    job: str | None,
    without: Sequence[str] = (),
    hosts: Sequence[str] = (),
) -> list[str]:
    """The srun that starts a trial's ranks, on `hosts` or `without` some; `job` is None inside the job's batch script.

    Raises TrimaranError for a folder that cannot be mounted into a container.
    """
    if hosts:
        where = host_options(launch, hosts)
    else:
        left_out = [f"--exclude={','.join(without)}"] if without else []
        where = [*left_out, f"--ntasks-per-node={len(launch.shares[0])}", "--distribution=block"]
    command = [
        "srun",
        *([f"--jobid={job}"] if job else []),
        f"--job-name={token(launch)}",
        f"--nodes={nodes}",
        f"--ntasks={launch.ranks}",
        *where,
        "--kill-on-bad-exit=0",
        "--input=none",
        "--export=ALL",  # also in a job that was submitted without its user's environment
        "--overlap",
        "--mpi=none",
    ]
    # a step that is told of cores has those alone, and threads of its ranks beside those that compute would share them
    command += (
        [f"--cpus-per-task={launch.threads_per_rank}", "--cpu-bind=cores"] if launch.pin_cpus else ["--cpu-bind=none"]
    )
    if launch.gpus:
        # the devices of a node that ranks stand on are shown with those before them
        command.append(f"--gpus-per-node={1 + max(launch.slot(rank) for rank in range(launch.ranks))}")
    if launch.clock_ghz is not None:
        command.append(f"--cpu-freq={round(launch.clock_ghz * 1e6)}")
    if settings.container_image is not None:
        mounts = ",".join([*(f"{path}:{path}" for path in _mounted(launch)), *settings.container_mounts])
        command += [f"--container-image={settings.container_image}", f"--container-mounts={mounts}"]
    if settings.modules:
        command += ["bash", "-l", str(_MODULES), str(launch.out_dir), *settings.modules, "--"]
    return [*command, *_python(settings.python, "rank", str(launch.out_dir / "launch.json"))]


def _mounted(launch: Launch) -> list[Path]:
    """What ranks read and write, and the programs of this installation that start them, where they are outside."""
    paths = [launch.out_dir.parent, *launch.reads, _NODE_PROGRAM, Path(rank_process.__file__)]
    for path in paths:
        if any(mark in str(path) for mark in ",:"):
            raise TrimaranError(f"{path} cannot be mounted into container_image: its name holds a comma or a colon")
    return list(dict.fromkeys(paths))


def _python(python: str | None, *arguments: str) -> list[str]:
    return [python or sys.executable, "-I", "-S", str(_NODE_PROGRAM), *arguments]
