"""Dynamic loss scaling, which keeps fp16 gradients within the range of fp16."""

from __future__ import annotations

import math

from trimaran.nouns.precision import PRECISIONS, PrecisionName

# as torch.amp.GradScaler has it
GROWTH_INTERVAL = 2000


def initial_scale(tokens_per_step: int) -> float:
    """A power of two under which the gradient of a token's loss begins at 4 to 8.

    GradScaler's 65536 does the same in micro-batches of 8 to 16 thousand tokens. Here the mean is over the whole
    step, not over a micro-batch, so the scale has to follow the tokens of a step.
    """
    return 2.0 ** (2 + math.ceil(math.log2(tokens_per_step)))


class LossScale:
    """What the loss is multiplied by before the backward (Micikevicius et al., arXiv 1710.03740, section 3.2).

    It is halved by a step whose gradients overflowed, which is skipped, and doubled after `GROWTH_INTERVAL` steps
    in a row that did not. Without loss scaling it is always 1. `scale` and `good_steps` are all its state.
    """

    def __init__(self, precision: PrecisionName, tokens_per_step: int) -> None:
        self._dynamic = PRECISIONS[precision].loss_scaling
        self.scale = initial_scale(tokens_per_step) if self._dynamic else 1.0
        self.good_steps = 0

    def update(self, *, overflow: bool) -> None:
        """Adjust the scale after a step whose gradients overflowed, or did not."""
        if not self._dynamic:
            return
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.scale = max(1.0, self.scale / 2)
        elif self.good_steps == GROWTH_INTERVAL:
            self.scale *= 2
            self.good_steps = 0

    def counts(self) -> dict[str, float]:
        """Its state, as a checkpoint keeps it."""
        return {"loss_scale": self.scale, "good_steps": self.good_steps} if self._dynamic else {}

    def go_on_from(self, counts: dict[str, float]) -> None:
        """Restore the state where there is one: a training may go on in another precision."""
        if self._dynamic and "loss_scale" in counts:
            self.scale, self.good_steps = counts["loss_scale"], round(counts["good_steps"])
