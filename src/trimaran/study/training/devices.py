"""Which of a cluster's devices a training may use: one whose rank fails again and again is left out for a while."""

from __future__ import annotations

import time
from dataclasses import dataclass

# A device that was left out is tried again after so long, and after twice as long each time that it fails again.
RETURNS_AFTER_S = 3600.0


@dataclass
class _LeftOut:
    returns_at: float
    after_s: float


class Devices:
    """The devices of a cluster, by number from 0 on, and those of them that are left out."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._left_out: dict[int, _LeftOut] = {}

    def usable(self) -> tuple[int, ...]:
        """Numbers of the devices that ranks may use, in order: rank 0 is on the first of them."""
        return tuple(device for device in range(self._count) if not self._is_out(device))

    def leave_out(self, device: int) -> None:
        """Use a device no more, until its time has come."""
        before = self._left_out.get(device)
        after_s = RETURNS_AFTER_S if before is None else 2 * before.after_s
        self._left_out[device] = _LeftOut(time.monotonic() + after_s, after_s)

    def _is_out(self, device: int) -> bool:
        left_out = self._left_out.get(device)
        return left_out is not None and time.monotonic() < left_out.returns_at
