"""A virtual switch at work: started, its nodes' namespaces at hand, and gone when closed."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.bench.launch.contract import NoNetworkError
from trimaran.bench.launch.network import switch
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.shaped_network import ShapedNetwork

_SWITCH = Path(switch.__file__)
_FIRST_ADDRESS, _NETMASK = "10.77.0.1", "255.255.0.0"
_ENDS_WITHIN_S = 5.0
# A packet occupies a port for at most so long, so that streams which share it take short turns.
_PACKET_S = 0.5e-3
_LEAST_MTU, _MOST_MTU = 1500, 65000
_QUEUE_BYTES = 1 << 29


@dataclass(frozen=True)
class Carried:
    """What the switch did since it was last asked."""

    carried_bytes: int
    dropped: int
    queued_bytes: int
    worst_late_s: float


class SwitchedNetwork:
    """`nodes` namespaces joined as `network` says. Ends with this process, however that ends.

    Raises NoNetworkError where this machine or user has no network namespaces or TUN devices.
    """

    def __init__(self, network: ShapedNetwork, nodes: int) -> None:
        self.network, self.nodes = network, nodes
        self._lead_s = [[0.0] * nodes for _ in range(nodes)]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SWITCH)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the sweep, which then closes this
        )
        try:
            answer = self._ask(_topology(network, nodes))
            if "error" in answer:
                raise NoNetworkError(
                    f"network {network.name!r} cannot be shaped here: {answer['error']}; run as root on Linux with "
                    f"network namespaces and /dev/net/tun, or leave [[sweep.networks]] out"
                )
            self.addresses: list[str] = answer["addresses"]
            self.namespaces = [f"/proc/{self._process.pid}/fd/{number}" for number in answer["namespaces"]]
        except BaseException:
            self.close()
            raise

    @property
    def process_id(self) -> int:
        """Process of the switch."""
        return self._process.pid

    def carried(self) -> Carried:
        """What went through since the last call."""
        return Carried(**self._ask({}))

    def lead(self, pairs: Iterable[tuple[int, int]], more_s: float) -> None:
        """Hand packets between these nodes over so much earlier, since the switch itself adds as much."""
        for one, other in pairs:
            self._lead_s[one][other] = self._lead_s[other][one] = max(0.0, self._lead_s[one][other] + more_s)
        self._ask({"lead_s": self._lead_s})

    def open_socket(self, node: int, kind: socket.SocketKind) -> socket.socket:
        """A socket that lives on `node`, usable from anywhere in this process.

        Raises TrimaranError where the node's namespace cannot be entered.
        """
        opened: list[socket.socket] = []
        failed: list[OSError] = []

        def enter() -> None:
            # only this thread moves, and it ends here
            try:
                namespace = os.open(self.namespaces[node], os.O_RDONLY)
                try:
                    if ctypes.CDLL(None, use_errno=True).setns(namespace, switch.CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns failed")
                    opened.append(socket.socket(socket.AF_INET, kind))
                finally:
                    os.close(namespace)
            except OSError as error:
                failed.append(error)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        if failed:
            raise TrimaranError(f"node {node} of network {self.network.name!r} cannot be entered: {failed[0]}")
        return opened[0]

    def ended(self) -> str | None:
        """A sentence where the switch has ended by itself."""
        return None if self._process.poll() is None else self._ended

    def close(self) -> None:
        """End the switch; with it go its devices, and the namespaces once no process is in them."""
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write((json.dumps(command) + "\n").encode())
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise TrimaranError(self._ended)
        answer: dict[str, Any] = json.loads(line)
        return answer

    @functools.cached_property
    def _ended(self) -> str:
        """How the switch ended. Read once: what it said last is in a pipe."""
        assert self._process.stderr is not None
        self._process.kill()
        lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        return (
            f"the switch of network {self.network.name!r} ended with status {self._process.wait()}: "
            f"{lines[-1] if lines else 'it said nothing'}"
        )


def _topology(network: ShapedNetwork, nodes: int) -> dict[str, Any]:
    """What switch.py is told to build; see its Topology."""
    numbers = range(nodes)
    slowest_ms, _ = network.slowest
    in_flight = network.port_gbps * 1e9 / 8 * 2 * slowest_ms * 1e-3
    # twice what a round trip holds, so that windows never limit a stream
    window = round(min(256 << 20, 2 * in_flight + (1 << 20)))
    port = network.port_gbps * 1e9 / 8
    return {
        "nodes": nodes,
        "first_address": _FIRST_ADDRESS,
        "netmask": _NETMASK,
        "mtu": round(min(_MOST_MTU, max(_LEAST_MTU, port * _PACKET_S))),
        "queue_bytes": _QUEUE_BYTES,
        "port_bytes_per_s": [port] * nodes,
        "pair_bytes_per_s": [[_pair_rate(network, source, target) for target in numbers] for source in numbers],
        "delay_s": [[network.delay_ms(source, target) * 1e-3 for target in numbers] for source in numbers],
        "sysctls": {
            "net/ipv6/conf/all/disable_ipv6": "1",
            "net/ipv4/tcp_congestion_control": "cubic",
            # a link has no memory: neither a pause nor an earlier connection may change what it carries
            "net/ipv4/tcp_slow_start_after_idle": "0",
            "net/ipv4/tcp_no_metrics_save": "1",
            "net/ipv4/tcp_rmem": f"4096 {window} {2 * window}",
            "net/ipv4/tcp_wmem": f"4096 {window} {window}",
        },
    }


def _pair_rate(network: ShapedNetwork, source: int, target: int) -> float:
    """Bytes a second of a pair whose link is slower than the ports, else 0."""
    rate = network.rate_gbps(source, target)
    return rate * 1e9 / 8 if rate < network.port_gbps else 0.0
