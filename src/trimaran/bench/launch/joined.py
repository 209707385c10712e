"""Joining the ranks that torchrun or Slurm has started: each runs the command line, and rank 0 leads.

Rank 0 prepares the job, starts its trainer as a child and watches it; the others become trainers at once and wait
for the job in the store through which all ranks meet.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from trimaran.bench.launch.contract import Launch
from trimaran.bench.launch.local import LocalRanks, shared_environment, start_process
from trimaran.bench.launch.slurm.node import address_towards, interface_of, node_address
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.variant import Variant
from trimaran.protocol import environment as env
from trimaran.protocol.programs import JOINED, WORKER
from trimaran.protocol.rank_process import settled

# All that a place needs; how many ranks share its node is only sometimes told.
_STATED = tuple(name for name in env.PLACE if name != env.LOCAL_WORLD_SIZE)
# What mpirun says of how many ranks it has started: Open MPI's, and that of MPICH and Intel MPI, which srun sets too.
_OPEN_MPI, _PMI = "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"
# Ports that ranks of Slurm steps meet at, below those that kernels give away.
_FIRST_PORT, _PORTS = 15000, 15000
_PORTS_END = 1 << 16


@dataclass(frozen=True)
class Joined:
    """The place of this process among ranks that something else started.

    `again`: they were started before, by the same torchrun, and one of them failed. `one_node`: all of them are known
    to be on this machine.
    """

    rank: int
    world_size: int
    environment: Mapping[str, str]
    again: bool = False
    one_node: bool = False

    def follow(self, variant: Variant) -> None:
        """Become a trainer under a variant, as rank 0's is, that waits for its job. Does not return."""
        os.environ.update({**variant.environment, **self.environment})
        python = variant.python or WORKER[0]
        os.execv(python, [python, *WORKER[1:], JOINED])


def joined(environment: Mapping[str, str]) -> Joined | None:
    """The place that torchrun (or what sets the same variables) or srun has given this process; None where none has.

    Raises TrimaranError for a variable that is no number, for a port that is none, and for ranks that mpirun has
    started: each would begin a training of its own.
    """
    sizes = (_OPEN_MPI,) if "SLURM_PROCID" in environment else (_OPEN_MPI, _PMI)
    by_mpi = next((name for name in sizes if name in environment), "")
    if all(name in environment for name in _STATED):
        stated = {name: environment[name] for name in _STATED}
        one_node = environment.get(env.LOCAL_WORLD_SIZE) == environment[env.WORLD_SIZE]
        stated |= {name: value for name, value in environment.items() if name.startswith(env.TORCHRUN)}
    elif (size := _number(environment, by_mpi, "1")) > 1:
        raise TrimaranError(
            f"mpirun has started {size} ranks ({by_mpi}), which know no place to meet: start them with torchrun or "
            f"srun, or state {', '.join(_STATED)} of each"
        )
    elif "SLURM_PROCID" in environment and _number(environment, "SLURM_STEP_NUM_TASKS", "1") > 1:
        one_node = _number(environment, "SLURM_STEP_NUM_NODES", "1") == 1
        step = _number(environment, "SLURM_JOB_ID", "0") * 31 + _number(environment, "SLURM_STEP_ID", "0")
        stated = {
            env.RANK: environment["SLURM_PROCID"],
            env.WORLD_SIZE: environment["SLURM_STEP_NUM_TASKS"],
            env.LOCAL_RANK: environment.get("SLURM_LOCALID", "0"),
            env.MASTER_PORT: str(_FIRST_PORT + step % _PORTS),
            **_meeting_node(environment, one_node=one_node),
        }
    else:
        return None
    if one_node and sys.platform == "linux":
        stated[env.GLOO_INTERFACE] = env.LOOPBACK_INTERFACE
    if not 0 < (port := _number(stated, env.MASTER_PORT, "0")) < _PORTS_END:
        raise TrimaranError(f"{env.MASTER_PORT} is {port}, and ports are 1 to {_PORTS_END - 1}: name one of these")
    again = _number(environment, env.TORCHRUN_RESTARTS, "0") > 0
    return Joined(_number(stated, env.RANK, "0"), _number(stated, env.WORLD_SIZE, "1"), stated, again, one_node)


