"""Scale: a published table's layouts on one small machine, mapped down by a stated rule.

What differs between the rows of a table is kept, its sizes are not:

* **Degrees.** One divisor for each of DP, TP and PP, the same in every row of the table: those under which every row
  has at most MOST_RANKS ranks, as many rows as can be stay different, what is parallel stays so, and degrees are large.
* **Model.** Layers, hidden size and heads keep their proportions between the rows; the largest has MOST_LAYERS
  layers, hidden size HIDDEN and MOST_HEADS heads, rounded so that TP divides the heads and the heads the hidden size.
* **Batch.** Micro-batches keep their proportions, MOST_MBS at most; the global batch is the least multiple of every
  row's DP x micro-batch that gives each replica LEAST_MICRO_BATCHES, and keeps its proportion where a table varies it.
* **Precision.** 16 bit runs as bf16 with fp32 master weights, since a CPU has no fp16 units; fp32 stays.
* **Network.** A shaped network keeps its delay; its rate is divided as the activations that cross it are.
* ZeRO stage, recompute, schedule and data-parallel kind stay as published; environment and clock are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from trimaran.layout.axes import devices_of
from trimaran.layout.layout import Layout
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.shaped_network import ShapedNetwork
from trimaran.nouns.workload import Workload

MOST_RANKS = 8
MOST_LAYERS = 8
HIDDEN = 128
MOST_HEADS = 16
MOST_MBS = 4
LEAST_MICRO_BATCHES = 4
SEQ_LEN = 64
# 256 bytes and the end of a document
VOCAB = 257
# Global batches this close are one: 2040, 2046 and 2048 differ for their divisors' sake.
SAME_BATCH = 0.05

Degrees = tuple[int, int, int]


@dataclass(frozen=True)
class SmallRow:
    """A published row and what stands for it on the small machine."""

    published: Measurement
    workload: Workload
    layout: Layout
    network: ShapedNetwork | None


def small_rows(rows: Sequence[Measurement]) -> list[SmallRow]:
    """Every row of one published table, mapped down. Raises TrimaranError for a row that names no degrees."""
    published = [_degrees(row) for row in rows]
    divisors = best_divisors(published)
    degrees = [divided(row, divisors) for row in published]
    mbs = _in_proportion([row.mbs for row in rows], MOST_MBS)
    batches = _batches([row.gbs for row in rows], [dp * size for (dp, _, _), size in zip(degrees, mbs, strict=True)])
    most_layers, most_hidden = max(row.layers for row in rows), max(row.hidden for row in rows)
    most_heads = max(row.heads for row in rows)
    out = []
    for row, (dp, tp, pp), size, batch in zip(rows, degrees, mbs, batches, strict=True):
        heads = tp * max(1, round(min(MOST_HEADS, most_heads) * row.heads / most_heads / tp))
        # an even head dimension
        hidden = 2 * heads * max(1, round(HIDDEN * row.hidden / most_hidden / (2 * heads)))
        model = Model(
            name=f"{row.layers}x{row.hidden}, small",
            layers=max(pp, round(MOST_LAYERS * row.layers / most_layers)),
            hidden=hidden,
            heads=heads,
            ffn_hidden=4 * hidden,
            vocab=VOCAB,
            max_positions=SEQ_LEN,
        )
        workload = Workload(model=model, seq_len=SEQ_LEN, global_batch=batch)
        layout = Layout(
            dp=dp,
            tp=tp,
            pp=pp,
            mbs=size,
            zero_stage=row.zero_stage if dp > 1 else 0,
            dp_kind=row.dp_kind if dp > 1 else "all_reduce",
            recompute="none" if row.recompute == "unknown" else row.recompute,
            precision="fp32" if row.precision == "fp32" else "bf16",
            schedule=("1f1b" if row.schedule == "none" else row.schedule) if pp > 1 else "none",
        )
        out.append(SmallRow(row, workload, layout, _network(row, size * SEQ_LEN * hidden)))
    return out


def best_divisors(degrees: Sequence[Degrees]) -> Degrees:
    """One divisor an axis: every row fits into MOST_RANKS, most rows stay different, degrees stay large."""
    dps, tps, pps = (range(1, max(row[axis] for row in degrees) + 1) for axis in range(3))
    best: tuple[tuple[int, int, int, int], Degrees] | None = None
    for divisors in product(dps, tps, pps):
        small = [divided(row, divisors) for row in degrees]
        if max(map(math.prod, small)) > MOST_RANKS:
            continue
        parallel = sum(degree > 1 for row in small for degree in row)
        worth = (len(set(small)), parallel, sum(map(math.prod, small)), -sum(divisors))
        if best is None or worth > best[0]:
            best = (worth, divisors)
    assert best is not None, "divided by themselves, all degrees are 1"
    return best[1]


def divided(degrees: Degrees, divisors: Degrees) -> Degrees:
    """Each degree over its divisor, rounded, at least 1."""
    dp, tp, pp = (max(1, round(degree / divisor)) for degree, divisor in zip(degrees, divisors, strict=True))
    return dp, tp, pp


def _degrees(row: Measurement) -> Degrees:
    tp, pp = row.tp or 1, row.pp or 1
    if row.dp is not None:
        return row.dp, tp, pp
    of_replica = devices_of(vars(row), without="dp")
    if row.devices is None or row.devices % of_replica:
        raise TrimaranError(f"{row.table} row {row.row} states no dp, and its devices do not give it: leave it out")
    return row.devices // of_replica, tp, pp


def _in_proportion(sizes: Sequence[int], most: int) -> list[int]:
    largest = max(sizes)
    return list(sizes) if largest <= most else [max(1, round(size * most / largest)) for size in sizes]


def _batches(published: Sequence[int], units: Sequence[int]) -> list[int]:
    """Global batches in the proportions published, each a multiple of its row's DP x micro-batch."""
    common = math.lcm(*units)
    whole = common * math.ceil(LEAST_MICRO_BATCHES * max(units) / common)
    largest = max(published)
    out = []
    for batch, unit in zip(published, units, strict=True):
        share = batch / largest
        wanted = whole if share > 1 - SAME_BATCH else whole * share
        out.append(unit * max(1, round(wanted / unit)))
    return out


def _network(row: Measurement, small_elements: int) -> ShapedNetwork | None:
    """The row's network, its rate divided as the activations of a micro-batch are."""
    if row.network_delay_ms is None or row.network_gbps is None:
        return None
    return ShapedNetwork(
        name=f"{row.network_delay_ms:g}ms-{row.network_gbps:g}gbps",
        latency_ms=row.network_delay_ms,
        bandwidth_gbps=row.network_gbps,
        scale=max(1.0, round(row.mbs * row.seq_len * row.hidden / small_elements)),
    )
