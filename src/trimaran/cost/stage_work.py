"""What a rank of each pipeline stage does in one micro-batch, seconds, vectorised over layouts."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce

import numpy as np

from trimaran.cost.accumulation import accumulation_time
from trimaran.cost.case import Case
from trimaran.cost.grid import Floats, Ints, LayoutGrid, padded_vocab_of
from trimaran.cost.kernels import Kernels, LayerTime, Rates, rates, slowdowns
from trimaran.cost.measured_parts import MeasuredParts
from trimaran.cost.network import Group, Network, group
from trimaran.cost.pipeline.closed_form import slowest_rank
from trimaran.cost.pipeline.stage_times import StageTimes
from trimaran.cost.shapes import distinct_shapes, part_of
from trimaran.cost.tensor_sums import TensorSums
from trimaran.operators.ends import embedding_operator, head_operator
from trimaran.operators.layer import layer_operators
from trimaran.operators.modules import shares_again
from trimaran.operators.operator import Operator, Product


@dataclass(frozen=True)
class StageWork:
    """What layers and ends cost (arrays over layouts, seconds per micro-batch), and their parts on the slowest rank.

    `layers` that rank holds; `ends` and `tp_time` are its head and embedding, and its TP collectives.
    """

    times: StageTimes
    rate: Rates
    layers: Floats
    layer_forward: Floats
    layer_backward: Floats
    layer_recompute: Floats
    ends: Floats
    tp_time: Floats

    def scaled(self, filled: Floats) -> StageWork:
        """The mean over micro-batches of which the last is not full: each takes as long as it has sequences."""
        busy = ("layer_forward", "layer_backward", "layer_recompute", "ends", "tp_time")
        return replace(self, times=self.times.scaled(filled), **{name: getattr(self, name) * filled for name in busy})


def stage_work(case: Case, grid: LayoutGrid) -> StageWork:
    """What the stages do in one micro-batch."""
    model, stack = case.model, case.stack
    rate = rates(case, grid.precision, grid.devices)
    shapes = _Shapes(case, grid)
    layer = shapes.layer_time()
    embedding_forward, embedding_backward = shapes.time(shapes.embedding)
    head_forward, head_backward = shapes.head_time()
    forward, backward = layer.forward, layer.backward
    if not shapes.measured.has_layer:
        made = shapes.weight_gradients() if stack.fused_accumulation else np.zeros(len(grid))
        backward = backward + accumulation_time(case, grid, model.layer_parameters / grid.tp, rate, made)
    again = np.where(grid.chose("recompute", "full"), 1.0 / grid.recompute_every, 0.0)
    recompute = layer.forward_again * again
    network = Network(case.cluster, case.calibration)
    tensor_group = group(grid.tp, grid.stride("tp"), grid.devices, case.cluster)
    sums = TensorSums(stack, grid, shapes.inverse, network, tensor_group, shapes.product)
    tp_forward, tp_backward = sums.shown(shapes.layer)
    # A device that waits for its host does so while the collectives run, so only what is longer shows.
    tp_forward = np.maximum(tp_forward - layer.idle_forward, 0.0)
    tp_backward = np.maximum(tp_backward - layer.idle_backward, 0.0) + again * tp_forward
    for word, members in grid.partial_recomputes():
        recompute[members] = shapes.again(word)[members]
        tp_backward[members] += sums.seconds(shapes.summed_again(word), "forward")[members]
    embedding_sum, head_sum = sums.seconds([shapes.embedding], "forward"), sums.seconds([shapes.head], "backward")
    message = np.asarray(shapes.part.message)[shapes.inverse]
    held, arrives = _sends(case, grid, network, tensor_group, message)
    times = StageTimes(
        forward=forward + tp_forward,
        backward=backward + recompute + tp_backward,
        weight=0.5 * backward,
        first_forward=embedding_forward + embedding_sum,
        first_backward=embedding_backward,
        last_forward=head_forward,
        last_backward=head_backward + head_sum,
        send_held=held,
        send_arrives=arrives,
        blocks=stack.blocking_schedules,
        crowding=_crowding(case, grid, rate),
    )
    slowest, layers = slowest_rank(grid, times)
    # One stage is first and last at once.
    single = grid.pp == 1
    is_first, is_last = (slowest == 0) | single, slowest == 2
    embedding = embedding_forward + embedding_backward
    ends = np.where(is_first, embedding, 0.0) + np.where(is_last, head_forward + head_backward, 0.0)
    tp_time = layers * (tp_forward + tp_backward) + is_first * embedding_sum + is_last * head_sum
    work = StageWork(times, rate, layers, forward, backward, recompute, ends, tp_time)
    filled = grid.filled
    return work if np.all(filled >= 1.0) else work.scaled(filled)


class _Shapes:
    """The operators of each distinct shape of a grid, and their times on every layout."""

    def __init__(self, case: Case, grid: LayoutGrid) -> None:
        slots = _slots(case, grid)
        distinct_grid, self.inverse = distinct_shapes(grid, slots)
        self.part = part_of(case, distinct_grid)
        self.layer = layer_operators(self.part)
        self.embedding = embedding_operator(self.part)
        self.head = head_operator(self.part, padded_vocab_of(case.model, case.stack, distinct_grid.tp))
        self.measured = MeasuredParts(case)
        self._kernels = Kernels(case, rates(case, distinct_grid.precision, _slots(case, distinct_grid)))

    def layer_time(self) -> LayerTime:
        """Seconds of one layer, without communication."""
        layer = self.measured.layer(self.part, self._kernels.layer(self.layer, self._times))
        return LayerTime(**{field.name: getattr(layer, field.name)[self.inverse] for field in fields(LayerTime)})

    def head_time(self) -> tuple[Floats, Floats]:
        """Seconds of the head forward and backward, without launches."""
        forward, backward = self.measured.head(self.part, self._kernels.time(self.head))
        return forward[self.inverse], backward[self.inverse]

    def again(self, word: str) -> Floats:
        """Seconds of what a partial recompute runs again of one layer, without communication."""
        again = self.measured.of_forward(self.part, self._kernels.again(self.layer, self._times, word))
        return again[self.inverse]

    def summed_again(self, word: str) -> list[Operator]:
        """The operators that run again whole under a partial recompute, with their collectives."""
        if self.part.stack.selective_keeps and word == "selective":
            return []
        shares = shares_again(word, self.layer, self.part.stack)
        return [operator for operator, share in zip(self.layer, shares, strict=True) if share]

    @cached_property
    def _times(self) -> list[tuple[Floats, Floats]]:
        return [self._kernels.time(operator) for operator in self.layer]

    def time(self, operator: Operator) -> tuple[Floats, Floats]:
        """Seconds of one operator forward and backward, without launches."""
        forward, backward = self._kernels.time(operator)
        return forward[self.inverse], backward[self.inverse]

    def product(self, product: Product) -> Floats:
        """Seconds of one of a layer's linear products."""
        return self._kernels.product(product, self._kernels.rate.narrow)[self.inverse]

    def weight_gradients(self) -> Floats:
        """Seconds of a layer's products that make the gradients of its weights."""
        linear = [operator for operator in self.layer if operator.kernel == "linear" and operator.backward]
        return reduce(np.add, (self.product(operator.backward[1]) for operator in linear))


