"""The ranks of a trial on Ray's nodes: what their actors tell of them, and what is known where one tells nothing."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from trimaran.bench.launch.contract import Launch, Loss
from trimaran.bench.launch.ray.node import Look
from trimaran.bench.launch.ray.ray_cluster import NodeLostError, NodePlace, RayCluster, RayNodes, StillRunsError

_LOOK_EVERY_S = 0.25
# An actor that lives answers at once.
_ANSWERS_WITHIN_S = 15.0
_GONE_WITHIN_S = 60.0

# Told which nodes are given back, whether they can serve another trial, and which of them have gone.
GiveBack = Callable[[RayNodes, bool, Sequence[NodePlace]], None]


class RayRanks:
    """The ranks of one trial: those of each node are children of the actor there."""

    def __init__(self, launch: Launch, cluster: RayCluster, nodes: RayNodes, give_back: GiveBack) -> None:
        """Start the ranks. Raises TrimaranError as an actor does that cannot; a node that has gone is `taken_away`."""
        self._shares = launch.shares
        self._cluster, self._nodes, self._give_back = cluster, nodes, give_back
        self._looks = [Look((None,) * len(share), (False,) * len(share)) for share in self._shares]
        self._asked: list[Any] = [None] * len(self._shares)
        self._looked_at = [0.0] * len(self._shares)
        self._lost: dict[int, bool] = {}  # by node: whether it is gone, or its actor alone
        self._silent = False  # whether a word of a lost one was waited for in vain: Ray tells of most at once
        self._over_memory = self._killed = self._leave_asked = False
        try:
            self._start(launch)
        except BaseException:
            self.kill()
            raise

    def exit_codes(self) -> tuple[int | None, ...]:
        """Exit status by rank, as the nodes' actors saw it a moment ago; None while it runs or is not known."""
        if self._leave_asked:
            self._leave_asked = False
            self._tell("ask_to_leave")
        now = time.monotonic()
        for node in self._open():
            if self._asked[node] is None and now - self._looked_at[node] >= _LOOK_EVERY_S:
                self._looked_at[node] = now
                self._asked[node] = self._nodes.ask(node, "look")
            if self._asked[node] is not None:
                self._take_look(node, 0.0)
        codes = {
            rank: code
            for share, look in zip(self._shares, self._looks, strict=True)
            for rank, code in zip(share, look.exit_codes, strict=True)
        }
        return tuple(codes[rank] for rank in sorted(codes))

    def process_ids(self) -> tuple[int, ...]:
        """None: they run on other machines."""
        return ()

    def over_memory(self) -> bool:
        """Whether a node's kernel ended a rank for memory, or Ray the parent of its ranks."""
        return self._over_memory or any(look.over_memory for look in self._looks)

    def taken_away(self) -> Loss | None:
        """Which node has gone, or which of the processes that serve the ranks."""
        if self._killed or self.over_memory():
            return None
        if self._lost:
            gone = [place.name for place in self._gone()]
            sentence = "; ".join(map(self._of_the_lost, sorted(self._lost)))
            return Loss(sentence, nodes=tuple(gone), silence_s=_ANSWERS_WITHIN_S if self._silent else 0.0)
        for node, look in enumerate(self._looks):
            if look.loss:
                return Loss(f"{look.loss.sentence} (node {self._nodes.places[node].name})")
        return None

    def stopped(self) -> tuple[int, ...]:
        """Ranks that stood still when their actors last looked."""
        return tuple(
            rank
            for share, look in zip(self._shares, self._looks, strict=True)
            for rank, stopped in zip(share, look.stopped, strict=True)
            if stopped
        )

    def node_of(self, rank: int) -> str | None:
        """The name of the node that has the rank."""
        return next(place.name for place, share in zip(self._nodes.places, self._shares, strict=False) if rank in share)

    def remarks(self) -> dict[int, str]:
        """Which ranks are stopped, and where those ran that nothing is known of."""
        stopped = dict.fromkeys(self.stopped(), "was stopped (by SIGSTOP or a debugger)")
        lost = {
            rank: f"was on node {self.node_of(rank)}, and nothing answers for it"
            for node in self._lost
            for rank in self._shares[node]
        }
        return {**stopped, **lost}

    def find_lost(self) -> None:
        """Ask every actor whose ranks have no exit status."""
        for node in (asked := self._open()):
            self._asked[node] = self._nodes.ask(node, "look")
        deadline = time.monotonic() + _ANSWERS_WITHIN_S
        for node in asked:
            self._take_look(node, max(0.1, deadline - time.monotonic()))
            if self._asked[node] is not None:
                self._silent = True
                self._lose(node)

    def ask_for_stacks(self) -> None:
        """SIGUSR1 to every living rank."""
        self.find_lost()
        self._tell("ask_for_stacks")

    def ask_to_leave(self) -> None:
        """SIGTERM to every living rank, with the next look at them: this is called by signal handlers."""
        self._leave_asked = True

    def kill(self) -> None:
        """Have the actors end their ranks, and wait until they have."""
        if self._killed:
            return
        self._killed = True
        answers = [self._nodes.ask(node, "kill") for node in range(len(self._shares)) if node not in self._lost]
        serves = not self._lost
        deadline = time.monotonic() + _GONE_WITHIN_S
        for asked in answers:
            try:
                over = bool(self._nodes.answer(asked, max(0.1, deadline - time.monotonic())))
                self._over_memory = self._over_memory or over
            except (NodeLostError, StillRunsError):
                serves = False
        self._give_back(self._nodes, serves, self._gone())

    def _start(self, launch: Launch) -> None:
        first = next(node for node, share in enumerate(self._shares) if 0 in share)
        address, port = self._nodes.places[first].address, 0
        try:
            if len(self._shares) > 1:
                port = self._nodes.answer(self._nodes.ask(first, "meet", address))
        except (NodeLostError, StillRunsError):
            self._lose(first)
            return
        asked = [
            self._nodes.ask(node, "start", launch, share, address, port) for node, share in enumerate(self._shares)
        ]
        for node, answer in enumerate(asked):
            try:
                self._nodes.answer(answer)
            except (NodeLostError, StillRunsError):
                self._lose(node)

    def _open(self) -> list[int]:
        """Nodes that may have ranks without an exit status, and that are not known to be lost."""
        return [node for node, look in enumerate(self._looks) if None in look.exit_codes and node not in self._lost]

    def _take_look(self, node: int, within_s: float) -> None:
        """Take what an actor was asked for, where it has answered by then."""
        try:
            self._looks[node] = self._nodes.answer(self._asked[node], within_s)
            self._asked[node] = None
        except StillRunsError:
            pass
        except NodeLostError as error:
            self._asked[node] = None
            if error.out_of_memory:
                self._over_memory = True
                self._looks[node] = Look(
                    (-signal.SIGKILL,) * len(self._shares[node]), (False,) * len(self._shares[node])
                )
            else:
                self._lose(node)

    def _lose(self, node: int) -> None:
        self._asked[node] = None
        self._lost[node] = not self._cluster.lives(self._nodes.places[node])

    def _gone(self) -> list[NodePlace]:
        return [self._nodes.places[node] for node, gone in sorted(self._lost.items()) if gone]

    def _of_the_lost(self, node: int) -> str:
        ranks, name = ", ".join(map(str, self._shares[node])), self._nodes.places[node].name
        ray = f"Ray at {self._cluster.address}"
        if self._lost[node]:
            return f"node {name} of rank {ranks} does not answer ({ray}): see whether it is down"
        return f"what watches rank {ranks} does not answer, though its node {name} does ({ray}): see who ended it"

    def _tell(self, method: str) -> None:
        for node in range(len(self._shares)):
            if node not in self._lost:
                self._nodes.ask(node, method)
