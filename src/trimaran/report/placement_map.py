"""The map of a placed layout: which replica's stage stands in which group of nodes, and what crosses which way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import cos, pi, sin, sqrt

from trimaran.layout.axes import groups
from trimaran.layout.layout import Layout
from trimaran.layout.places import places
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.node_group import ways_between
from trimaran.report.appearance import PALETTE

# Of more cells in a box only how many of each stage there are is said, and of more boxes no ways are drawn.
_CELLS, _DRAWN = 48, 16
# Pixels of the drawing, which a narrow window shows as it is.
_WIDE, _HIGH = 340, 300
_SENDS, _RINGS = PALETTE[0], PALETTE[1]
_HEADING = "Who stands where, and what crosses which way"

Way = tuple[int, int]


@dataclass(frozen=True)
class Crossing:
    """What crosses between two boxes, both ways: neighbours of pipelines, and hops of rings by their axis' title."""

    sends: int
    rings: Mapping[str, int]

    def __str__(self) -> str:
        parts = [f"{self.sends} {'pair' if self.sends == 1 else 'pairs'} of neighbouring stages"] if self.sends else []
        parts += [f"{count} {'hop' if count == 1 else 'hops'} of {title} rings" for title, count in self.rings.items()]
        return ", ".join(parts)


@dataclass(frozen=True)
class PlacementMap:
    """Boxes of the map, which are groups of nodes or else nodes: their names, the box of each rank, what crosses."""

    layout: Layout
    names: tuple[str, ...]
    box_of: tuple[int, ...]
    crossings: Mapping[Way, Crossing]
    links: Mapping[Way, str]

    @classmethod
    def of(cls, cluster: Cluster, layout: Layout) -> PlacementMap:
        """The map of a layout whose devices the cluster has."""
        stand = places(layout, cluster)
        box_of = tuple(place.group if cluster.groups else place.node for place in stand)
        names = tuple(group.name for group in cluster.groups) or tuple(f"node {node}" for node in range(cluster.nodes))
        crossings = _crossings(layout, box_of)
        return cls(layout, names, box_of, crossings, {way: _link(cluster, way) for way in crossings})

    @property
    def used(self) -> list[int]:
        """Boxes in which ranks stand."""
        return sorted(set(self.box_of))


def placement_map(cluster: Cluster, layout: Layout) -> str:
    """The map as HTML of a page; empty where all devices are alike and none is named.

    Empty too where the cluster has not as many devices: its file is not what it was when the layout was chosen.
    """
    unlike = cluster.groups or (cluster.shaped is not None and (cluster.shaped.pairs or cluster.shaped.nodes))
    if not (layout.placed or unlike) or max(layout.placed or (layout.devices - 1,)) >= cluster.devices:
        return ""
    drawn = PlacementMap.of(cluster, layout)
    idle = [name for box, name in enumerate(drawn.names) if box not in drawn.used]
    without = f" No rank stands in {escape(_listed(idle))}." if idle else ""
    # the boxes have what its text would say of every rank
    unplaced = layout.model_copy(update={"placed": ()})
    return (
        f'<section id="map" aria-labelledby="map-title"><h2 id="map-title">{_HEADING}</h2>'
        f"<p>Of <code>{escape(str(unplaced)).replace(',', ',<wbr>')}</code>: R is a replica, S a stage, both from 0, "
        f"beside them the ranks.{without}</p>"
        f'<div class="map">{_drawing(drawn) if 1 < len(drawn.used) <= _DRAWN else ""}'
        f'<div class="places">{"".join(_box(drawn, cluster, box) for box in drawn.used)}</div></div>'
        f'<ul class="ways">{"".join(_ways(drawn)) or "<li>Nothing crosses from one to another.</li>"}</ul></section>'
    )


def _crossings(layout: Layout, box_of: tuple[int, ...]) -> dict[Way, Crossing]:
    sends: Counter[Way] = Counter()
    rings: dict[str, Counter[Way]] = {title: Counter() for title in ("DP", "TP", "CP")}
    for stages in groups(layout, "pp"):
        turns = [(stages[-1], stages[0])] if layout.vpp > 1 else []
        sends.update(_between(box_of, [*pairwise(stages), *turns]))
    for title, counted in rings.items():
        for ring in groups(layout, title.lower()):
            closing = [(ring[-1], ring[0])] if len(ring) > 2 else []
            counted.update(_between(box_of, [*pairwise(ring), *closing]))
    ways = sorted({*sends, *(way for counted in rings.values() for way in counted)})
    return {
        way: Crossing(sends[way], {title: counted[way] for title, counted in rings.items() if counted[way]})
        for way in ways
    }


def _between(box_of: tuple[int, ...], neighbours: list[tuple[int, int]]) -> Iterator[Way]:
    for one, other in neighbours:
        if box_of[one] != box_of[other]:
            yield min(box_of[one], box_of[other]), max(box_of[one], box_of[other])


def _link(cluster: Cluster, way: Way) -> str:
    """Rate and delay between two boxes, there and, where it differs, back."""
    there, back = (_one_way(cluster, source, target) for source, target in (way, way[::-1]))
    return there if there == back else f"{there} there and {back} back"


