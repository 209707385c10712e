"""Local steps: replicas train apart for a round of steps, and agree by an outer optimizer at its end.

DiLoCo (Douillard et al., arXiv 2311.08105, algorithm 1): every replica makes H steps of its own (inner) optimizer from
the same weights; the mean over replicas of how far each has come, taken as a gradient, makes one step of SGD with
Nesterov's momentum on these weights, from which the next round begins. Inner optimizers keep their state.
"""

from __future__ import annotations

from torch import Tensor, tensor
from torch.optim.sgd import sgd

from trimaran.recipe.train_settings import TrainSettings
from trimaran.train.engine.copy_sums import CopySums
from trimaran.train.engine.flat_weights import FlatWeights


class OuterOptimizer:
    """The outer optimizer of this rank's part of the weights.

    `weights` are those from which the round began, the same on all replicas, and `state` by name what else all of them
    hold alike: a tensor for each span of `FlatWeights.owned`, which may be written to, as a checkpoint does.
    """

    def __init__(self, flat: FlatWeights, sums: CopySums, settings: TrainSettings) -> None:
        self._flat, self._sums, self._settings = flat, sums, settings
        self.weights = tuple(master.clone() for master in flat.master)
        self.state: dict[str, tuple[Tensor, ...]] = {"outer_momentum": flat.zeros_like_owned()}

    def step(self) -> None:
        """End a round: all replicas' master weights become what they agree on."""
        flat = self._flat
        # the master weights hold how far they have come until all replicas' are summed
        for begin, now in zip(self.weights, flat.master, strict=True):
            now.sub_(begin).neg_()
        finishes = [self._sums.begin(unit, flat.owned_part(unit, flat.master)) for unit in flat.units]
        for finish in finishes:
            finish()
        replicas = flat.units[0].holders.copies.size
        moved = list(flat.master)
        sgd(
            list(self.weights),
            moved,
            list(self.state["outer_momentum"]),
            fused=True,
            grad_scale=tensor(float(replicas), device=moved[0].device),
            weight_decay=0.0,
            momentum=self._settings.outer_momentum,
            lr=self._settings.outer_learning_rate,
            dampening=0.0,
            nesterov=self._settings.outer_momentum > 0,
            maximize=False,
        )
        for begin, now in zip(self.weights, flat.master, strict=True):
            now.copy_(begin)
