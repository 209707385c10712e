"""Starts: structured placements that a search improves.

Groups are lined up so that neighbours have good links. Cells are then dealt out along that line in tiles: of all
replicas of a stage (data parallelism inside of groups, pipelines across), of single replicas (pipelines inside, data
parallelism across), and of all sizes in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from trimaran.cost.grid import Floats, Ints
from trimaran.cost.placed.topology import Topology
from trimaran.layout.layout import Layout
from trimaran.planner.placement.blocks import Blocks

# Lines of groups along which cells are dealt out: so many for what stages send, as many for what rings do.
LINES = 2


def starts(topology: Topology, blocks: Blocks, layout: Layout, message_bits: float, ring_bits: float) -> Iterator[Ints]:
    """Orders of all blocks, those of the cells first: the cluster's own, then tile by tile along lines of groups.

    `message_bits` go from stage to stage, `ring_bits` from replica to replica.
    """
    yield np.arange(len(blocks))
    cells = layout.dp * layout.pp
    sent = _lines(_send_seconds(topology, message_bits), closed=False)
    agreed = _lines(_send_seconds(topology, ring_bits), closed=True)
    for along in _choices(blocks, dict.fromkeys((*sent, *agreed)), cells):
        for replicas in (size for size in range(1, layout.dp + 1) if layout.dp % size == 0):
            order = np.empty(len(blocks), dtype=np.int64)
            order[tiled(layout.dp, layout.pp, replicas)] = along[:cells]
            order[cells:] = along[cells:]
            yield order


def _choices(blocks: Blocks, lines: Iterable[tuple[int, ...]], cells: int) -> Iterator[Ints]:
    """All blocks along each line and backwards, those for the cells first: the last stage has the head, the first not.

    Where more blocks are than cells, which are left out is a choice: the cells begin at every group in turn, as long as
    enough blocks follow.
    """
    for line in lines:
        for way in (line, line[::-1]):
            along = blocks.in_order(way)
            if len(blocks) == cells:
                yield along
                continue
            for begin in np.flatnonzero(np.diff(blocks.group[along], prepend=-1)).tolist():
                if len(blocks) - begin >= cells:
                    yield np.roll(along, -begin)


def _lines(seconds: Floats, *, closed: bool) -> list[tuple[int, ...]]:
    """The shortest lines of all groups, of those that begin at each of them; one that is another backwards left out."""
    lines = (line_up(seconds, first, closed=closed) for first in range(len(seconds)))
    each = dict.fromkeys(min(line, line[::-1]) for line in lines)
    return sorted(each, key=lambda line: _length(seconds, line, closed))[:LINES]


def tiled(replicas: int, stages: int, height: int) -> Ints:
    """Cells `replica * stages + stage` in the order of tiles of `height` replicas: stage by stage, there and back."""
    order = []
    for tile in range(replicas // height):
        walk = range(stages) if tile % 2 == 0 else range(stages - 1, -1, -1)
        order += [(tile * height + row) * stages + stage for stage in walk for row in range(height)]
    return np.array(order)


def line_up(seconds: Floats, first: int, *, closed: bool) -> tuple[int, ...]:
    """Groups from `first` on, each next to one near it: the nearest at first, then improved by turning parts around.

    Of a `closed` line the way from the last group back to the first counts too.
    """
    left, line = set(range(len(seconds))) - {first}, [first]
    while left:
        line.append(min(sorted(left), key=lambda group: float(seconds[line[-1], group])))
        left.discard(line[-1])
    least, better = _length(seconds, line, closed), True
    while better:
        better = False
        for begin in range(1, len(line) - 1):
            for end in range(begin + 2, len(line) + 1):
                turned = [*line[:begin], *reversed(line[begin:end]), *line[end:]]
                length = _length(seconds, turned, closed)
                if length < least:
                    line, least, better = turned, length, True
    return tuple(line)


def _length(seconds: Floats, line: Sequence[int], closed: bool) -> tuple[float, float]:
    """The slowest step of a line, which paces what passes along it, and the sum of all, each to nine digits."""
    steps = [float(seconds[one, other]) for one, other in pairwise([*line, *line[:closed]])]
    return float(f"{max(steps, default=0.0):.9g}"), float(f"{sum(steps):.9g}")


def _send_seconds(topology: Topology, message_bits: float) -> Floats:
    """Seconds of a send between nodes of each two groups, by the slower direction."""
    one_way = topology.delay_us * 1e-6 + message_bits / (np.maximum(topology.gbps, 1e-9) * 1e9)
    return np.asarray(np.maximum(one_way, one_way.T))
