"""What a trial may use, and how long it may be silent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of one trial. Times in seconds.

    In each phase of its start-up, and once its result is written, a rank may be silent for `start_s` (one that
    stands still as it starts up, stopped by a signal or a debugger, for `hang_s`). In between it hangs where it
    gives no sign for `hang_steps` times the longest gap so far, but at least `hang_s`; in the first step, times
    what a step is expected to take (`step_s`) or start-up took. When a rank has failed, the others get `peers_s` to
    follow by themselves. `memory_gib` bounds what all ranks of a machine hold together (None: what the machine
    has), and `log_mib` what one rank may print.
    """

    timeout_s: float = 600.0
    start_s: float = 180.0
    hang_steps: float = 3.0
    hang_s: float = 10.0
    step_s: float = 0.0
    peers_s: float = 3.0
    memory_gib: float | None = None
    log_mib: float = 64.0
