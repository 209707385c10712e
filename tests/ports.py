"""Ports that a test gives away before anything listens on them."""

import os
import socket
from itertools import count
from pathlib import Path

# Above these no system picks ports by itself; each of the tests that run side by side has so many of its own.
_FIRST, _OF_EACH = 10_000, 1_000
_tried = count()


def free_port() -> int:
    """A port of the loopback that nobody listens on, and that the system gives nobody meanwhile.

    A port that the system picked for a socket, closed again, may be the next that it picks for another.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    picked_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    first = _FIRST + worker * _OF_EACH
    assert first + _OF_EACH <= picked_from
    for _ in range(_OF_EACH):
        port = first + next(_tried) % _OF_EACH
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise RuntimeError(f"none of the {_OF_EACH} ports from {first} on is free")
