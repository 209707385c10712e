"""Nodes that died under a trial's ranks, until they are back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable

from trimaran.bench.launch.slurm.queue import node_starts
from trimaran.nouns.noun import TrimaranError


class DeadNodes:
    """Names of nodes on which nothing answered for any rank.

    Slurm notices after minutes that a node has died, and until then its word that the node answers says nothing. A node
    is back where its daemon has been started since, or where it once did not answer Slurm and does so again.
    """

    def __init__(self) -> None:
        self._starts: dict[str, str] = {}  # of all nodes' daemons, when ranks were last started
        self._dead: dict[str, str | None] = {}  # when the daemon had been started that died
        self._away: set[str] = set()
        self._lock = threading.Lock()

    def before_a_start(self) -> None:
        """Note when the nodes' daemons were started."""
        with contextlib.suppress(TrimaranError):
            starts = node_starts()
            with self._lock:
                self._starts = starts

    def add(self, names: Iterable[str]) -> None:
        """Take nodes for dead."""
        with self._lock:
            self._dead.update({name: self._starts.get(name) for name in names})

    def names(self) -> list[str]:
        """The nodes that are dead, as far as is known."""
        with self._lock:
            return sorted(self._dead)

    def left_of(self, answering: set[str]) -> set[str]:
        """Those of the nodes that answer Slurm which are not dead, or are back. Raises TrimaranError as Slurm does."""
        dead = self.names()
        starts = node_starts() if dead else {}
        with self._lock:
            for name in dead:
                began = self._dead[name]
                if name not in answering:
                    self._away.add(name)
                elif name in self._away or (began and starts.get(name, began) != began):
                    del self._dead[name]
                    self._away.discard(name)
            return answering - self._dead.keys()
