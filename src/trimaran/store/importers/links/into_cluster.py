"""Measured links written into a cluster's file: which of its links they are of, and what is said of it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from trimaran.files.catalogue import cluster_from, cluster_text, validate, write_atomically
from trimaran.files.toml_edit import Path as Place
from trimaran.files.toml_edit import Value, set_values, with_values
from trimaran.files.user_file import toml_table
from trimaran.nouns.hardware.measured import four_digits
from trimaran.nouns.hardware.node_group import GroupLink
from trimaran.nouns.noun import TrimaranError
from trimaran.store.importers.links.measured_link import MeasuredLink
from trimaran.store.importers.links.read_links import read_link

# Two directions whose rates differ by more are a link of their own, each.
ALIKE = 0.1


@dataclass(frozen=True)
class WrittenLink:
    """One link of a file that was written: its values, those before (None: there were none), and where from."""

    file: str
    tool: str
    link: str
    bandwidth_gbps: float
    latency_us: float
    bandwidth_gbps_before: float | None
    latency_us_before: float | None
    said: str
    remarks: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """What was written, in one line."""
        before = ""
        if self.bandwidth_gbps_before is not None:
            before = f", was {self.bandwidth_gbps_before:g} Gbit/s and {self.latency_us_before or 0:g} us"
        now = f"{self.link} is {self.bandwidth_gbps:g} Gbit/s and {self.latency_us:g} us"
        return f"{now}{before} ({self.tool}, {self.file}: {self.said})"


@dataclass
class _Draft:
    """The cluster's table as it is to become, the changes so far, and what is to be said."""

    table: dict[str, Any]
    source: str
    changes: list[tuple[Place, Value]] = field(default_factory=list)
    written: list[WrittenLink] = field(default_factory=list)

    def set(self, place: Place, value: Value) -> None:
        self.changes.append((place, value))
        self.table = with_values(self.table, [(place, value)])

    def group(self, name: str) -> int:
        """The number of a group; raises TrimaranError naming those that there are."""
        names = [str(group.get("name")) for group in self.groups]
        if name in names:
            return names.index(name)
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(names) or 'none'}"
        raise TrimaranError(f"--link: {name!r} is no group of {self.source}: {hint}")

    @property
    def groups(self) -> list[dict[str, Any]]:
        groups = self.table.get("groups", [])
        return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def import_links(
    files: Sequence[Path], into: Path, like: str | None = None, link: str | None = None, form: str = "auto"
) -> list[WrittenLink]:
    """Write the links that files of nccl-tests and iperf3 measured into the cluster file `into`; what was written.

    A file that does not exist is begun as the cluster `like`, by name or path. `link` says which link it is: `intra`,
    `inter`, a group, or two of them as `FROM,TO`; else the hosts tell. Raises TrimaranError, in one line, where a file
    tells no link, or nothing says which it is: the cluster file is then as it was.
    """
    measured = [read_link(path, form) for path in files]
    text = _text(into, like)
    draft = _Draft(table := toml_table(text, f"cluster {like or into}"), like or str(into))
    _require_sound(table, into)
    for target, found in _by_target(draft, measured, link).items():
        _write(draft, target, found)
    _require_sound(draft.table, into)
    broken = _refusal(draft.table, into)
    remarks = [f"the cluster is not whole yet: {broken}"] if broken else []
    write_atomically(into, set_values(text, draft.changes))
    *others, last = draft.written
    return [*others, WrittenLink(**{**vars(last), "remarks": (*last.remarks, *remarks)})]


def _text(into: Path, like: str | None) -> str:
    """The text to begin with: of the file, or of the cluster that a new one is like."""
    try:
        exists = into.exists()
    except (OSError, ValueError) as error:
        raise TrimaranError(f"{into} cannot be written: {error}; choose another path") from None
    if exists and like is not None:
        raise TrimaranError(f"{into} exists, and is what links are written into: leave --cluster out, or name another")
    if not exists and like is None:
        raise TrimaranError(f"{into} does not exist: name the cluster that it is to be like by --cluster")
    return cluster_text(like or str(into))


