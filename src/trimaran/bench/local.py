"""The local launcher: ranks as processes of this machine, none of which outlives the trial."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from trimaran.bench.launcher import Launch
from trimaran.bench.port import HeldPort
from trimaran.noun import TrimaranError

_BECOME_RANK = Path(__file__).with_name("rank.py")
_FREED_WITHIN_S = 10.0


class LocalLauncher:
    """Starts every rank on this machine, each in a session of its own, over the loopback.

    The kernel ends the ranks when the thread that started them ends, so `start` must be called
    from the thread that then watches the trial.
    """

    def start(self, launch: Launch) -> LocalRanks:
        """Start `launch.ranks` processes; on any failure those already started are ended."""
        ranks = LocalRanks(HeldPort())
        try:
            for rank in range(launch.ranks):
                ranks.add(self._start_rank(launch, rank, ranks.port))
        except OSError as error:
            ranks.kill()
            raise TrimaranError(f"rank {len(ranks.processes)} of {launch.ranks} cannot be started: {error}") from None
        except BaseException:
            ranks.kill()
            raise
        return ranks

    @staticmethod
    def _start_rank(launch: Launch, rank: int, port: HeldPort) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(launch.threads_per_rank),
            "MKL_NUM_THREADS": str(launch.threads_per_rank),
            "PYTHONFAULTHANDLER": "1",  # a crash leaves its stacks in stderr
            **launch.environment,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(launch.ranks),
            "LOCAL_WORLD_SIZE": str(launch.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port.number),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        handed_over: tuple[int, ...] = ()
        if rank == 0:
            environment["TRIMARAN_RENDEZVOUS_FD"] = str(port.fileno())
            handed_over = (port.fileno(),)
        command = [sys.executable, "-I", "-S", str(_BECOME_RANK), str(os.getpid()), *launch.command]
        with launch.stdout(rank).open("wb") as stdout, launch.stderr(rank).open("wb") as stderr:
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=handed_over,
                start_new_session=True,
            )


class LocalRanks:
    """Running ranks of this machine. Each leads a process group that holds its own children."""

    def __init__(self, port: HeldPort) -> None:
        self.port = port
        self.processes: list[subprocess.Popen[bytes]] = []

    def add(self, process: subprocess.Popen[bytes]) -> None:
        """Take a started rank into care."""
        self.processes.append(process)

    def exit_codes(self) -> tuple[int | None, ...]:
        """Exit status by rank; None while it runs."""
        return tuple(process.poll() for process in self.processes)

    def process_ids(self) -> tuple[int, ...]:
        """Ids of the ranks that still run."""
        return tuple(process.pid for process in self.processes if process.poll() is None)

    def ask_for_stacks(self) -> None:
        """SIGUSR1 to every rank; a rank that has no handler for it ends, as it is about to anyway."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """SIGKILL to every rank's process group, children that outlived their rank included."""
        for process in self.processes:
            _kill_group(process.pid)
        for process in self.processes:
            process.wait()
        deadline = time.monotonic() + _FREED_WITHIN_S
        while any(_group_lives(process.pid) for process in self.processes) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.port.close()


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _group_lives(leader: int) -> bool:
    """Whether a process of the group that `leader` led is left (zombies of others' children count not)."""
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
