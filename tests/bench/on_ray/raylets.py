"""Ray's head and one more raylet as processes of this machine, each a node of two cores to Ray."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

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


class Raylets:
    """A Ray cluster of the nodes `n1`, its head, and `n2`."""

    def __init__(self) -> None:
        try:
            from ray.cluster_utils import Cluster
        except ModuleNotFoundError:
            pytest.fail(
                "a Ray of this machine's own needs `pip install -e '.[ray]'`, or leave these tests out with pytest "
                "--ignore=tests/bench/on_ray"
            )
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # the head reads it when it starts
        head = {**_SMALL, "node_name": "n1", "include_dashboard": False, "_system_config": _SETTINGS}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._second: Any = None
        self._starter = ThreadPoolExecutor(1)  # a raylet is ended with the thread that has started it

    @property
    def address(self) -> str:
        """Where the head is reached."""
        return str(self._cluster.address)

    def start_missing(self) -> None:
        """Have `n2` there, whatever an earlier test did to it, and whichever thread asks for it."""
        self._starter.submit(self._start_missing).result()

    def _start_missing(self) -> None:
        if self._second is None:
            # a node sets a handler of signals, which a thread may not
            with mock.patch("ray._private.utils.set_sigterm_handler"):
                self._second = self._cluster.add_node(**_SMALL, node_name="n2")

    def kill_second(self) -> None:
        """Kill the raylet of `n2`, as when its node goes."""
        second, self._second = self._second, None
        self._cluster.remove_node(second, allow_graceful=False)

    def close(self) -> None:
        """End all that Ray has started."""
        self._cluster.shutdown()
        self._starter.shutdown()
