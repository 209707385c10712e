"""The virtual switch: makes one network namespace per node and carries packets between them, late and paced.

Run by file name as `python -I -S switch.py` with nothing of Trimaran imported. The first line of standard
input is what to build (JSON, see `Topology`), answered by the namespaces; every further line is a command
(`Switch.obey`), answered by what was carried since the last. It ends when standard input ends, and with it every
namespace and device: nothing has a name, so nothing can be left behind.

Each node has one TUN device, whose other end is here. A packet leaves its node when the node's port and the
pair's link are free (bytes over rate), and arrives after the pair's delay, or when the receiving port has
taken in what arrived before it: packets are cut through, so that an idle path costs their bytes once.
"""

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import select
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000
# linux/sockios.h, linux/if.h, linux/if_tun.h
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU, SIOCSIFTXQLEN = 0x8914, 0x8916, 0x891C, 0x8922, 0x8943
IFF_UP, IFF_RUNNING = 0x1, 0x40
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM = 0x01
PR_SET_TIMERSLACK = 29  # linux/prctl.h

HEADER_BYTES = 10  # struct virtio_net_hdr: says what of checksum and segmentation is left to the receiver
DESTINATION = slice(HEADER_BYTES + 16, HEADER_BYTES + 20)  # of an IPv4 packet
VERSION_AT = HEADER_BYTES
DEVICE = "node0"
# Packets taken from one node before what is due goes out.
BATCH = 8
LARGEST_PACKET = HEADER_BYTES + 65536


class Topology:
    """What to build: `nodes`, `mtu`, `first_address`, `netmask`, `queue_bytes`, `sysctls`, and the links.

    `port_bytes_per_s[i]` is the rate of node i's port, each way. `delay_s[i][j]` and `pair_bytes_per_s[i][j]` (0:
    the ports alone limit it) are of the way from i to j.
    """

    def __init__(self, stated: dict[str, Any]) -> None:
        self.nodes: int = stated["nodes"]
        self.mtu = stated["mtu"]
        self.first_address = struct.unpack("!I", socket.inet_aton(stated["first_address"]))[0]
        self.netmask = stated["netmask"]
        self.sysctls = stated["sysctls"]
        self.queue_bytes = stated["queue_bytes"]
        self.port_bytes_per_s = stated["port_bytes_per_s"]
        self.pair_bytes_per_s = stated["pair_bytes_per_s"]
        self.delay_s = stated["delay_s"]

    def address(self, node: int) -> str:
        """Dotted address of a node."""
        return socket.inet_ntoa(struct.pack("!I", self.first_address + node))


def interface_request(name: str, payload: bytes) -> bytes:
    """A `struct ifreq`."""
    return struct.pack("16s24s", name.encode(), payload)


def socket_address(address: str) -> bytes:
    """A `struct sockaddr_in` with no port."""
    return struct.pack("=HH4s", socket.AF_INET, 0, socket.inet_aton(address))


def make_node(topology: Topology, node: int, libc: ctypes.CDLL) -> tuple[int, int]:
    """Enter a new namespace and make its device; returns (file of the namespace, file of the device).

    Raises OSError where the system makes no namespace or no device.
    """
    if libc.unshare(CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"no network namespace can be made ({os.strerror(number)})")
    for name, value in topology.sysctls.items():
        # a container may keep some of them read-only or unknown: the link is measured anyway
        with contextlib.suppress(OSError), Path("/proc/sys", name).open("w") as file:
            file.write(value)
    namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(tun, TUNSETIFF, interface_request(DEVICE, struct.pack("=H", flags)))
    fcntl.ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:

        def set_up(request: int, name: str, payload: bytes) -> None:
            fcntl.ioctl(control, request, interface_request(name, payload))

        set_up(SIOCSIFTXQLEN, DEVICE, struct.pack("=i", 10_000))
        set_up(SIOCSIFMTU, DEVICE, struct.pack("=i", topology.mtu))
        set_up(SIOCSIFADDR, DEVICE, socket_address(topology.address(node)))
        set_up(SIOCSIFNETMASK, DEVICE, socket_address(topology.netmask))
        for name in (DEVICE, "lo"):
            set_up(SIOCSIFFLAGS, name, struct.pack("=H", IFF_UP | IFF_RUNNING))
    return namespace, tun


