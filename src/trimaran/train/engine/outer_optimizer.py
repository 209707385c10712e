"""Local steps: replicas train apart for a round of steps, and agree by an outer optimizer at its end.

DiLoCo (Douillard et al., arXiv 2311.08105, algorithm 1): every replica makes H steps of its own (inner) optimizer from
the same weights; the mean over replicas of how far each has come, taken as a gradient, makes one step of SGD with
Nesterov's momentum on these weights, from which the next round begins. Inner optimizers keep their state.

Streaming DiLoCo (Douillard et al., arXiv 2501.18512) does so by fragments of the model's layers, in turns: of F of them
each still every H steps, one after the other H/F steps apart, so that what is sent at once is less. A sum may have
steps of delay to arrive, in which replicas train on; they then mix what they agree on with what they have.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, tensor
from torch.optim.sgd import sgd

from trimaran.layout.layout import Layout
from trimaran.recipe.train_settings import TrainSettings
from trimaran.train.comm.exchange import Finish
from trimaran.train.engine.copy_sums import CopySums
from trimaran.train.engine.flat_weights import FlatWeights
from trimaran.train.engine.units import OwnedSlice, owned_slices


class OuterOptimizer:
    """The outer optimizer of this rank's part of the weights.

    `weights` are those from which the round began, the same on all replicas, and `state` by name what else all of them
    hold alike: a tensor for each span of `FlatWeights.owned`, which may be written to, as a checkpoint does, once
    nothing is on its way (`settle`).
    """

    def __init__(
        self, flat: FlatWeights, sums: CopySums, layout: Layout, settings: TrainSettings, *, tied: bool
    ) -> None:
        self._flat, self._sums, self._settings = flat, sums, settings
        self._round, self._delay = layout.local_steps, layout.outer_delay
        fragments = [fragment_of(unit.name, layout.fragments, tied=tied) for unit in flat.units]
        self._units = [
            [unit for unit, of in zip(flat.units, fragments, strict=True) if of == fragment]
            for fragment in range(layout.fragments)
        ]
        self._parts = [owned_slices(flat.owned, (unit.owned for unit in units)) for units in self._units]
        self._on_the_way: dict[int, list[Finish]] = {}
        self.weights = tuple(master.clone() for master in flat.master)
        self.state: dict[str, tuple[Tensor, ...]] = {"outer_momentum": flat.zeros_like_owned()}
        # what is summed: how far replicas have come, where they do not wait for it apart from what they train on with
        self._learned = flat.master
        if self._delay:
            self._learned = self.state["outer_sum"] = flat.zeros_like_owned()

    def after(self, step: int) -> bool:
        """Step number `step` was made, the first being 1: whether master weights became others by it."""
        agreed = False
        for fragment in range(len(self._units)):
            if self._is_turn(fragment, step - self._delay) and self._delay:
                self._end(fragment)
                agreed = True
            if self._is_turn(fragment, step):
                self._begin(fragment)
                if not self._delay:
                    self._end(fragment)
                    agreed = True
        return agreed

    def agree(self) -> None:
        """Agree on all fragments at once."""
        for fragment in range(len(self._units)):
            self._begin(fragment)
            self._end(fragment)

    def settle(self) -> None:
        """Wait until all that is on its way is there; when weights become others by it stays as it is."""
        for finishes in self._on_the_way.values():
            for finish in finishes:
                finish()
        self._on_the_way.clear()

    def _is_turn(self, fragment: int, step: int) -> bool:
        """Whether the sum of a fragment begins behind a step."""
        return step > 0 and (step - fragment * self._round // len(self._units)) % self._round == 0

    def _of(self, fragment: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A fragment's parts of tensors of each owned span."""
        parts: tuple[OwnedSlice, ...] = self._parts[fragment]
        return [part.of(tensors) for part in parts]

    def _begin(self, fragment: int) -> None:
        """Begin to sum how far the replicas have come."""
        each = zip(*(self._of(fragment, of) for of in (self.weights, self._flat.master, self._learned)), strict=True)
        for begin, now, learned in each:
            if self._delay:
                learned.copy_(now)
            # without a delay the master weights hold it until all replicas' are summed
            learned.sub_(begin).neg_()
        flat, units = self._flat, self._units[fragment]
        self._on_the_way[fragment] = [self._sums.begin(unit, flat.owned_part(unit, self._learned)) for unit in units]

    def _end(self, fragment: int) -> None:
        """End a fragment's round: its master weights become what all replicas agree on, or move towards that."""
        for finish in self._on_the_way.pop(fragment, ()):
            finish()
        weights, learned = self._of(fragment, self.weights), self._of(fragment, self._learned)
        if not weights:
            return
        replicas = self._units[fragment][0].holders.copies.size
        sgd(
            weights,
            learned,
            [*self._of(fragment, self.state["outer_momentum"])],
            fused=True,
            grad_scale=tensor(float(replicas), device=learned[0].device),
            weight_decay=0.0,
            momentum=self._settings.outer_momentum,
            lr=self._settings.outer_learning_rate,
            dampening=0.0,
            nesterov=self._settings.outer_momentum > 0,
            maximize=False,
        )
        for begin, now in zip(weights, self._of(fragment, self._flat.master), strict=True):
            if self._delay:
                now.lerp_(begin, 1.0 - self._settings.outer_mixing)
            else:
                now.copy_(begin)


def fragment_of(unit: str, fragments: int, *, tied: bool) -> int:
    """The fragment that a unit is of: of layers in turns, so that each has some of every depth and of every stage.

    The embedding is of the first, and norm and head behind the layers are of the last; a tied head is the embedding.
    """
    first, *rest = unit.split(".")
    if first == "layers":
        return int(rest[0]) % fragments
    return 0 if tied or first.startswith("embedding") else fragments - 1
