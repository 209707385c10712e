"""The local launcher: ranks as processes of this machine, none of which outlives the trial."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self

from trimaran.bench.launch.cgroup import MemoryGroup, memory_group
from trimaran.bench.launch.clock import capped_clock
from trimaran.bench.launch.contract import RESTARTS, Launch, Loss, Say, TrialRefusedError
from trimaran.bench.launch.held_memory import kernel_oom_kills
from trimaran.bench.launch.port import HeldPort, loopback_port
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol import environment as env
from trimaran.protocol.files import RunFile
from trimaran.protocol.nursery import Nursery, NurseryLostError
from trimaran.protocol.programs import TRAINER
from trimaran.protocol.rank_process import settled
from trimaran.recipe.sweep_settings import SweepSettings

_FREED_WITHIN_S = 10.0


@dataclass(frozen=True)
class Share:
    """The ranks of a launch that start on this machine, and where they meet the others.

    `address` and `port` are rank 0's, `interface` is the one by which this machine reaches it.
    """

    ranks: tuple[int, ...]
    address: str
    port: int
    interface: str


class LocalLauncher:
    """Starts every rank on this machine, each in a process group of its own, over the loopback.

    Ranks of the trainer on CPUs are forked from a process that is kept between trials.

    The kernel ends the ranks when the thread that started them ends, so `start` must be called
    from the thread that then watches the trial.
    """

    at_once = 1  # trials side by side would disturb each other's times
    restarts = RESTARTS
    on_this_machine = True
    job: str | None = None
    tells_groups = False

    def __init__(self) -> None:
        self._nursery: Nursery | None = None

    @classmethod
    def asked_for(cls, sweep: SweepSettings, cluster: Cluster, say: Say) -> Self | None:
        """One for every sweep that asks for no other."""
        return cls()

    def close(self) -> None:
        """End what is kept between trials."""
        if self._nursery:
            self._nursery.close()
            self._nursery = None

    def expect(self, nodes: int) -> None:
        """This machine is one node, to which the rules of layouts hold a trial."""

    def nodes_left(self) -> int | None:
        """This machine is there."""
        return None

    def has_nodes(self, nodes: int) -> bool:
        """This machine is there."""
        return True

    def start(self, launch: Launch) -> LocalRanks:
        """Start `launch.ranks` processes; on any failure those already started are ended.

        Raises TrialRefusedError where ranks stand on several nodes or are told another interface than the loopback,
        TrimaranError where this machine has none.
        """
        if (interface := launch.environment.get(env.GLOO_INTERFACE, env.LOOPBACK_INTERFACE)) != env.LOOPBACK_INTERFACE:
            raise TrialRefusedError(
                f"environment.{env.GLOO_INTERFACE} is {interface!r}, but ranks of one machine speak over its loopback: "
                f"leave it out, or have Slurm or Ray start the ranks ([sweep.slurm], [sweep.ray])"
            )
        if launch.places and len(launch.shares) > 1:
            raise TrialRefusedError(
                f"the layout's ranks are placed on {len(launch.shares)} nodes, and this machine is one: place them on "
                f"devices of one node, or name what starts ranks on others ([sweep.slurm], [sweep.ray], "
                f"[[sweep.networks]])"
            )
        port = loopback_port()
        whole = Share(tuple(range(launch.ranks)), env.LOOPBACK, port.number, env.LOOPBACK_INTERFACE)
        return self.start_share(replace(launch, ranks_per_node=None), whole, port)

    def start_share(self, launch: Launch, share: Share, port: HeldPort | None) -> LocalRanks:
        """Start those ranks of a launch that this machine has; `port` is where rank 0, if it is among them, listens."""
        try:
            nursery = self._nursery_for(launch)
        except OSError as error:
            if port:
                port.close()
            raise TrimaranError(f"the process that ranks are forked from cannot be started: {error}") from None
        try:
            return _start(launch, share, port, nursery)
        except NurseryLostError:
            self.close()
            # ranks that are started by themselves say in their logs what is wrong
            return _start(launch, share, port, None)

    def _nursery_for(self, launch: Launch) -> Nursery | None:
        """The process to fork the ranks from; None for ranks that must be started: of other programs, or on GPUs."""
        python, *rest = launch.command
        if sys.platform != "linux" or launch.gpus or tuple(rest[: len(TRAINER)]) != TRAINER:
            return None
        if "LD_PRELOAD" in launch.environment:  # each rank's log is to hold what the dynamic linker says of it
            return None
        command, environment = (python, *TRAINER), shared_environment(launch)
        if not (self._nursery and self._nursery.serves(command, environment)):
            self.close()
            self._nursery = Nursery(command, environment)
        return self._nursery


def _start(launch: Launch, share: Share, port: HeldPort | None, nursery: Nursery | None) -> LocalRanks:
    ranks = LocalRanks(port)
    ranks.nursery = nursery
    try:
        ranks.hold(capped_clock(launch.clock_ghz))
        ranks.memory = memory_group(launch.memory_gib)
        for rank in share.ranks:
            ranks.add(_start_rank(launch, share, rank, ranks, nursery))
    except NurseryLostError:
        ranks.port = None  # for another start
        ranks.kill()
        raise
    except OSError as error:
        ranks.kill()
        rank = share.ranks[len(ranks.processes)]
        raise TrimaranError(f"rank {rank} of {launch.ranks} cannot be started: {error}") from None
    except BaseException:
        ranks.kill()
        raise
    return ranks


def shared_environment(launch: Launch) -> dict[str, str]:
    """What the environments of all ranks have in common.

    What a torchrun says that this process is a rank of is none of theirs: they would wait at its store.
    """
    around = {name: value for name, value in os.environ.items() if not name.startswith(env.TORCHRUN)}
    environment = {**around, **env.computing(launch.threads_per_rank), **launch.environment}
    if launch.gpus and launch.devices is not None:
        shown = [name for name in environment.get(env.SHOWN_GPUS, "").split(",") if name]
        names = [shown[device] if device < len(shown) else str(device) for device in launch.devices]
        environment[env.SHOWN_GPUS] = ",".join(names)
    return environment


def _start_rank(launch: Launch, share: Share, rank: int, ranks: LocalRanks, nursery: Nursery | None) -> Process:
    here = launch.slot(rank)
    place = {
        env.RANK: str(rank),
        env.LOCAL_RANK: str(here),
        env.WORLD_SIZE: str(launch.ranks),
        env.LOCAL_WORLD_SIZE: str(len(share.ranks)),
        env.MASTER_ADDR: share.address,
        env.MASTER_PORT: str(share.port),
        # where one machine has all ranks, nothing of a trial listens where others could reach it
        env.GLOO_INTERFACE: share.interface,
    }
    handed_over = {env.RENDEZVOUS_FD: ranks.port.fileno()} if rank == 0 and ranks.port else {}
    cores = ",".join(map(str, cores_of(here, launch))) if launch.pin_cpus else "-"
    group = str(ranks.memory.processes_file) if ranks.memory else "-"
    # without a group one rank alone can be held to the limit, and the watch looks at their sum
    data = "-" if ranks.memory or launch.memory_gib is None else str(int(launch.memory_gib * 2**30))
    settles = (cores, group, data)
    if nursery is None:
        environment = {**shared_environment(launch), **place}
        return start_process(launch, rank, settled(settles, tuple(launch.command)), environment, handed_over)
    arguments = launch.command[1 + len(TRAINER) :]
    with (
        RunFile.STDOUT.of(launch.out_dir, rank).open("wb") as stdout,
        RunFile.STDERR.of(launch.out_dir, rank).open("wb") as stderr,
    ):
        output = (stdout.fileno(), stderr.fileno())
        return nursery.fork(settles, arguments, place, launch.out_dir, output, handed_over)


def start_process(
    launch: Launch, rank: int, command: Sequence[str], environment: Mapping[str, str], handed_over: Mapping[str, int]
) -> subprocess.Popen[bytes]:
    """Start one rank. `handed_over` are descriptors by the variables that name them."""
    with (
        RunFile.STDOUT.of(launch.out_dir, rank).open("wb") as stdout,
        RunFile.STDERR.of(launch.out_dir, rank).open("wb") as stderr,
    ):
        return subprocess.Popen(
            command,
            env={**environment, **{name: str(descriptor) for name, descriptor in handed_over.items()}},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=tuple(handed_over.values()),
            start_new_session=True,
            cwd=launch.out_dir,  # a file that a library writes by a bare name stays in the trial's folder
        )


class Process(Protocol):
    """What `subprocess.Popen` and a forked rank have in common."""

    pid: int

    def poll(self) -> int | None:
        """Exit status; None while it runs, minus the signal's number where one killed it."""
        ...

    def wait(self) -> int:
        """Exit status, once it has ended."""
        ...

    def send_signal(self, number: int, /) -> None:
        """Send it a signal."""
        ...


