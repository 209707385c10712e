"""The contract of launchers: what a launch is, and what whoever starts its ranks can be asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trimaran.layout.places import Place
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError
from trimaran.recipe.sweep_settings import SweepSettings

# Tells the user a sentence.
Say = Callable[[str], None]


class TrialRefusedError(TrimaranError):
    """A launcher will not start this trial, though it may start others: the trial's row says why."""


class NoNetworkError(TrimaranError):
    """This machine or user can make no shaped network: trials without one may run."""


# How often a trial is run again whose ranks were lost.
RESTARTS = 3


@dataclass(frozen=True)
class Loss:
    """Why ranks are gone by no fault of theirs or of the trial's limits, and which nodes with them.

    `again`: another start is wanted. `silence_s`: for how long a word was waited for until they were taken for gone.
    """

    sentence: str
    again: bool = True
    nodes: tuple[str, ...] = ()
    silence_s: float = 0.0


@dataclass(frozen=True)
class Launch:
    """What to start: `command` once per rank, its output in `out_dir`.

    `environment` is added to the launcher's. Ranks find each other by the variables of
    `trimaran.protocol.environment`, as under torchrun. `ranks_per_node` is how many share a node (None: all) where
    nodes are filled in order of rank, `places` where each rank stands where they are not. `memory_gib` is what those of
    a node may hold together, `devices` the numbers of a node's GPUs that they may use (None: all). `reads` are files
    and folders that ranks read beside the folder that `out_dir` is in, where they also write.
    """

    command: Sequence[str]
    ranks: int
    out_dir: Path
    threads_per_rank: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    ranks_per_node: int | None = None
    places: tuple[Place, ...] = ()
    memory_gib: float | None = None
    pin_cpus: bool = False
    clock_ghz: float | None = None
    gpus: bool = False
    devices: tuple[int, ...] | None = None
    reads: tuple[Path, ...] = ()

    @property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node that has any: in order of nodes, and of the devices there."""
        if not self.places:
            per_node = self.ranks_per_node or self.ranks
            firsts = range(0, self.ranks, per_node)
            return tuple(tuple(range(first, min(first + per_node, self.ranks))) for first in firsts)
        nodes: dict[int, list[int]] = {}
        for rank in sorted(range(self.ranks), key=lambda rank: self.places[rank].device):
            nodes.setdefault(self.places[rank].node, []).append(rank)
        return tuple(map(tuple, nodes.values()))

    def slot(self, rank: int) -> int:
        """The number of a rank's device among those of its node that ranks may use.

        Raises TrialRefusedError where the rank is placed on a device that is left out.
        """
        if not self.places:
            return rank % (self.ranks_per_node or self.ranks)
        slot = self.places[rank].slot
        if not self.gpus or self.devices is None:
            return slot
        if slot not in self.devices:
            raise TrialRefusedError(
                f"rank {rank} is placed on device {slot} of its node, and ranks may use {self.devices}: place it on "
                f"one of these, or leave its place out"
            )
        return self.devices.index(slot)


class Ranks(Protocol):
    """The ranks of one trial, started."""

    def exit_codes(self) -> tuple[int | None, ...]:
        """Exit status by rank; None while it runs, minus the signal's number where one killed it."""
        ...

    def process_ids(self) -> tuple[int, ...]:
        """Processes of this machine that belong to the trial and live; empty where they are elsewhere."""
        ...

    def over_memory(self) -> bool:
        """Whether the kernel has ended a process of the trial for holding more than `Launch.memory_gib`."""
        ...

    def taken_away(self) -> Loss | None:
        """Why the ranks were ended from outside, where they were: a node, or what serves them, has gone."""
        ...

    def stopped(self) -> tuple[int, ...]:
        """Ranks that stand still until they are told to go on, by a signal or a debugger."""
        ...

    def node_of(self, rank: int) -> str | None:
        """The name of the machine that a rank was started on; None where it is not known."""
        ...

    def remarks(self) -> dict[int, str]:
        """What is to be said of ranks beyond their exit statuses, such as `was stopped`."""
        ...

    def find_lost(self) -> None:
        """Find out whether the ranks without an exit status still can have one; if not, they are `taken_away`."""
        ...

    def ask_for_stacks(self) -> None:
        """Have every living rank write its Python stacks to its stderr; implies `find_lost`."""
        ...

    def ask_to_leave(self) -> None:
        """SIGTERM to every living rank: save and leave."""
        ...

    def kill(self) -> None:
        """End every process of the trial at once and wait until none is left. May be called twice."""
        ...


class Launcher(Protocol):
    """A way to start ranks.

    `at_once` is how many trials may run side by side, `restarts` how often one is run again whose ranks were
    lost. `on_this_machine`: the ranks compute here, where those of another trial would disturb them. `job` is Slurm's
    job around this process, on whose nodes they would too; None where a trial has nodes of its own. `tells_groups`:
    it knows which of its nodes are of which group of the cluster.
    """

    at_once: int
    restarts: int
    on_this_machine: bool
    job: str | None
    tells_groups: bool

    def expect(self, nodes: int) -> None:
        """Be told of the most nodes that a trial will ask for, before the first one starts.

        Raises TrimaranError where so many can never be had.
        """
        ...

    def nodes_left(self) -> int | None:
        """On how many nodes ranks can be started from now on, those that died left out; None: on as many as ever."""
        ...

    def has_nodes(self, nodes: int) -> bool:
        """Whether ranks could be started on so many nodes now: those that are held, and others that stand idle."""
        ...

    def start(self, launch: Launch) -> Ranks:
        """Start all ranks and return once they run.

        Raises TrialRefusedError where this trial must not be started, TrimaranError where none can be.
        """
        ...

    def close(self) -> None:
        """Give back what is held between trials, and end what still runs."""
        ...


class LauncherKind(Protocol):
    """A launcher's class, which knows who asks for it; `trimaran.bench.launchers` lists them."""

    def asked_for(self, sweep: SweepSettings, cluster: Cluster, say: Say) -> Launcher | None:
        """A launcher where the sweep or its cluster ask for one of this kind, else None.

        Raises TrimaranError where they ask for it and this machine does not have it, or something else forbids it.
        """
        ...
