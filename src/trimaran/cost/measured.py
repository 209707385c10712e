"""What a probe measured, read between its points: matmul rate by shape, collective time by size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trimaran.cluster import CollectiveTime, MatmulRate
from trimaran.cost.grid import Floats


class MatmulTable:
    """Matmul rate between measured shapes: inverse-distance weights in log (m, n, k)."""

    def __init__(self, points: Sequence[MatmulRate]) -> None:
        self._by_element: dict[float, tuple[Floats, Floats]] = {}
        for element, precisions in ((4.0, ("fp32",)), (2.0, ("bf16", "fp16"))):
            for precision in precisions:
                chosen = [point for point in points if point.precision == precision]
                if chosen:
                    shapes = np.log(np.array([(p.m, p.n, p.k) for p in chosen], dtype=np.float64))
                    self._by_element[element] = (shapes, np.log(np.array([p.tflops * 1e12 for p in chosen])))
                    break

    def rate(self, m: Floats | float, n: Floats | float, k: Floats | float, element: Floats) -> Floats:
        """Operations a second of an m x k times k x n product; a precision not measured uses the other's points."""
        shape = np.broadcast_shapes(*(np.shape(x) for x in (m, n, k, element)))
        wanted = np.stack([np.log(np.broadcast_to(x, shape)).ravel() for x in (m, n, k)], axis=1)
        out = np.empty(wanted.shape[0])
        elements = np.broadcast_to(element, shape).ravel()
        for size in np.unique(elements):
            shapes, log_rates = self._by_element.get(float(size)) or next(iter(self._by_element.values()))
            chosen = elements == size
            distance = ((wanted[chosen][:, None, :] - shapes[None, :, :]) ** 2).sum(axis=2)
            weight = 1.0 / (distance + 0.02) ** 2
            out[chosen] = np.exp((weight * log_rates).sum(axis=1) / weight.sum(axis=1))
        return out.reshape(shape)


class CollectiveTable:
    """Time of one operation by bytes and ranks: linear in bytes between points, scaled beyond them."""

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