def _meeting_node(environment: Mapping[str, str], *, one_node: bool) -> dict[str, str]:
    """Where rank 0's node is reached, and by which interface this node does so.

    Both as Slurm reaches its nodes: their names need not be known to any name service.
    """
    if one_node:
        return {env.MASTER_ADDR: env.LOOPBACK}
    first = first_host(environment.get("SLURM_STEP_NODELIST", ""))
    address = node_address(first)
    if not address:
        return {env.MASTER_ADDR: first}
    interface = environment.get(env.GLOO_INTERFACE) or interface_of(address_towards(address, _FIRST_PORT))
    return {env.MASTER_ADDR: address, **({env.GLOO_INTERFACE: interface} if interface else {})}


def first_host(nodes: str) -> str:
    """The first name of a Slurm list of nodes: `gpu[003-007,009],login1` -> `gpu003`.

    Raises TrimaranError where the list names no node.
    """
    match = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        raise TrimaranError(f"SLURM_STEP_NODELIST is {nodes!r}, which names no node: start the ranks with srun")
    return f"{match[1]}{match[2] or ''}{match[3] or ''}"


def _number(environment: Mapping[str, str], name: str, default: str) -> int:
    text = environment.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise TrimaranError(f"{name} is {text!r}, expected a number: start the ranks with torchrun or srun") from None


def _listening(port: int) -> socket.socket:
    """A socket that listens at a port of the loopback. Raises TrimaranError where that cannot be had."""
    try:
        return socket.create_server((env.LOOPBACK, port))
    except OSError as error:
        raise TrimaranError(
            f"rank 0 cannot listen at port {port} of {env.LOOPBACK} ({os.strerror(error.errno or 0)}): end what "
            f"listens there, or start the ranks anew at another {env.MASTER_PORT}"
        ) from None


class JoinedRanks(LocalRanks):
    """Rank 0 as a process of this one, and the ranks that something else has started and will see end."""

    def __init__(self, ranks: int) -> None:
        super().__init__(None)
        self._ranks = ranks

    def exit_codes(self) -> tuple[int | None, ...]:
        """Exit status by rank. Rank 0 leaves with 0 when all do; how others end otherwise is not known here."""
        (first,) = super().exit_codes()
        return (first, *((0 if first == 0 else None,) * (self._ranks - 1)))

    def node_of(self, rank: int) -> str | None:
        """This machine of rank 0; where the others run is not known here."""
        return super().node_of(rank) if rank == 0 else None

    def remarks(self) -> dict[int, str]:
        """Who knows of the other ranks."""
        others = dict.fromkeys(range(1, self._ranks), "was started by another program, which knows how it ended")
        return {**super().remarks(), **others}


class JoinedLauncher:
    """Starts the trainer of rank 0 alone; the other ranks are started already."""

    at_once = 1
    restarts = 0  # the other ranks are not this process's to start
    job: str | None = None
    tells_groups = False

    def __init__(self, place: Joined) -> None:
        self._place = place
        self.on_this_machine = place.one_node

    def expect(self, nodes: int) -> None:
        """The ranks are started already."""

    def nodes_left(self) -> int | None:
        """The ranks are started already."""
        return None

    def has_nodes(self, nodes: int) -> bool:
        """The ranks are started already."""
        return True

    def start(self, launch: Launch) -> JoinedRanks:
        """Start rank 0's trainer, which hands the job to the others.

        Raises TrimaranError where the system cannot start it, or its port is another program's.
        """
        place = self._place.environment
        environment = {**shared_environment(launch), **place}
        ranks = JoinedRanks(launch.ranks)
        with contextlib.ExitStack() as stack:
            handed_over: dict[str, int] = {}
            if place[env.MASTER_ADDR] == env.LOOPBACK and environment.get(env.TORCHRUN_STORE) != "True":
                # so that rank 0 listens on the loopback alone
                held = stack.enter_context(_listening(int(place[env.MASTER_PORT])))
                handed_over[env.RENDEZVOUS_FD] = held.fileno()
            try:
                command = settled(("-", "-", "-"), (*launch.command, JOINED))
                ranks.add(start_process(launch, 0, command, environment, handed_over))
            except OSError as error:
                ranks.kill()
                raise TrimaranError(f"rank 0 cannot be started: {error}") from None
        return ranks

    def close(self) -> None:
        """Nothing is held."""
