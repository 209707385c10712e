"""What a probe measured, read between its points: matmul rate by shape, collective time by size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trimaran.cost.grid import Floats
from trimaran.nouns.hardware.measured import AttentionTime, CollectiveTime, MatmulRate
from trimaran.nouns.precision import PRECISIONS, PROBED_RATES

# Squared distance within which points of a table blur into each other: what noise a reading carries is shared, or not.
BLURRED, EXACT = 0.01, 1e-6


class _Nearby:
    """Values known at points, read elsewhere with inverse-distance weights in the points' logarithms."""

    def __init__(self, points: Floats, values: Floats, blur: float) -> None:
        self._points, self._values, self._blur = np.log(points), np.log(values), blur

    def read(self, wanted: Floats) -> Floats:
        """Values (n, k) at `wanted` (n, dimensions)."""
        distance = ((np.log(wanted)[:, None, :] - self._points[None, :, :]) ** 2).sum(axis=2)
        weight = 1.0 / (distance + self._blur) ** 2
        return np.asarray(np.exp(weight @ self._values / weight.sum(axis=1, keepdims=True)))


class ByElement:
    """One table per element size; a size that was not measured reads the other's.

    Rows are (rate, coordinates, values), all positive. At its points an EXACT table reads what was measured there.
    """

    def __init__(self, rows: Sequence[tuple[str, tuple[float, ...], tuple[float, ...]]], blur: float = BLURRED) -> None:
        self._tables: dict[float, _Nearby] = {}
        for rate in PROBED_RATES:  # fp16 stands in for bf16 where only it is known
            element = PRECISIONS[rate].activation_bytes
            chosen = [(point, value) for name, point, value in rows if name == rate]
            if chosen and element not in self._tables:
                points, values = zip(*chosen, strict=True)
                self._tables[element] = _Nearby(
                    np.array(points, dtype=np.float64), np.array(values, dtype=np.float64), blur
                )

    def read(self, element: Floats, *coordinates: Floats | float) -> Floats:
        """Values (k, ...) at coordinates that broadcast against `element`."""
        shape = np.broadcast_shapes(np.shape(element), *(np.shape(x) for x in coordinates))
        wanted = np.stack(
            [np.broadcast_to(np.asarray(x, dtype=np.float64), shape).ravel() for x in coordinates], axis=1
        )
        sizes = np.broadcast_to(element, shape).ravel()
        out: Floats | None = None
        for size in np.unique(sizes):
            chosen = sizes == size
            table = self._tables.get(float(size)) or next(iter(self._tables.values()))
            values = table.read(wanted[chosen])
            out = np.empty((len(sizes), values.shape[1])) if out is None else out
            out[chosen] = values
        assert out is not None
        return np.moveaxis(out.reshape(*shape, -1), -1, 0)


class MatmulTable:
    """Matmul rate between measured shapes."""

    def __init__(self, points: Sequence[MatmulRate]) -> None:
        self._rates = ByElement([(p.precision, (p.m, p.n, p.k), (p.tflops * 1e12,)) for p in points])

    def rate(self, m: Floats | float, n: Floats | float, k: Floats | float, element: Floats) -> Floats:
        """Operations a second of an m x k times k x n product."""
        return np.asarray(self._rates.read(element, m, n, k)[0])


class AttentionTable:
    """Time of causal attention, from measured microseconds a batch, head, pair of positions and head dimension."""

    def __init__(self, points: Sequence[AttentionTime]) -> None:
        self._costs = ByElement(
            [
                (p.precision, (p.batch_heads, p.seq_len, p.head_dim), (p.forward_us / work, p.backward_us / work))
                for p in points
                for work in (float(p.batch_heads) * p.seq_len**2 * p.head_dim,)
            ]
        )

    def time(self, batch_heads: Floats, seq_len: float, head_dim: float, element: Floats) -> tuple[Floats, Floats]:
        """Seconds (forward, backward) over `batch_heads` sequences."""
        forward, backward = self._costs.read(element, batch_heads, seq_len, head_dim)
        work = batch_heads * seq_len**2 * head_dim * 1e-6
        return forward * work, backward * work


class CollectiveTable:
    """Time of one operation by bytes and ranks: a power of the bytes between two points, scaled beyond them."""

    def __init__(self, points: Sequence[CollectiveTime], op: str) -> None:
        ranks = sorted({point.ranks for point in points if point.op == op})
        self.ranks = np.array(ranks, dtype=np.float64)
        self._curves: list[tuple[Floats, Floats]] = []
        for count in ranks:
            curve = sorted((p.bytes, p.time_us * 1e-6) for p in points if p.op == op and p.ranks == count)
            sizes, times = np.array(curve, dtype=np.float64).T
            self._curves.append((sizes, times))

    def __bool__(self) -> bool:
        return bool(self._curves)

    def time(self, size: Floats, ranks: Floats) -> Floats:
        """Seconds for `size` bytes over `ranks` ranks, shape of the arguments broadcast."""
        size, ranks = np.broadcast_arrays(np.asarray(size, dtype=np.float64), np.asarray(ranks, dtype=np.float64))
        per_count = np.stack([_curve(size, sizes, times) for sizes, times in self._curves])
        position = np.interp(np.log(ranks), np.log(self.ranks), np.arange(len(self.ranks)))
        low = np.floor(position).astype(np.int64)
        high = np.minimum(low + 1, len(self.ranks) - 1)
        share = position - low
        lower = np.take_along_axis(per_count, low[None], axis=0)[0]
        upper = np.take_along_axis(per_count, high[None], axis=0)[0]
        # More ranks than were measured: time grows as the ranks do.
        beyond = np.maximum(1.0, ranks / self.ranks[-1])
        return np.asarray((lower * (1 - share) + upper * share) * beyond)


def _curve(size: Floats, sizes: Floats, times: Floats) -> Floats:
    """Piecewise linear in log-log; beyond the largest measured size, at its bandwidth."""
    inside = np.exp(np.interp(np.log(np.maximum(size, 1.0)), np.log(sizes), np.log(times)))
    return np.where(size > sizes[-1], times[-1] * size / sizes[-1], inside)
