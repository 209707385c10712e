"""Bad steps: a loss or gradient that is not finite, or a loss that leaps up."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from trimaran.recipe.train_settings import TrainSettings

# The standard deviation of a normal distribution, as a multiple of its median absolute deviation: 1 / Phi^-1(3/4).
SIGMA_OF_MAD = 1.4826


class Losses:
    """The losses of the last good steps, by which a leap is told.

    All ranks see the same losses, so that all judge alike. `recent` is what a checkpoint has to keep of them, oldest
    first; it may be put in place.
    """

    def __init__(self, settings: TrainSettings) -> None:
        self._sigmas, self._steps = settings.spike_sigmas, settings.spike_steps
        self._recent: deque[float] = deque(maxlen=settings.spike_steps if settings.spike_sigmas else 0)

    @property
    def recent(self) -> tuple[float, ...]:
        """Nats a token of the last good steps."""
        return tuple(self._recent)

    @recent.setter
    def recent(self, losses: Sequence[float]) -> None:
        self._recent.clear()
        self._recent.extend(losses)

    def judge(self, loss: float, grad_norm: float | None) -> str | None:
        """Why a step is bad, in words; None where it is good, which is remembered. `grad_norm` None: not judged.

        A leap is a loss above the median of the last good steps by more than `spike_sigmas` of their sigma, which is
        that of their median absolute deviation: single losses that stand out do not move it. It is told once there
        are as many good steps as `spike_steps`.
        """
        if not math.isfinite(loss):
            return f"the loss is not finite: {loss}"
        if grad_norm is not None and not math.isfinite(grad_norm):
            return f"the gradient's norm is not finite: {grad_norm}"
        if self._sigmas and len(self._recent) == self._steps:
            median = statistics.median(self._recent)
            sigma = SIGMA_OF_MAD * statistics.median(abs(one - median) for one in self._recent)
            if loss > median + self._sigmas * sigma:
                times = f"{(loss - median) / sigma:.1f} sigmas" if sigma else f"{loss - median:.4g}"
                return f"the loss is {loss:.4g}, {times} above {median:.4g}, the median of {self._steps} steps"
        self._recent.append(loss)
        return None
