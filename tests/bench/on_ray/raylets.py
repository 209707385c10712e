"""Ray's head and one more raylet as processes of this machine, each a node of two cores to Ray.

A program of its own (`python raylets.py`) starts and kills them: a process that is connected to Ray has threads beside
which a fork may wait for ever, and a raylet ends with the thread that started it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading

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

    def start_missing(self) -> None:
        """Have `n2` there, whatever an earlier test did to it."""
        self._ask("start")

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
        if line.strip() == "start" and second is None:
            second = cluster.add_node(**_SMALL, node_name="n2")
        elif line.strip() == "kill" and second is not None:
            cluster.remove_node(second, allow_graceful=False)
            second = None
        print(f"{_SAYS}done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    _keep()
