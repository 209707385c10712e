"""Measured parts: by how much a layer and a head that a probe ran whole differ from what their operators add up to.

A probe ran parts of the model on one rank of the cluster's own devices, in the stack's own software. At those shapes
the operators' times, as they are believed before any fit, are scaled so that they add up to what was measured:

    time = operators(shape, calibration) * measured(point) / operators(point, calibration before any fit)

Between and beyond the points the ratio is read from those nearby, by the logarithms of TP, micro-batch and sequence.
So contention between ranks, other shapes and what a fit teaches go on as the operators tell them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import reduce

import numpy as np

from trimaran.cost.calibration import resolve_calibration
from trimaran.cost.case import Case
from trimaran.cost.grid import Floats, padded_vocab_of
from trimaran.cost.kernels import Kernels, LayerTime, rates
from trimaran.cost.measured import EXACT, ByElement
from trimaran.cost.shapes import part_at
from trimaran.nouns.precision import PRECISIONS
from trimaran.nouns.probed_model import PART_NAMES, PartName, PartTime
from trimaran.operators.ends import head_operator
from trimaran.operators.layer import layer_operators
from trimaran.operators.operator import Part

# Seconds (forward, backward) of a part of a micro-batch, shape (n,) each.
Times = tuple[Floats, Floats]
INDEX = {name: index for index, name in enumerate(PRECISIONS)}


class MeasuredParts:
    """What was measured of the case's model in its stack, as ratios to what its operators add up to."""

    def __init__(self, case: Case) -> None:
        times = [t for name in PART_NAMES for t in case.cluster.part_times(name, case.model, case.stack.name)]
        tables = _tables(case.calibrated(resolve_calibration(case.cluster, case.stack)), times) if times else {}
        self._layer, self._head = tables.get("layer"), tables.get("head")

    @property
    def has_layer(self) -> bool:
        """Whether a layer was measured, and with it the sum of its gradients and those of earlier micro-batches."""
        return self._layer is not None

    @property
    def has_head(self) -> bool:
        """Whether a head was measured, and with it the sum of its gradients."""
        return self._head is not None

    def layer(self, part: Part, time: LayerTime) -> LayerTime:
        """A layer's time by its operators, made to agree with what was measured."""
        if self._layer is None:
            return time
        forward, backward = _read(self._layer, part)
        return LayerTime(
            forward=time.forward * forward,
            backward=time.backward * backward,
            forward_again=time.forward_again * forward,
            idle_forward=time.idle_forward * forward,
            idle_backward=time.idle_backward * backward,
        )

    def of_forward(self, part: Part, seconds: Floats) -> Floats:
        """Seconds of a part of a layer's forward, made to agree with what was measured of the whole."""
        return seconds if self._layer is None else seconds * _read(self._layer, part)[0]

    def head(self, part: Part, times: Times) -> Times:
        """The head's times by its operator, made to agree with what was measured of both together.

        The trainer makes the head's gradient along with its loss, in the forward.
        """
        if self._head is None:
            return times
        (ratio,) = _read(self._head, part)
        return times[0] * ratio, times[1] * ratio


def _read(table: ByElement, part: Part) -> Floats:
    """Ratios (k, n) for a rank's part of a micro-batch under each of n layouts."""
    return table.read(np.asarray(part.moved_element), part.tp, part.mbs, float(part.seq_len))


def _tables(case: Case, times: Sequence[PartTime]) -> dict[PartName, ByElement]:
    """Ratios of measured times to what the operators add up to, by element, TP, micro-batch and sequence."""
    rows = defaultdict(list)
    for seq_len in {time.seq_len for time in times}:
        points = [time for time in times if time.seq_len == seq_len]
        tp, mbs = (np.array([getattr(point, axis) for point in points]) for axis in ("tp", "mbs"))
        precision = np.array([INDEX[point.precision] for point in points])
        part = part_at(case, seq_len, tp, mbs, precision, sequence_parallel=False)
        kernels = Kernels(case, rates(case, precision, np.ones_like(tp), lone=True))
        operators = layer_operators(part)
        layer = kernels.layer(operators, [kernels.time(operator) for operator in operators])
        head = reduce(np.add, kernels.time(head_operator(part, padded_vocab_of(case.model, case.stack, tp))))
        for index, point in enumerate(points):
            forward, backward = point.forward_us * 1e-6, point.backward_us * 1e-6
            ratios: tuple[float, ...] = (forward / layer.forward[index], backward / layer.backward[index])
            if point.part == "head":
                ratios = ((forward + backward) / head[index],)
            rows[point.part].append((point.precision, (float(point.tp), float(point.mbs), float(seq_len)), ratios))
    return {name: ByElement(measured, EXACT) for name, measured in rows.items()}