class LocalRanks:
    """Running ranks of this machine. Each leads a process group that holds its own children."""

    def __init__(self, port: HeldPort | None) -> None:
        """`port` is where rank 0 listens, if it is of this machine; it is given back with the ranks."""
        self.port = port
        self.processes: list[Process] = []
        self.memory: MemoryGroup | None = None
        self.nursery: Nursery | None = None
        self._held = contextlib.ExitStack()
        self._over_memory = self._ended = False
        self._kills_before = kernel_oom_kills()

    def hold(self, context: contextlib.AbstractContextManager[None]) -> None:
        """Enter a context that ends with the trial."""
        self._held.enter_context(context)

    def add(self, process: Process) -> None:
        """Take a started rank into care."""
        self.processes.append(process)

    def exit_codes(self) -> tuple[int | None, ...]:
        """Exit status by rank; None while it runs."""
        return tuple(process.poll() for process in self.processes)

    def process_ids(self) -> tuple[int, ...]:
        """Ids of the ranks that still run."""
        return tuple(process.pid for process in self.processes if process.poll() is None)

    def over_memory(self) -> bool:
        """Whether the kernel has ended a process of the trial for memory."""
        if self.memory:
            over = self.memory.over_memory()
        else:  # others may have been killed for memory, too: of the same control group, or of the whole machine
            killed = any(process.poll() == -signal.SIGKILL for process in self.processes)
            over = not self._ended and killed and kernel_oom_kills() > self._kills_before
        self._over_memory = self._over_memory or over
        return self._over_memory

    def taken_away(self) -> Loss | None:
        """Where the process that the ranks were forked from was ended: they end with it."""
        if self.nursery is None or self.nursery.lives() or self.over_memory():
            return None
        return Loss("the process that the ranks were forked from was ended, and they with it")

    def node_of(self, rank: int) -> str | None:
        """This machine."""
        return socket.gethostname()

    def remarks(self) -> dict[int, str]:
        """Which ranks are stopped."""
        return dict.fromkeys(self.stopped(), "was stopped (by SIGSTOP or a debugger)")

    def stopped(self) -> tuple[int, ...]:
        """Ranks that stand still: they are silent, and so are those that wait for them."""
        return tuple(rank for rank, process in enumerate(self.processes) if is_stopped(process.pid))

    def find_lost(self) -> None:
        """Processes of this machine have an exit status as soon as they have ended."""

    def ask_for_stacks(self) -> None:
        """SIGUSR1 to every rank; a rank that has no handler for it ends, as it is about to anyway."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)

    def ask_to_leave(self) -> None:
        """SIGTERM to every living rank."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to every rank's process group, children that outlived their rank included."""
        self.over_memory()
        self._ended = True
        for process in self.processes:
            _kill_group(process.pid)
        for process in self.processes:
            process.wait()
        deadline = time.monotonic() + _FREED_WITHIN_S
        while any(_group_lives(process.pid) for process in self.processes) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.over_memory()
        if self.memory:
            self.memory.close()
        self._held.close()
        if self.port:
            self.port.close()


def cores_of(rank: int, launch: Launch) -> list[int]:
    """The cores that a pinned rank computes on: those of no other rank where there are enough, else shared in turns.

    `rank` counts the ranks of this machine.
    """
    usable = sorted(os.sched_getaffinity(0))
    threads = launch.threads_per_rank
    return sorted({usable[(rank * threads + thread) % len(usable)] for thread in range(threads)})


def is_stopped(pid: int) -> bool:
    """Whether a process stands still until it is told to go on, by a signal or by a debugger."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] in "Tt"


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _group_lives(leader: int) -> bool:
    """Whether a process of the group that `leader` led is left, zombies of other parents' children apart."""
    try:
        os.killpg(leader, 0)
    except (ProcessLookupError, PermissionError):
        return False
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            text = stat.read_text()
            state, _parent, group = text[text.rindex(")") + 2 :].split()[:3]
            if int(group) == leader and state not in "ZX":
                return True
    return False