def _slots(case: Case, grid: LayoutGrid) -> Ints:
    """Ranks that work side by side on a machine's cores, or 1 where each has a device of its own."""
    cluster = case.cluster
    return np.minimum(grid.devices, cluster.devices_per_machine) if cluster.device.cores else np.ones_like(grid.tp)


def _crowding(case: Case, grid: LayoutGrid, rate: Rates) -> Floats:
    """How many times slower products are when all stages work at once than when one stage has the cores."""
    if not case.cluster.device.cores:
        return np.ones(len(grid))
    one_stage, _, _ = slowdowns(case.cluster, grid.devices // grid.pp)
    return np.maximum(1.0, rate.matmul_slowdown / one_stage)


def _sends(
    case: Case, grid: LayoutGrid, network: Network, tensor_group: Group, message: Floats
) -> tuple[Floats, Floats]:
    """Time a send between stages holds its link and takes to arrive.

    Sequence parallelism holds shards and sends them. Some stacks split what their tensor-parallel ranks all hold,
    send a part each and gather it on arrival: Megatron-LM under its interleaved schedule (Narayanan et al.,
    arXiv 2104.04473, section 4.1), DeepSpeed's pipeline engine always.
    """
    splits = grid.chose("schedule", *case.stack.splits_sends) & ~grid.sequence_parallel
    size = message / np.where(splits | grid.sequence_parallel, grid.tp, 1)
    stride, per_node = grid.stride("pp"), case.cluster.devices_per_node
    # Pipelines that fill nodes exactly stay inside them; any other has a replica that spans two.
    crosses = (grid.pp > 1) & (grid.devices > per_node) & (per_node % np.maximum(stride * grid.pp, 1) != 0)
    # All ranks of a node that sit next to a boundary send at once: those of one stage in it.
    rivals = np.minimum(np.minimum(stride, per_node), grid.devices).astype(np.float64)
    held, arrives = network.send(size, crosses, rivals)
    return held, arrives + np.where(splits, network.all_gather(message, tensor_group), 0.0)