def _refusal(table: Mapping[str, Any], into: Path) -> str | None:
    """Why the table is no cluster, in one line; None where it is one."""
    try:
        cluster_from({"name": into.stem, **table}, f"cluster {into}", into.parent)
    except TrimaranError as error:
        return str(error)
    return None


def _require_sound(table: Mapping[str, Any], into: Path) -> None:
    """Raise TrimaranError where the table is no cluster for more than links that are missing yet."""
    some = {"bandwidth_gbps": 1.0, "latency_us": 1.0}
    whole = {"name": into.stem, "intra": some, "inter": some, **table}
    groups = table.get("groups")
    if isinstance(groups, list):
        names = [group.get("name") for group in groups if isinstance(group, dict)]
        whole["links"] = [{"between": list(pair), **some} for pair in combinations(names, 2)]
    cluster_from(whole, f"cluster {into}", into.parent)
    links = table.get("links", [])
    if not isinstance(links, list):
        raise TrimaranError(f"cluster {into}: links is {links!r}, expected sections [[links]]")
    for place, link in enumerate(links, 1):
        validate(GroupLink, link, f"cluster {into}: links {place}")


def _by_target(
    draft: _Draft, measured: Sequence[MeasuredLink], link: str | None
) -> dict[tuple[str, ...], MeasuredLink]:
    """What was measured of each link; ways that several files measured of one are put together."""
    targets: dict[tuple[str, ...], MeasuredLink] = {}
    for each in measured:
        target = _stated(draft, each, link) if link is not None else _by_hosts(draft, each)
        turned = target[::-1] in targets
        target, found = (target[::-1], _turned(each)) if turned else (target, each)
        before = targets.get(target)
        targets[target] = found if before is None else _joined(before, found, _called(target))
    return targets


def _turned(found: MeasuredLink) -> MeasuredLink:
    return MeasuredLink(
        **{**vars(found), "hosts": found.hosts[::-1], "there_gbps": found.back_gbps, "back_gbps": found.there_gbps}
    )


def _joined(first: MeasuredLink, second: MeasuredLink, link: str) -> MeasuredLink:
    """Two files of one link, each of another way. Raises TrimaranError where both measured the same."""
    for way in ("there_gbps", "back_gbps"):
        if getattr(first, way) is not None and getattr(second, way) is not None:
            raise TrimaranError(f"{first.file} and {second.file} both measure {link}, one way: import one of them")
    delays = [each.delay_us for each in (first, second) if each.delay_us is not None]
    return MeasuredLink(
        **{
            **vars(first),
            "file": f"{first.file}, {second.file}",
            "said": f"{first.said}; {second.said}",
            "there_gbps": first.there_gbps if first.there_gbps is not None else second.there_gbps,
            "back_gbps": first.back_gbps if first.back_gbps is not None else second.back_gbps,
            "delay_us": min(delays, default=None),
            "remarks": () if delays else first.remarks,
        }
    )


def _stated(draft: _Draft, found: MeasuredLink, link: str) -> tuple[str, ...]:
    """The link that an option names: ("", "intra"), ("", "inter"), (group, "intra" or "inter"), or two groups."""
    names = [name.strip() for name in link.split(",")]
    if len(names) > 2 or "" in names:
        raise TrimaranError(f"--link {link!r} names no link: it is intra, inter, a group, or two groups as FROM,TO")
    if len(names) == 2:
        if names[0] == names[1]:
            raise TrimaranError(f"--link {link!r} names one group twice: write {names[0]} for its own links")
        for name in names:
            draft.group(name)
    if link == "intra" and found.tool == "iperf3":
        raise TrimaranError(
            f"--link intra is between devices of a node, and {found.file} is between hosts: name another"
        )
    if link != "intra" and len(found.hosts) == 1 and (link == "inter" or len(names) == 2):
        raise TrimaranError(f"--link {link} is between nodes, and {found.file} ran on {found.hosts[0]} alone")
    if len(names) == 2:
        return (names[0], names[1])
    if link in ("intra", "inter"):
        return ("=", link)
    draft.group(link)
    return (link, "=intra" if len(found.hosts) == 1 else "=inter")


