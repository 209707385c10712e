"""Traces: what PyTorch's profiler sees of a few steps, as a file that chrome://tracing and Perfetto open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

# The first steps make buffers and choose kernels.
WARM_UP_STEPS = 2


class Trace:
    """Profiles `steps` steps, from the third that this process makes on, and writes them to `path` once they are over.

    `running`: steps are being profiled. `alive` is called where the profiler is about to take its time.
    """

    def __init__(self, path: Path, steps: int, alive: Callable[[], None], *, on_gpu: bool) -> None:
        self._path, self._alive = path, alive
        self._left, self._steps = WARM_UP_STEPS, steps
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        # The first profiler of a process takes seconds to start on a busy machine, and no step has to wait for that:
        # between two steps so long a silence would be taken for a hang.
        with profile(activities=activities):
            pass
        self._profile = profile(activities=activities)
        self.running = False

    def before(self) -> None:
        """A step begins."""
        if self._left == 0 and not self.running and self._steps:
            self._alive()
            self._profile.start()
            self.running = True
        self._left = max(0, self._left - 1)

    def after(self) -> bool:
        """A step is over; whether it was the last that is to be profiled, which is then to be written down."""
        if self.running:
            self._steps -= 1
        return self.running and self._steps == 0

    def finish(self) -> None:
        """Write down what there is of the steps that are being profiled: seconds, for a million operators."""
        self._alive()
        self._profile.stop()
        self._alive()
        self._profile.export_chrome_trace(str(self._path))
        self.running = False
