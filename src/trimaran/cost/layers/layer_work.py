"""What one layer of a kind costs in one micro-batch, seconds, vectorised over layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.grid import Bools, Floats, Ints, LayoutGrid, padded_vocab_of
from trimaran.cost.kernels import Kernels, LayerTime, Rates, rates, recomputed
from trimaran.cost.layers.accumulation import accumulation_time, is_fused
from trimaran.cost.layers.context_traffic import ContextTraffic
from trimaran.cost.layers.exchange import Exchanges
from trimaran.cost.layers.tensor_sums import TensorSums
from trimaran.cost.measured_parts import MeasuredParts
from trimaran.cost.memory.stage import rank_expert_parameters, rank_layer_parameters
from trimaran.cost.shapes import distinct_shapes, part_of, shares_sequences
from trimaran.cost.states import GRADIENTS, expert_shards, recomputed_share, shards
from trimaran.nouns.model import LayerKind
from trimaran.operators.ends import embedding_operator, head_operator
from trimaran.operators.further_token import joining_operators
from trimaran.operators.layer import first_block, second_block
from trimaran.operators.mixture import GROUPED
from trimaran.operators.modules import shares_again
from trimaran.operators.operator import BY_WEIGHTS, Operator, Part, Product


@dataclass(frozen=True)
class LayerWork:
    """Seconds of one layer for one micro-batch: arrays over layouts.

    `forward`, `backward` and what `recompute` adds without communication; what shows of its sums over TP, of its
    exchanges of tokens over EP and of keys and values over CP. `weight` is the part of `backward` that makes weights'
    gradients, and adds them to earlier ones.
    """

    forward: Floats
    backward: Floats
    recompute: Floats
    tp_forward: Floats
    tp_backward: Floats
    ep_forward: Floats | float = 0.0
    ep_backward: Floats | float = 0.0
    cp_forward: Floats | float = 0.0
    cp_backward: Floats | float = 0.0
    weight: Floats | float = 0.0

    @property
    def once(self) -> Floats:
        """Forward and backward, nothing made again."""
        return self.forward + self.backward

    @property
    def tp(self) -> Floats:
        """Sums over TP of both phases."""
        return self.tp_forward + self.tp_backward

    @property
    def ep(self) -> Floats | float:
        """Exchanges of tokens of both phases."""
        return self.ep_forward + self.ep_backward

    @property
    def cp(self) -> Floats | float:
        """Exchanges of keys and values of both phases."""
        return self.cp_forward + self.cp_backward

    @property
    def busy_forward(self) -> Floats:
        """All that keeps a rank busy forward."""
        return self.forward + self.tp_forward + self.ep_forward + self.cp_forward

    @property
    def busy_backward(self) -> Floats:
        """All that keeps a rank busy backward."""
        return self.backward + self.recompute + self.tp_backward + self.ep_backward + self.cp_backward

    def take(self, rows: Ints) -> LayerWork:
        """Those of the layouts at `rows`."""
        seconds = {field.name: getattr(self, field.name) for field in fields(self)}
        return LayerWork(**{name: np.asarray(each)[rows] if np.ndim(each) else each for name, each in seconds.items()})

    def paced(self, factor: Floats) -> LayerWork:
        """The same where what ranks compute takes `factor` as long, shape (n,)."""
        computed = {name: getattr(self, name) * factor for name in ("forward", "backward", "recompute", "weight")}
        return replace(self, **computed)

    def mixed(self, other: LayerWork, share: float) -> LayerWork:
        """The mean layer where so large a share is of this kind, and the rest of another."""
        both = {field.name: (getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        return LayerWork(**{name: share * own + (1.0 - share) * others for name, (own, others) in both.items()})

    def scaled(self, share: Floats) -> LayerWork:
        """All of it times a share, shape (n,)."""
        return LayerWork(**{field.name: getattr(self, field.name) * share for field in fields(self)})


def layer_work(
    case: Case, grid: LayoutGrid, shapes: Shapes, sums: TensorSums, rate: Rates, kind: LayerKind
) -> LayerWork:
    """What a layer of a kind costs under each layout."""
    operators = shapes.layer(kind)
    time = shapes.layer_time(kind)
    weight = time.backward * shapes.weight_share(kind)
    if not shapes.measured.has_layer:
        computed = time.backward
        time = _accumulating(time, _accumulation(case, grid, shapes, rate, kind), is_fused(case, grid))
        weight = weight + (time.backward - computed)
    again = recomputed_share(case.stack, grid)
    recompute = time.forward_again * again
    tp_forward, tp_backward = sums.shown(operators)
    # A device that waits for its host does so while the collectives run, so only what is longer shows.
    shown_forward = np.maximum(tp_forward - time.idle_forward, 0.0)
    summed_once = sums.seconds_of_last(operators[recomputed(operators) :]) if case.stack.recompute_stops_early else 0.0
    shown_again = np.maximum(tp_forward - summed_once - time.idle_forward, 0.0)
    shown_backward = np.maximum(tp_backward - time.idle_backward, 0.0) + again * shown_again
    ep_forward: Floats | float = 0.0
    ep_backward: Floats | float = 0.0
    idle_forward = np.maximum(time.idle_forward - tp_forward, 0.0)
    idle_backward = np.maximum(time.idle_backward - tp_backward, 0.0)
    exchanges = Exchanges(case, grid, shapes.inverse) if kind == "experts" else None
    if exchanges is not None:
        sent_forward, sent_backward = (exchanges.seconds(operators, phase) for phase in ("forward", "backward"))
        ep_forward = np.maximum(sent_forward - idle_forward, 0.0)
        ep_backward = np.maximum(sent_backward - idle_backward, 0.0) + again * ep_forward
        idle_forward = np.maximum(idle_forward - sent_forward, 0.0)
        idle_backward = np.maximum(idle_backward - sent_backward, 0.0)
    for word, members in grid.partial_recomputes():
        recompute[members] = shapes.again(word, kind)[members]
        summed = shapes.summed_again(word, kind)
        shown_backward[members] += sums.seconds(summed, "forward")[members]
        if word == "selective":
            idle_again = time.idle_forward * recompute / time.forward
            gathers = np.maximum(sums.seconds(operators, "recompute") - idle_again, 0.0)
            shown_backward[members] += gathers[members]
        if exchanges is not None:
            ep_backward = ep_backward + np.zeros(len(grid))
            ep_backward[members] += exchanges.seconds(summed, "forward")[members]
    idle = idle_forward, idle_backward
    cp_forward, cp_backward = (
        _context_traffic(case, grid, shapes, kind, again, idle) if shares_sequences(grid) else (0.0, 0.0)
    )
    shown = shown_forward, shown_backward, ep_forward, ep_backward, cp_forward, cp_backward
    return LayerWork(time.forward, time.backward, recompute, *shown, weight)


def _accumulating(time: LayerTime, added: Floats, fused: Bools) -> LayerTime:
    """The layer's time with `added` seconds in its backward.

    They are free where products add while the device waits for its host, which launches a pass of its own as well.
    """
    free = np.where(fused, np.minimum(added, time.idle_backward), 0.0)
    return replace(time, backward=time.backward + added - free, idle_backward=time.idle_backward - free)


def _context_traffic(
    case: Case, grid: LayoutGrid, shapes: Shapes, kind: LayerKind, again: Floats, idle: tuple[Floats, Floats]
) -> tuple[Floats, Floats]:
    """Seconds of a layer's exchanges over CP that show, forward and backward, with those of what is made again.

    `idle` are the seconds of each phase in which the device still waits for its host, and exchanges go on.
    """
    operators = shapes.layer(kind)
    traffic = ContextTraffic(case, grid, shapes.inverse, shapes.time)
    forward = np.maximum(traffic.shown(operators, "forward") - idle[0], 0.0)
    backward = np.maximum(traffic.shown(operators, "backward") - idle[1], 0.0) + again * forward
    for word, members in grid.partial_recomputes():
        backward[members] += traffic.shown(shapes.summed_again(word, kind), "forward")[members]
    return forward, backward


def _accumulation(case: Case, grid: LayoutGrid, shapes: Shapes, rate: Rates, kind: LayerKind) -> Floats:
    """Seconds of adding a layer's gradients to those of earlier micro-batches; experts' beside their own products."""
    none = np.zeros(len(grid))
    fused = case.stack.fused_accumulation != "never"
    made = shapes.weight_gradients(kind, experts=False) if fused else none
    added = rank_layer_parameters(case.model, grid, kind) / shards(grid, GRADIENTS)
    seconds = accumulation_time(case, grid, added, rate, made)
    if kind == "experts":
        made = shapes.weight_gradients(kind, experts=True) if fused else none
        added = rank_expert_parameters(case.model, grid) / expert_shards(grid, GRADIENTS)
        seconds = seconds + accumulation_time(case, grid, added, rate, made)
    return seconds


def _on_shared_cores(case: Case, part: Part, rate: Rates) -> Part:
    """The part with the load of experts that it works as long as, where ranks share cores; what is sent stays.

    All ranks along EP are held back by each other until the others have done theirs, (ep - load) / (ep - 1) of the mean
    each if they are alike; the busiest then has a core to itself.
    """
    load = case.workload.expert_load
    if not case.cluster.device.cores or not case.model.experts or load == 1.0:
        return part
    others = (part.ep - load) / np.maximum(np.asarray(part.ep) - 1.0, 1.0)
    alone = np.maximum(others + (load - others) / rate.matmul_slowdown, 1.0)
    return replace(part, load=np.where(np.asarray(part.ep) > 1.0, alone, load))


class Shapes:
    """The operators of each distinct shape of a grid, and their times on every layout.

    `slots_of` says how many ranks share a machine's cores under each layout.
    """

    def __init__(self, case: Case, grid: LayoutGrid, slots_of: Callable[[Case, LayoutGrid], Floats]) -> None:
        lone = (grid.lone.astype(np.int64),) if case.stack.gathers_beside_products else ()
        distinct_grid, self.inverse = distinct_shapes(case, grid, slots_of(case, grid).view(np.int64), *lone)
        rate = rates(case, distinct_grid.precision, slots_of(case, distinct_grid), distinct_grid.lone)
        self.part = part_of(case, distinct_grid)
        self._at_work = _on_shared_cores(case, self.part, rate)
        self.embedding = embedding_operator(self.part)
        self.head = head_operator(self.part, padded_vocab_of(case.model, case.stack, distinct_grid.tp))
        self.measured = MeasuredParts(case)
        self._kernels = Kernels(case, rate)
        self._attention = first_block(self.part)
        self._layers: dict[LayerKind, tuple[Operator, ...]] = {}
        self._worked: dict[LayerKind, tuple[Operator, ...]] = {}
        self._times: dict[int, tuple[Floats, Floats]] = {}

    def layer(self, kind: LayerKind) -> tuple[Operator, ...]:
        """The operators of a layer of a kind."""
        if kind not in self._layers:
            self._layers[kind] = (*self._attention, *second_block(self.part, kind))
        return self._layers[kind]

    def _work(self, kind: LayerKind) -> tuple[Operator, ...]:
        """The same, as long as they keep a rank at work: what is sent of them is not to be read here."""
        if self._at_work is self.part:
            return self.layer(kind)
        if kind not in self._worked:
            self._worked[kind] = (*self._attention, *second_block(self._at_work, kind))
        return self._worked[kind]

    def layer_time(self, kind: LayerKind) -> LayerTime:
        """Seconds of one layer, without communication."""
        layer = self.measured.layer(self.part, self._kernels.layer(self._work(kind), self._of_layer(kind)))
        return LayerTime(**{field.name: getattr(layer, field.name)[self.inverse] for field in fields(LayerTime)})

    def head_time(self) -> tuple[Floats, Floats]:
        """Seconds of the head forward and backward, without launches."""
        forward, backward = self.measured.head(self.part, self._kernels.time(self.head))
        return forward[self.inverse], backward[self.inverse]

    @cached_property
    def joining(self) -> tuple[Operator, ...]:
        """The operators of a module for a further token around its layer."""
        return joining_operators(self.part)

    def again(self, word: str, kind: LayerKind) -> Floats:
        """Seconds of what a partial recompute runs again of one layer, without communication."""
        seconds = self._kernels.again(self._work(kind), self._of_layer(kind), word)
        return self.measured.of_forward(self.part, seconds)[self.inverse]

    def summed_again(self, word: str, kind: LayerKind) -> list[Operator]:
        """The operators that run again whole under a partial recompute, with their collectives."""
        if self.part.stack.selective_keeps and word == "selective":
            return []
        shares = shares_again(word, self.layer(kind), self.part.stack)
        return [operator for operator, share in zip(self.layer(kind), shares, strict=True) if share]

    def _of_layer(self, kind: LayerKind) -> list[tuple[Floats, Floats]]:
        for operator in self._work(kind):
            if id(operator) not in self._times:
                self._times[id(operator)] = self._kernels.time(operator)
        return [self._times[id(operator)] for operator in self._work(kind)]

    def time(self, operator: Operator) -> tuple[Floats, Floats]:
        """Seconds of one operator forward and backward, without launches."""
        forward, backward = self._kernels.time(operator)
        return forward[self.inverse], backward[self.inverse]

    def product(self, product: Product) -> Floats:
        """Seconds of one of a layer's linear products."""
        return self._kernels.product(product, self._kernels.rate.narrow)[self.inverse]

    def weight_gradient(self, operator: Operator) -> Floats:
        """Seconds of the product that makes the gradient of an operator's weights."""
        return self._kernels.weight_gradient(operator)[self.inverse]

    def weight_gradients(self, kind: LayerKind, *, experts: bool) -> Floats:
        """Seconds of a layer's products that make the gradients of its weights: of routed experts, or of the rest."""
        linear = [o for o in self._work(kind) if o.kernel in BY_WEIGHTS and o.backward]
        chosen = [o for o in linear if (o.name in GROUPED) == experts]
        return reduce(np.add, map(self._kernels.weight_gradient, chosen))[self.inverse]

    def weight_share(self, kind: LayerKind) -> Floats:
        """Share that all of these have of what a layer's backward computes."""
        backward = reduce(np.add, (there for _, there in self._of_layer(kind)))
        made = self.weight_gradients(kind, experts=False)
        if kind == "experts":
            made = made + self.weight_gradients(kind, experts=True)
        return made / backward[self.inverse]
