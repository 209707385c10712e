"""What runs on a Ray node, in an actor: the parent of the ranks there, which starts them as the local launcher does.

When the actor's process ends, however it does, the kernel ends its ranks; and Ray ends it with the sweep, or with its
node.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trimaran.bench.launch.contract import Launch, Loss
from trimaran.bench.launch.local import LocalLauncher, LocalRanks, Share
from trimaran.bench.launch.port import HeldPort
from trimaran.bench.launch.slurm.node import address_towards, interface_of
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.environment import GLOO_INTERFACE, NODE

# A folder that another node made may be seen a while later on a network file system.
_SEEN_WITHIN_S = 10.0


@dataclass(frozen=True)
class Look:
    """What a node's actor sees of its ranks, in their order: as `Ranks` of the launchers' contract tells it."""

    exit_codes: tuple[int | None, ...] = ()
    stopped: tuple[bool, ...] = ()
    over_memory: bool = False
    loss: Loss | None = None


class RayNode:
    """The ranks of one node. A Ray actor calls its methods one by one, in the main thread of its process."""

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        """`environment` is of the sweep's own: what tunes the ranks."""
        self._name = name
        self._launcher = LocalLauncher()
        self._port: HeldPort | None = None
        self._ranks: LocalRanks | None = None
        os.environ.update(environment)
        os.environ[NODE] = name
        with contextlib.suppress(PermissionError):  # Ray has its workers yield to all else, which times would show
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))

    def meet(self, address: str) -> int:
        """Hold a port at this node's `address`, where the ranks of the next launch are to meet; its number."""
        self._give_up_port()
        self._port = HeldPort(address)
        return self._port.number

    def start(self, launch: Launch, ranks: tuple[int, ...], address: str, port: int) -> None:
        """Start the ranks of this node, which meet all others at `address` and `port`; alone, they need neither.

        Raises TrimaranError where one cannot be started, or where the folder of the launch is not here.
        """
        self._require(launch.out_dir)
        if len(ranks) == launch.ranks:
            self._ranks = self._launcher.start(launch)
            return
        own_address = address_towards(address, port)
        interface = launch.environment.get(GLOO_INTERFACE) or interface_of(own_address)
        held, self._port = self._port, None
        self._ranks = self._launcher.start_share(launch, Share(ranks, address, port, interface), held)

    def look(self) -> Look:
        """How the ranks stand."""
        ranks = self._ranks
        if ranks is None:
            return Look()
        codes, stopped = ranks.exit_codes(), ranks.stopped()
        return Look(
            codes, tuple(rank in stopped for rank in range(len(codes))), ranks.over_memory(), ranks.taken_away()
        )

    def ask_for_stacks(self) -> None:
        """Have every living rank write its Python stacks to its stderr."""
        if self._ranks:
            self._ranks.ask_for_stacks()

    def ask_to_leave(self) -> None:
        """SIGTERM to every living rank."""
        if self._ranks:
            self._ranks.ask_to_leave()

    def kill(self) -> bool:
        """End every process of the trial on this node; whether the kernel had ended one for memory."""
        self._give_up_port()
        ranks, self._ranks = self._ranks, None
        if ranks is None:
            return False
        ranks.kill()
        return ranks.over_memory()

    def close(self) -> None:
        """End what is kept between trials too."""
        self.kill()
        self._launcher.close()

    def _give_up_port(self) -> None:
        if self._port:
            self._port.close()
            self._port = None

    def _require(self, folder: Path) -> None:
        deadline = time.monotonic() + _SEEN_WITHIN_S
        while not folder.is_dir():
            if time.monotonic() > deadline:
                raise TrimaranError(
                    f"node {self._name} has no folder {folder}: let --runs name one that all nodes of Ray share"
                )
            time.sleep(0.1)
