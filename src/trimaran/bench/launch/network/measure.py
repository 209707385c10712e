"""Is the shaped network what was asked for? Measured on the real thing before a trial may use it.

Delay: half the round trip of small datagrams, between every two nodes. Rate: TCP streams from every node to the
next, as many at once as there are nodes for, each sending or receiving but not both: acknowledgements that queue
behind another stream's data would measure the queue. Pairs that differ are measured too.
"""

from __future__ import annotations

import select
import socket
import statistics
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations

from trimaran.bench.launch.network.switched import SwitchedNetwork
from trimaran.nouns.noun import Noun, TrimaranError

TOLERANCE = 0.10
_PINGS = 15
_ANSWER_WITHIN_S = 5.0
# Above this delay the pings of many pairs do not lengthen each other.
_TOGETHER_FROM_MS = 5.0
# Errors of this size or more are worth a correction.
_WORTH_CORRECTING, _CORRECTIONS = 0.03, 3
# Round trips in which a stream reaches its window, and those in which it is timed.
_WARM_TRIPS, _TIMED_TRIPS = 8.0, 4.0
_WARM_S, _TIMED_S = 0.1, 0.25
_CHUNK = 1 << 18
_DRAINED_WITHIN_S = 30.0

Pair = tuple[int, int]


class Way(Noun):
    """Delay and rate from one node to another: as asked and as measured (None: not measured)."""

    source: int
    target: int
    asked_ms: float
    asked_gbps: float
    delay_ms: float | None = None
    gbps: float | None = None


@dataclass(frozen=True)
class LinkCheck:
    """What a network was measured to be."""

    ways: tuple[Way, ...]

    @property
    def delay_ms(self) -> float | None:
        """Median delay over all ways, one way; None on a single node."""
        return _median([way.delay_ms for way in self.ways])

    @property
    def gbps(self) -> float | None:
        """Median rate over the ways that were timed."""
        return _median([way.gbps for way in self.ways])

    @property
    def refusal(self) -> str | None:
        """A sentence for the way that is furthest off, with both numbers, where it is outside the tolerance."""
        worst: tuple[float, str] = (0.0, "")
        for way in self.ways:
            for what, asked, measured, unit in (
                ("delay", way.asked_ms, way.delay_ms, "ms"),
                ("rate", way.asked_gbps, way.gbps, "Gbit/s"),
            ):
                if measured is None:
                    continue
                off = abs(measured - asked) / asked if asked else 0.0
                way_name = f"{what} from node {way.source} to {way.target}"
                sentence = f"{way_name} is {measured:.4g} {unit}, asked were {asked:.4g} {unit}"
                worst = max(worst, (off, sentence))
        off, sentence = worst
        return f"{sentence}: {off:.0%} off, {TOLERANCE:.0%} are allowed" if off > TOLERANCE else None

    def __str__(self) -> str:
        if self.delay_ms is None or self.gbps is None:
            return "one node, no link"
        return f"link measured {self.delay_ms:.4g} ms, {self.gbps:.4g} Gbit/s"


def measure_links(switched: SwitchedNetwork) -> LinkCheck:
    """Measure every delay and the ring's rates; corrects first for what the switch itself adds.

    Raises TrimaranError where nothing comes through.
    """
    network, nodes = switched.network, range(switched.nodes)
    pairs = list(combinations(nodes, 2))
    if not pairs:
        return LinkCheck(())
    delays = _corrected_delays_ms(switched, pairs)
    timed = [(node, (node + 1) % switched.nodes) for node in nodes]
    timed += [pair.nodes for pair in network.pairs if max(pair.nodes) < switched.nodes]
    rates: dict[Pair, float] = {}
    for ways_at_once in _rounds(timed):
        rates |= _rates_gbps(switched, ways_at_once)
    ways = [
        Way(
            source=source,
            target=target,
            asked_ms=network.delay_ms(source, target),
            asked_gbps=network.rate_gbps(source, target),
            delay_ms=delays.get((min(source, target), max(source, target))),
            gbps=rates.get((source, target)),
        )
        for source, target in dict.fromkeys([*pairs, *rates])
    ]
    return LinkCheck(tuple(ways))


def _corrected_delays_ms(switched: SwitchedNetwork, pairs: Sequence[Pair]) -> dict[Pair, float]:
    """Delays after the switch has learned what it adds itself, which a busy machine may need a few tries for."""
    alike: defaultdict[float, list[Pair]] = defaultdict(list)  # by delay: what has slept for longer is later
    for pair in pairs:
        alike[switched.network.delay_ms(*pair)].append(pair)
    delays = _delays_ms(switched, pairs)
    for _ in range(_CORRECTIONS):
        off = False
        for asked_ms, those in alike.items():
            excess_ms = statistics.median(delays[pair] for pair in those) - asked_ms
            if abs(excess_ms) > _WORTH_CORRECTING * asked_ms:
                switched.lead(those, excess_ms * 1e-3)
                off = True
        if not off:
            break
        delays = _delays_ms(switched, pairs)
    return delays


