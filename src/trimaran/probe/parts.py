"""Whole parts of a model, forward and backward, in the trainer's own code on one rank: its layers and its head.

A rank of tensor parallelism is measured without the others: it holds its share of the weights, and the collectives
of its group do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby, product
from typing import Literal, get_args

import torch
from torch import Tensor

from trimaran.layout.layout import Layout
from trimaran.nouns.model import Model
from trimaran.nouns.precision import Rate
from trimaran.nouns.probed_model import PartName, PartTime
from trimaran.probe.probe_settings import PartCase, ProbeSettings
from trimaran.probe.timing import Timing
from trimaran.train.comm.group import Group
from trimaran.train.comm.mesh import lone_mesh
from trimaran.train.engine.flat_weights import FlatWeights, compute_dtype
from trimaran.train.model.autograd import Backward
from trimaran.train.model.gpt import Stage
from trimaran.train.model.weight import WeightSpec

# Layers in a row: their weights take turns in the caches, as those of a training do.
LAYERS = 2
# Share of a forward and backward that is the forward, at most, whatever a busy machine says: a layer's backward makes
# two products for each of its forward; the head makes its gradient along with the loss.
MOST_FORWARD: Mapping[PartName, float] = {"layer": 0.5, "head": 0.99}
_POOL = 1 << 20
Phase = Literal["forward", "both"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class SilentGroup(Group):
    """Ranks of which this one alone exists: it computes its share, and nothing is sent."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Leave this rank's part of the sum as it is."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """This rank's tensor in place of every rank's."""
        return [tensor] * self.size


TimedPart = tuple[Rate, PartCase, Phase]


def parts_timing(model: Model, settings: ProbeSettings, device: torch.device) -> Timing[TimedPart]:
    """Every part that the settings ask for, in every precision."""

    def preparing() -> Callable[[TimedPart], Callable[[], object]]:
        maker = PartMaker(model, device)

        def prepare(case: TimedPart) -> Callable[[], object]:
            run = maker.run(*case)
            run()  # a pass after another case finds cold caches, which a training's have warmed: 4 to 13% more
            return run

        return prepare

    cases: list[TimedPart] = [
        (precision, case, phase)
        for _, same in groupby(settings.parts, key=lambda case: (case.part, case.tp))
        for precision, case in product(settings.precisions, tuple(same))
        for phase in PHASES
    ]
    return Timing(cases, preparing, settings.rounds, device, settings.limit_s)


def part_times(seconds: Mapping[TimedPart, float], model: Model) -> tuple[PartTime, ...]:
    """Microseconds of every part that was timed, those that time ran out for left out.

    A backward is what forward and backward together take beyond a forward alone.
    """
    times = []
    for precision, case, phase in seconds:
        if phase == "forward" or (precision, case, "forward") not in seconds:
            continue
        both = seconds[precision, case, "both"]
        forward = min(seconds[precision, case, "forward"], MOST_FORWARD[case.part] * both)
        each = 1e6 / (layers_timed(model) if case.part == "layer" else 1)
        times.append(
            PartTime(
                **case.model_dump(), precision=precision, forward_us=forward * each, backward_us=(both - forward) * each
            )
        )
    return tuple(times)


def layers_timed(model: Model) -> int:
    """How many layers are timed in a row: of a mixture's those with experts."""
    return min(LAYERS, model.layers - model.dense_layers)


class PartMaker:
    """Makes what is timed. It holds the weights of one part at a time, so cases that share them belong together."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.model, self.device = model, device
        self.layers = layers_timed(model)
        self._pool = 0.02 * torch.randn(_POOL)
        self._held: tuple[PartName, Layout] | None = None

    def run(self, precision: Rate, case: PartCase, phase: Phase) -> Callable[[], object]:
        """One pass through the part: its forward, or its forward and backward."""
        layout = Layout(tp=case.tp, precision=precision)
        if self._held != (case.part, layout):
            self._held, self._stage = (case.part, layout), self.stage(case.part, layout)
        stage, shape = self._stage, (case.mbs, case.seq_len, self.model.hidden)
        x, dy = (torch.randn(shape, dtype=compute_dtype(layout), device=self.device) for _ in range(2))
        targets = torch.randint(self.model.vocab, shape[:2], device=self.device)

        def forward() -> Tensor:
            y: Tensor = stage(x.detach().requires_grad_(), 1)
            return y if case.part == "layer" else stage.loss(y, targets, 1.0 / targets.numel())

        if phase == "forward":
            return forward
        return lambda: Backward(forward()).run(dy if case.part == "layer" else None)

    def stage(self, part: PartName, layout: Layout) -> Stage:
        """A stage between others with the layers alone, or the last one with none: the final norm, head and loss."""
        # of a mixture's layers those with experts, which stand behind the dense ones
        split = (max(1, self.model.dense_layers), self.layers, 1) if part == "layer" else (1, 0)
        shares = SilentGroup(tuple(range(layout.tp)), 0, None)
        pipeline = SilentGroup(tuple(range(len(split))), 1, None)
        alone = lone_mesh()
        mesh = replace(
            alone,
            along={**alone.along, "tp": shares, "pp": pipeline},
            holders={**alone.holders, "dense": replace(alone.holders["dense"], cut=shares)},
            pp_returning=pipeline,
        )
        stage = Stage(self.model, layout, split, mesh)
        FlatWeights(stage, layout, mesh, self._initial, self.device)
        return stage

    def _initial(self, name: str, spec: WeightSpec) -> Tensor:
        """Values of a whole parameter, which repeat: drawing billions would take longer than what is measured."""
        full = torch.ones(spec.shape) if spec.init == "ones" else torch.zeros(spec.shape)
        if spec.init == "normal":
            flat = full.view(-1)
            for begin in range(0, len(flat), _POOL):
                end = min(begin + _POOL, len(flat))
                flat[begin:end] = self._pool[: end - begin]
        return full