class Switch:
    """Carries packets between the nodes' devices as the topology says."""

    def __init__(self, topology: Topology, tuns: list[int]) -> None:
        self.topology, self.tuns = topology, tuns
        nodes = range(topology.nodes)
        self.out_free = [0.0 for _ in nodes]
        self.in_free = [0.0 for _ in nodes]
        self.pair_free = [[0.0 for _ in nodes] for _ in nodes]
        # heaps of (time, number, source, target, packet): on their way to a port, and taken in by it
        self.coming: list[tuple[float, int, int, int, bytes]] = []
        self.due: list[tuple[float, int, int, int, bytes]] = []
        self.number = self.carried_bytes = self.queued_bytes = self.dropped = 0
        self.worst_late_s = 0.0
        self.lead_s = [[0.0 for _ in nodes] for _ in nodes]

    def take(self, source: int, packet: bytes, now: float) -> None:
        """Give one packet its time of arrival at the port that it goes to."""
        topology, size = self.topology, len(packet) - HEADER_BYTES
        if packet[VERSION_AT] >> 4 != 4:
            return
        target = struct.unpack("!I", packet[DESTINATION])[0] - topology.first_address
        if not 0 <= target < topology.nodes:
            return
        if self.queued_bytes > topology.queue_bytes:
            self.dropped += 1
            return
        pair_free = self.pair_free[source]
        sent = max(now, self.out_free[source]) + size / topology.port_bytes_per_s[source]
        self.out_free[source] = sent
        rate = topology.pair_bytes_per_s[source][target]
        if rate:
            sent = max(sent, pair_free[target] + size / rate, now + size / rate)
            pair_free[target] = sent
        at = sent + topology.delay_s[source][target] - self.lead_s[source][target]
        self.number += 1
        self.queued_bytes += size
        heapq.heappush(self.coming, (at, self.number, source, target, packet))

    def take_in(self, now: float) -> None:
        """Let ports take in what has arrived, in the order of arrival: what comes from far holds up nothing before."""
        coming = self.coming
        while coming and coming[0][0] <= now:
            at, number, source, target, packet = heapq.heappop(coming)
            needs_s = (len(packet) - HEADER_BYTES) / self.topology.port_bytes_per_s[target]
            lead_s = self.lead_s[source][target]
            taken = max(at + lead_s, self.in_free[target] + needs_s)
            self.in_free[target] = taken
            heapq.heappush(self.due, (taken - lead_s, number, source, target, packet))

    def deliver(self, now: float) -> float | None:
        """Hand over what is due; returns seconds until there is more to do, or None."""
        self.take_in(now)
        due = self.due
        while due and due[0][0] <= now:
            at, _, _, target, packet = heapq.heappop(due)
            size = len(packet) - HEADER_BYTES
            self.queued_bytes -= size
            self.carried_bytes += size
            self.worst_late_s = max(self.worst_late_s, now - at)
            try:
                os.write(self.tuns[target], packet)
            except OSError:
                self.dropped += 1
        following = [heap[0][0] for heap in (self.coming, due) if heap]
        return max(0.0, min(following) - time.monotonic()) if following else None

    def run(self, control: int) -> None:
        """Carry until `control` (a file number) ends."""
        node_of = {tun: node for node, tun in enumerate(self.tuns)}
        files = [control, *self.tuns]
        commands = b""
        while True:
            wait_s = self.deliver(time.monotonic())
            ready, _, _ = select.select(files, (), (), wait_s)
            for file in ready:
                if file == control:
                    read = os.read(control, 65536)
                    if not read:
                        return
                    commands += read
                    *lines, commands = commands.split(b"\n")
                    for line in lines:
                        self.obey(json.loads(line))
                    continue
                source = node_of[file]
                for _ in range(BATCH):
                    try:
                        packet = os.read(file, LARGEST_PACKET)
                    except BlockingIOError:
                        break
                    self.take(source, packet, time.monotonic())

    def obey(self, command: dict[str, Any]) -> None:
        """Set what the command sets, and say what was carried since the last."""
        self.lead_s = command.get("lead_s", self.lead_s)
        tell(
            {
                "carried_bytes": self.carried_bytes,
                "dropped": self.dropped,
                "queued_bytes": self.queued_bytes,
                "worst_late_s": self.worst_late_s,
            }
        )
        self.carried_bytes = self.dropped = 0
        self.worst_late_s = 0.0


def tell(answer: dict[str, Any]) -> None:
    """One line of JSON to whoever started this."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def be_punctual(libc: ctypes.CDLL) -> None:
    """Run before what computes, since a packet that waits for a core is a longer link."""
    libc.prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def main() -> None:
    """Build, report, carry."""
    topology = Topology(json.loads(sys.stdin.readline()))
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        made = [make_node(topology, node, libc) for node in range(topology.nodes)]
    except OSError as error:
        tell({"error": f"{error.filename}: {error.strerror}" if error.filename else error.strerror})
        sys.exit(2)
    be_punctual(libc)
    addresses = [topology.address(node) for node in range(topology.nodes)]
    tell({"namespaces": [namespace for namespace, _ in made], "addresses": addresses})
    Switch(topology, [tun for _, tun in made]).run(sys.stdin.fileno())


if __name__ == "__main__":
    main()
