"""Ray's head and one more raylet as processes of this machine, each a node of two cores to Ray.

A program of its own (`python raylets.py`) starts and kills them: a process that is connected to Ray has threads beside
which a fork may wait for ever, and a raylet ends with the thread that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

CORES_PER_NODE = 2
_SMALL = {"num_cpus": CORES_PER_NODE, "object_store_memory": 80 << 20}
# A raylet that was killed is known as dead within two seconds, and no process is started before it is asked for.
_SETTINGS = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
    "prestart_worker_first_driver": False,
}
_SAYS = "raylets: "
_CLONE_FS, _CLONE_NEWNS = 0x00000200, 0x00020000  # linux/sched.h


class Raylets:
    """A Ray cluster of the nodes `n1`, its head, and `n2`."""

    def __init__(self) -> None:
        if importlib.util.find_spec("ray") is None:
            pytest.fail(
                "a Ray of this machine's own needs `pip install -e '.[ray]'`, or leave these tests out with pytest "
                "--ignore=tests/bench/on_ray"
            )
        self._lock = threading.Lock()
        self._keeper = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        )  # fmt: skip
        # where the head is reached
        self.address = self._answer()

    def start_missing(self, *, own_memory: bool = False) -> None:
        """Have `n2` there, whatever an earlier test did to it.

        With `own_memory`, which needs root, it has a /dev/shm of its own, as other machines have, that is gone with it;
        and it does not see what is mounted elsewhere meanwhile.
        """
        self._ask("start with its own memory" if own_memory else "start")

    def kill_second(self) -> None:
        """Kill the raylet of `n2`, as when its node goes."""
        self._ask("kill")

    def close(self) -> None:
        """End all that Ray has started."""
        self._keeper.communicate()

    def _ask(self, what: str) -> None:
        with self._lock:
            assert self._keeper.stdin is not None
            print(what, file=self._keeper.stdin, flush=True)
            self._answer()

    def _answer(self) -> str:
        assert self._keeper.stdout is not None
        for line in self._keeper.stdout:
            if line.startswith(_SAYS):
                return line.removeprefix(_SAYS).strip()
        raise RuntimeError(f"Ray's raylets have ended with {self._keeper.wait()}")


def _keep() -> None:
    """Start the head and do what standard input says, line by line, until it ends."""
    from ray.cluster_utils import Cluster

    head = {**_SMALL, "node_name": "n1", "include_dashboard": False, "_system_config": _SETTINGS}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    print(f"{_SAYS}{cluster.address}", flush=True)
    second = None
    for line in sys.stdin:
        if line.startswith("start") and second is None:
            with _own_memory() if "own memory" in line else contextlib.nullcontext():
                second = cluster.add_node(**_SMALL, node_name="n2")
        elif line.strip() == "kill" and second is not None:
            cluster.remove_node(second, allow_graceful=False)
            second = None
        print(f"{_SAYS}done", flush=True)
    cluster.shutdown()


@contextlib.contextmanager
def _own_memory() -> Iterator[None]:
    """Have what is started in the block see a /dev/shm of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/mnt").open("rb") as machine:
        if libc.unshare(_CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare failed")
        try:
            subprocess.run(["mount", "--make-rprivate", "/"], check=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512m", "tmpfs", "/dev/shm"], check=True)
            yield
        finally:
            # of a thread that shares its root folder with others, as those begun in the block, it is refused
            if libc.unshare(_CLONE_FS) or libc.setns(machine.fileno(), _CLONE_NEWNS):
                raise OSError(ctypes.get_errno(), "setns failed")


if __name__ == "__main__":
    _keep()