def _by_hosts(draft: _Draft, found: MeasuredLink) -> tuple[str, ...]:
    """The link that the hosts tell: of a cluster without groups by their number, else by the groups that they name."""
    inside = "intra" if len(found.hosts) == 1 else "inter"
    if not draft.groups:
        return ("=", inside)
    names = [str(group.get("name")) for group in draft.groups]
    of_host = [_group_of(host, names) for host in found.hosts]
    if None in of_host:
        unknown = found.hosts[of_host.index(None)]
        raise TrimaranError(
            f"{found.file}: host {unknown} names no group of {draft.source} ({', '.join(names)}): say which link "
            f"it is, as --link {names[0]}{',' + names[1] if len(names) > 1 else ''}"
        )
    groups = list(dict.fromkeys(name for name in of_host if name))
    if len(groups) > 2:
        raise TrimaranError(
            f"{found.file} ran over {len(groups)} groups ({', '.join(groups)}): run it over two at a time"
        )
    return (groups[0], groups[1]) if len(groups) == 2 else (groups[0], "=" + inside)


def _group_of(host: str, names: Sequence[str]) -> str | None:
    """The group whose name a host's begins with, as `ohio` of ohio-3; the longest of several."""
    begun = [
        name
        for name in names
        if host.startswith(name) and not (host[len(name) :][:1].isalpha() and name[-1:].isalpha())
    ]
    return max(begun, key=len, default=None)


def _called(target: Sequence[str]) -> str:
    """What a link is called in a sentence."""
    if target[0] == "=":
        return target[1]
    return f"{target[1][1:]} of {target[0]}" if target[1].startswith("=") else f"link {target[0]} - {target[1]}"


def _write(draft: _Draft, target: tuple[str, ...], found: MeasuredLink) -> None:
    if target[0] == "=":
        _write_own(draft, (target[1],), draft.table, target, found)
    elif target[1].startswith("="):
        number = draft.group(target[0])
        place: Place = ("groups", number, target[1][1:])
        _write_own(draft, place, {**draft.table, **draft.groups[number]}, target, found)
    else:
        _write_between(draft, target, found)


def _write_own(
    draft: _Draft, place: Place, stated: Mapping[str, Any], target: Sequence[str], found: MeasuredLink
) -> None:
    """`intra` or `inter`, of the cluster or of a group: both ways alike, so the slower of them."""
    before = stated.get(str(place[-1]))
    before = before if isinstance(before, dict) else {}
    per_node = stated.get("devices_per_node")
    _check_ranks(draft, found, per_node)
    rates = [rate for rate in (found.there_gbps, found.back_gbps) if rate is not None]
    latency = _latency(draft, found, stated, before.get("latency_us"), target)
    rate = four_digits(min(rates))
    own: Any = draft.table
    for step in place[:-1]:
        own = own[step]
    if isinstance(own.get(place[-1]), dict):
        draft.set((*place, "bandwidth_gbps"), rate)
        draft.set((*place, "latency_us"), latency)
    else:
        draft.set(place, {"bandwidth_gbps": rate, "latency_us": latency})
    if place == ("inter",) and found.bus_gb_s:
        # of this rate collectives then get all, not a share as of a datasheet's
        draft.set(("all_reduce_gb_s",), four_digits(found.bus_gb_s))
    remarks = list(found.remarks)
    if found.tool != "iperf3" and isinstance(per_node, int) and found.per_host < per_node:
        remarks.append(
            f"{found.per_host} of a node's {per_node} devices ran, so it is what these reach: run all for the node"
        )
    _tell(draft, target, found, rate, latency, before, remarks)


