"""What `iperf3 --json` writes (and `--json-stream`), on the client.

Throughput is what was received, of all streams. The delay is half of the least round trip that TCP saw (`min_rtt` of
the streams that the client sent, of 3.1 and later): the mean one also has the time in queues that the test itself
fills, which bytes over bandwidth count already.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import counted
from trimaran.store.importers.links.measured_link import MeasuredLink

NAME = "iperf3"
_LOOPBACK = ("127.", "::1")


def recognises(text: str) -> bool:
    """Whether this is such JSON, perhaps cut off."""
    head = text[:20_000]
    return text.lstrip()[:1] == "{" and (
        ('"iperf' in head and '"version"' in head) or ('"start"' in head and '"intervals"' in head)
        or ('"event"' in head and '"data"' in head)
    )  # fmt: skip


def content_of(text: str, path: Path) -> Any:
    """What the JSON of a file holds, a stream of events put together. Raises TrimaranError where it is cut off."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        whole = error
    events: dict[str, Any] = {}
    for line in filter(str.strip, text.splitlines()):
        try:
            event = json.loads(line)
            events[event["event"]] = event["data"]
        except (ValueError, RecursionError, KeyError, TypeError):
            raise TrimaranError(f"{path} is not whole JSON ({whole}): was the run cut off? run it again") from None
    return events


def read(content: Any, path: Path) -> MeasuredLink:
    """The link of one test. Raises TrimaranError, in one line that says what to do, where it tells none."""
    if error := content.get("error"):
        raise TrimaranError(f"{path}: iperf3 ended with {str(error)!r}: correct that and run it again")
    try:
        return _link(content, path)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise TrimaranError(f"{path} lacks what iperf3 --json writes ({error}): run it again to its end") from None


def _link(content: Any, path: Path) -> MeasuredLink:
    start, end = content["start"], content["end"]
    test = start["test_start"]
    if "accepted_connection" in start:
        raise TrimaranError(f"{path} is of iperf3's server: import what the client wrote with --json")
    if not end:
        raise TrimaranError(f"{path} has no sums at its end: was the run cut off? run it again")
    if str(test["protocol"]).upper() != "TCP":
        raise TrimaranError(
            f"{path} is of {test['protocol']}, which sends at a stated rate: run it over TCP, without -u"
        )
    if limit := float(test.get("target_bitrate") or start.get("target_bitrate") or 0):
        raise TrimaranError(f"{path} was held to {limit / 1e9:.4g} Gbit/s: run it without -b")
    connected = start["connected"][0]
    local, remote = str(connected["local_host"]), str(connected["remote_host"])
    if local == remote or remote.startswith(_LOOPBACK):
        raise TrimaranError(f"{path} went from {local} to {remote}, one host: run it between two")
    there: float | None
    back: float | None
    forward = _gbps(end["sum_received"], end["sum_sent"])
    if test.get("bidir"):
        there, back = forward, _gbps(end["sum_received_bidir_reverse"], end["sum_sent_bidir_reverse"])
    else:
        there, back = (None, forward) if test["reverse"] else (forward, None)
    for rate, way in ((there, f"{local} to {remote}"), (back, f"{remote} to {local}")):
        if rate == 0:
            raise TrimaranError(f"{path}: no byte arrived from {way}: check the route and the firewall, run it again")
    senders = [stream["sender"] for stream in end["streams"] if stream.get("sender")]
    trips = [trip for sender in senders if (trip := float(sender.get("min_rtt") or sender.get("mean_rtt") or 0)) > 0]
    streams, seconds = int(test["num_streams"]), float(end["sum_received"]["seconds"])
    ways = "both ways at once, " if test.get("bidir") else "the way back, " if test["reverse"] else ""
    return MeasuredLink(
        file=path.name,
        tool=NAME,
        said=f"{ways}{counted(streams, 'stream')} for {seconds:.3g} s",
        hosts=(_own_name(start) or local, str(start.get("connecting_to", {}).get("host") or remote)),
        per_host=1,
        there_gbps=there,
        back_gbps=back,
        delay_us=min(trips) / 2 if trips else None,
        remarks=() if trips else ("it states no round trip (min_rtt), and the file's delay stands: run it without -R",),
    )


def _gbps(received: Any, sent: Any) -> float:
    """Gigabit/s that arrived; what was sent where the receiver reported nothing at all."""
    summed = received if received is not None else sent
    rate = float(summed["bits_per_second"])
    if not math.isfinite(rate) or rate < 0:
        raise ValueError(f"bits_per_second is {rate}")
    return rate / 1e9


def _own_name(start: Any) -> str:
    """The client's host by `uname -a`, which `system_info` holds."""
    words = str(start.get("system_info") or "").split()
    return words[1] if len(words) > 1 else ""