def _rounds(ways: Sequence[Pair]) -> list[list[Pair]]:
    """The ways in rounds, no node twice in a round."""
    rounds: list[list[Pair]] = []
    for way in dict.fromkeys(ways):
        free = (together for together in rounds if not {*way} & {node for other in together for node in other})
        together = next(free, None)
        if together is None:
            rounds.append([way])
        else:
            together.append(way)
    return rounds


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _delays_ms(switched: SwitchedNetwork, pairs: Sequence[Pair]) -> dict[Pair, float]:
    """Half the round trip of each pair: the lower quartile, since what is longer waited for a core, not the link."""
    slow = all(switched.network.delay_ms(*pair) >= _TOGETHER_FROM_MS for pair in pairs)
    batches = [pairs] if slow else [[pair] for pair in pairs]
    trips: dict[Pair, list[float]] = {pair: [] for pair in pairs}
    with ExitStack() as stack:
        sockets = []
        for node, address in enumerate(switched.addresses):
            opened = stack.enter_context(switched.open_socket(node, socket.SOCK_DGRAM))
            opened.bind((address, 0))
            sockets.append(opened)
        for batch in batches:
            for _ in range(_PINGS):
                for pair, seconds in _ping(switched, sockets, batch).items():
                    trips[pair].append(seconds)
    return {pair: statistics.quantiles(seconds, n=4)[0] / 2 * 1e3 for pair, seconds in trips.items()}


def _ping(switched: SwitchedNetwork, sockets: Sequence[socket.socket], pairs: Sequence[Pair]) -> dict[Pair, float]:
    """One round trip of every pair, seconds. The pair's second node sends back what it gets."""
    names = [opened.getsockname() for opened in sockets]
    sent: dict[Pair, float] = {}
    back: dict[Pair, float] = {}
    for source, target in pairs:
        sent[source, target] = time.perf_counter()
        sockets[source].sendto(struct.pack("!II", source, target), names[target])
    deadline = time.monotonic() + _ANSWER_WITHIN_S
    while len(back) < len(sent):
        ready, _, _ = select.select(sockets, (), (), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TrimaranError(f"network {switched.network.name!r}: no answer to a ping in {_ANSWER_WITHIN_S:g} s")
        for opened in ready:
            message, sender = opened.recvfrom(64)
            pair = struct.unpack("!II", message)
            if opened is sockets[pair[1]]:
                opened.sendto(message, sender)
            elif pair in sent:
                back[pair] = time.perf_counter() - sent[pair]
    return back


def _rates_gbps(switched: SwitchedNetwork, ways: Sequence[Pair]) -> dict[Pair, float]:
    """Gigabit/s of one TCP stream along each way, all at once."""
    network = switched.network
    slowest_s = 2e-3 * max(network.delay_ms(*way) for way in ways)
    warm_s = _WARM_S + _WARM_TRIPS * slowest_s
    timed_s = max(_TIMED_S, _TIMED_TRIPS * slowest_s)
    streams = [_Stream(switched, way, warm_s, timed_s) for way in ways]
    try:
        for stream in streams:
            stream.start()
        for stream in streams:
            stream.join()
    finally:
        for stream in streams:
            stream.close()
    _drain(switched)
    return {stream.way: stream.gbps for stream in streams}


class _Stream:
    """A TCP stream along one way, timed where it arrives."""

    def __init__(self, switched: SwitchedNetwork, way: Pair, warm_s: float, timed_s: float) -> None:
        self.way, self._warm_s, self._timed_s = way, warm_s, timed_s
        self.gbps = 0.0
        source, target = way
        with switched.open_socket(target, socket.SOCK_STREAM) as listener:
            listener.bind((switched.addresses[target], 0))
            listener.listen(1)
            listener.settimeout(_ANSWER_WITHIN_S)
            self._sender = switched.open_socket(source, socket.SOCK_STREAM)
            self._sender.settimeout(_ANSWER_WITHIN_S)
            try:
                self._sender.connect(listener.getsockname())
                self._receiver, _ = listener.accept()
            except OSError as error:
                self._sender.close()
                raise TrimaranError(f"network {switched.network.name!r}: no connection along {way}: {error}") from None
        self._receiver.settimeout(_ANSWER_WITHIN_S)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._send, self._receive)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until the timed part is over."""
        self._threads[1].join()

    def close(self) -> None:
        """Drop the connection with all that is under way."""
        for end in (self._receiver, self._sender):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _send(self) -> None:
        block = bytes(_CHUNK)
        try:
            while True:
                self._sender.send(block)
        except OSError:
            return  # the receiver has seen enough

    def _receive(self) -> None:
        buffer = bytearray(_CHUNK)
        begin = time.perf_counter()
        total, first = 0, 0.0
        try:
            while True:
                got = self._receiver.recv_into(buffer)
                now = time.perf_counter()
                if not got:
                    return
                if first:
                    total += got
                    if now - first >= self._timed_s:
                        self.gbps = total * 8e-9 / (now - first)
                        break
                elif now - begin >= self._warm_s:
                    first = now
        except OSError:
            return
        self._receiver.shutdown(socket.SHUT_RDWR)


def _drain(switched: SwitchedNetwork) -> None:
    """Wait until what the streams left under way has gone by."""
    deadline = time.monotonic() + _DRAINED_WITHIN_S
    while switched.carried().queued_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