def _write_between(draft: _Draft, target: tuple[str, ...], found: MeasuredLink) -> None:
    """A link between two groups: both ways alike, or one for each way where they differ."""
    links: list[dict[str, Any]] = draft.table.get("links", [])
    ways: dict[tuple[str, str], int] = {}
    for place, link in enumerate(links):
        first, second = link["between"]
        ways[first, second] = place
        if not link.get("one_way"):
            ways[second, first] = place
    there, back = (target[0], target[1]), (target[1], target[0])
    known = {there: found.there_gbps, back: found.back_gbps}
    rates = {way: four_digits(rate) for way, rate in known.items() if rate is not None}
    for name in target:
        _check_ranks(draft, found, {**draft.table, **draft.groups[draft.group(name)]}.get("devices_per_node"))
    stated = {**draft.table, **draft.groups[draft.group(target[0])]}
    apart = len(rates) == 2 and max(rates.values()) > (1 + ALIKE) * min(rates.values())
    if there not in ways and back not in ways and not apart:
        latency = _latency(draft, found, stated, None, target)
        rate = min(rates.values())
        _append(draft, len(links), there, rate, latency, one_way=False)
        _tell(draft, target, found, rate, latency, {}, found.remarks)
        return
    one = ways.get(there) if ways.get(there) == ways.get(back) else None
    if one is not None and not apart:
        rates = {there: min(rates.values())}
    for way, rate in rates.items():
        number: int | None = ways.get(way)
        before = {} if number is None else draft.table["links"][number]
        latency = _latency(draft, found, stated, before.get("latency_us"), way)
        if number is not None and (one is None or not apart or tuple(before["between"]) == way):
            draft.set(("links", number, "bandwidth_gbps"), rate)
            draft.set(("links", number, "latency_us"), latency)
            if apart and not before.get("one_way"):
                draft.set(("links", number, "one_way"), True)
        else:
            _append(draft, len(draft.table.get("links", [])), way, rate, latency, one_way=True)
        called = way if len(rates) == 2 or one is None else target
        _tell(draft, called, found, rate, latency, before, found.remarks)


def _append(draft: _Draft, number: int, way: tuple[str, str], rate: float, latency: float, *, one_way: bool) -> None:
    draft.set(("links", number, "between"), list(way))
    draft.set(("links", number, "bandwidth_gbps"), rate)
    draft.set(("links", number, "latency_us"), latency)
    if one_way:
        draft.set(("links", number, "one_way"), True)


def _check_ranks(draft: _Draft, found: MeasuredLink, per_node: object) -> None:
    if isinstance(per_node, int) and found.per_host > per_node:
        raise TrimaranError(
            f"{found.file} ran {found.per_host} ranks on a host, and nodes of {draft.source} have devices_per_node = "
            f"{per_node}: correct it, or name another cluster"
        )


def _latency(
    draft: _Draft, found: MeasuredLink, stated: Mapping[str, Any], before: object, target: Sequence[str]
) -> float:
    """The delay that was measured, or the file's. Raises TrimaranError where there is neither."""
    if found.start_up is not None:
        intra = stated.get("intra")
        hop = intra.get("latency_us", 0.0) if isinstance(intra, dict) else 0.0
        return four_digits(found.start_up.latency_us(float(hop)))
    if found.delay_us is not None:
        return four_digits(found.delay_us)
    if isinstance(before, int | float):
        return before
    way_out = found.remarks[0].rpartition(": ")[2] if found.remarks else "run it again"
    raise TrimaranError(f"{found.file} tells no delay, and {draft.source} has none of {_called(target)}: {way_out}")


def _tell(
    draft: _Draft,
    target: Sequence[str],
    found: MeasuredLink,
    rate: float,
    latency: float,
    before: Mapping[str, Any],
    remarks: Sequence[str],
) -> None:
    draft.written.append(
        WrittenLink(
            file=found.file,
            tool=found.tool,
            link=_called(target),
            bandwidth_gbps=rate,
            latency_us=latency,
            bandwidth_gbps_before=before.get("bandwidth_gbps"),
            latency_us_before=before.get("latency_us"),
            said=found.said,
            remarks=tuple(remarks),
        )
    )
