"""How the ranks of a trial are started: the protocol, and the launchers by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trimaran.noun import TrimaranError


class TrialRefusedError(TrimaranError):
    """A launcher will not start this trial, though it may start others: the trial's row says why."""


@dataclass(frozen=True)
class Launch:
    """What to start: `command` once per rank, its output in `out_dir`.

    `environment` is added to the launcher's own. Ranks find each other through RANK,
    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as under torchrun. `ranks_per_node` is how many
    share a node (None: all), `memory_gib` what those of a node may hold together.
    """

    command: Sequence[str]
    ranks: int
    out_dir: Path
    threads_per_rank: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    ranks_per_node: int | None = None
    memory_gib: float | None = None
    pin_cpus: bool = False
    clock_ghz: float | None = None

    def stdout(self, rank: int) -> Path:
        """File of what `rank` prints."""
        return self.out_dir / f"stdout.{rank}"

    def stderr(self, rank: int) -> Path:
        """File of what `rank` complains about."""
        return self.out_dir / f"stderr.{rank}"


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

    def ask_for_stacks(self) -> None:
        """Have every living rank write its Python stacks to its stderr."""
        ...

    def kill(self) -> None:
        """End every process of the trial at once and wait until none is left. May be called twice."""
        ...


class Launcher(Protocol):
    """A way to start ranks."""

    def start(self, launch: Launch) -> Ranks:
        """Start all ranks and return at once.

        Raises TrialRefusedError where this trial must not be started, TrimaranError where none can be.
        """
        ...


def _local() -> Launcher:
    from trimaran.bench.local import LocalLauncher

    return LocalLauncher()


LAUNCHERS: dict[str, Callable[[], Launcher]] = {"local": _local}


def launcher_named(name: str) -> Launcher:
    """The launcher called `name`."""
    if name not in LAUNCHERS:
        raise TrimaranError(f"launcher {name!r} is not known: choose one of {', '.join(LAUNCHERS)}")
    return LAUNCHERS[name]()
