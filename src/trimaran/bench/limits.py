"""What a trial may use, and how long it may be silent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of one trial. Times in seconds.

    Before its first step, and once its result is written, a trial may be silent for `start_s`.
    In between it hangs where a rank gives no sign for `hang_steps` times the longest gap so far,
    but at least `hang_s`. When a rank has failed, the others get `peers_s` to follow by themselves.
    `memory_gib` bounds what all ranks on this machine hold together (None: what the machine has),
    and `log_mib` what one rank may print.
    """

    timeout_s: float = 600.0
    start_s: float = 180.0
    hang_steps: float = 3.0
    hang_s: float = 10.0
    peers_s: float = 3.0
    memory_gib: float | None = None
    log_mib: float = 64.0