def _one_way(cluster: Cluster, source: int, target: int) -> str:
    if cluster.groups:
        names = cluster.groups[source].name, cluster.groups[target].name
        link = ways_between(cluster.groups, cluster.links)[names]
        shared = ", shared by all" if link.shared else ""
        return f"{link.bandwidth_gbps:g} Gbit/s, {link.latency_us * 1e-3:g} ms{shared}"
    if cluster.shaped is not None:
        gbps, delay_ms = cluster.shaped.rate_gbps(source, target), cluster.shaped.delay_ms(source, target)
        return f"{gbps:g} Gbit/s, {delay_ms:g} ms"
    return f"{cluster.inter.bandwidth_gbps:g} Gbit/s, {cluster.inter.latency_us * 1e-3:g} ms"


def _ways(drawn: PlacementMap) -> Iterator[str]:
    for way, crossing in drawn.crossings.items():
        names = " and ".join(escape(drawn.names[box]) for box in way)
        yield f"<li><b>{names}</b> ({drawn.links[way]}): {crossing}</li>"


def _box(drawn: PlacementMap, cluster: Cluster, box: int) -> str:
    """A group or a node as a box: its cells, each the ranks of one replica's stage."""
    cells: dict[tuple[int, int], list[int]] = {}
    for rank, stands_in in enumerate(drawn.box_of):
        if stands_in == box:
            cell = drawn.layout.coordinate("dp", rank), drawn.layout.coordinate("pp", rank)
            cells.setdefault(cell, []).append(rank)
    if len(cells) > _CELLS:
        stages = Counter(stage for _replica, stage in cells)
        shown = [(stage, f"S{stage}", f"{count} replicas") for stage, count in sorted(stages.items())]
    else:
        shown = [(stage, f"R{replica} S{stage}", _runs(ranks)) for (replica, stage), ranks in sorted(cells.items())]
    chips = "".join(
        f'<li style="--swatch:{PALETTE[stage % len(PALETTE)]}">{name} <small>{who}</small></li>'
        for stage, name, who in shown
    )
    return (
        f"<section><h3>{escape(drawn.names[box])}</h3><p>{escape(_said_of(cluster, box))}</p><ul>{chips}</ul></section>"
    )


def _said_of(cluster: Cluster, box: int) -> str:
    """What a box has: its nodes, or its speed."""
    if cluster.groups:
        group = cluster.groups[box]
        nodes = (
            f"{group.nodes} {'node' if group.nodes == 1 else 'nodes'} of {group.devices_per_node} x {group.device.name}"
        )
        return f"{nodes}, {group.inter.bandwidth_gbps:g} Gbit/s between them"
    if cluster.shaped is not None and (speed := cluster.shaped.speed(box)) < 1:
        return f"at {speed:.0%} of the others' speed"
    return f"{cluster.devices_per_node} x {cluster.device.name or 'device'}"


def _runs(ranks: list[int]) -> str:
    """Ranks in words: 4-7, or 0, 2, 5."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:_DRAWN])} and {len(names) - _DRAWN} more" if len(names) > _DRAWN else ", ".join(names)


def _drawing(drawn: PlacementMap) -> str:
    """The used boxes on a circle, joined by a line for sends and one for rings, as thick as they are many."""
    at = {box: _point(place, len(drawn.used)) for place, box in enumerate(drawn.used)}
    most = max((crossing.sends + sum(crossing.rings.values()) for crossing in drawn.crossings.values()), default=1)
    lines = "".join(
        _line(at[way[0]], at[way[1]], count, most, color, side)
        for way, crossing in drawn.crossings.items()
        for count, color, side in ((crossing.sends, _SENDS, -1), (sum(crossing.rings.values()), _RINGS, 1))
        if count
    )
    ranks = Counter(drawn.box_of)
    boxes = "".join(
        f'<circle cx="{x:.0f}" cy="{y:.0f}" r="15"/><text x="{x:.0f}" y="{y + 4.5:.0f}">{ranks[box]}</text>'
        f'<text x="{x:.0f}" y="{y + (30 if y > _HIGH / 2 - 20 else -21):.0f}">{escape(drawn.names[box])}</text>'
        for box, (x, y) in at.items()
    )
    return (
        f'<div><svg viewBox="0 0 {_WIDE} {_HIGH}" width="{_WIDE}" role="img" aria-label="{_HEADING}">'
        f"{lines}{boxes}</svg>"
        f'<ul class="legend"><li style="--swatch:{_SENDS}">sends between stages</li>'
        f'<li style="--swatch:{_RINGS}">rings of replicas and shards</li></ul></div>'
    )


def _point(place: int, of: int) -> tuple[float, float]:
    turn = 2 * pi * place / of - pi * (0.5 if of > 2 else 1)
    return _WIDE / 2 + cos(turn) * (_WIDE / 2 - 45), _HIGH / 2 - 10 + sin(turn) * (_HIGH / 2 - 40)


def _line(one: tuple[float, float], other: tuple[float, float], count: int, most: int, color: str, side: int) -> str:
    """A line beside the middle of the way, so that two of them show."""
    width = 1 + 7 * sqrt(count / most)
    across, up = other[0] - one[0], other[1] - one[1]
    length = sqrt(across**2 + up**2) or 1.0
    x, y = -up / length * side * 4.5, across / length * side * 4.5
    return (
        f'<line x1="{one[0] + x:.1f}" y1="{one[1] + y:.1f}" x2="{other[0] + x:.1f}" y2="{other[1] + y:.1f}" '
        f'stroke="{color}" stroke-width="{width:.1f}"/>'
    )
