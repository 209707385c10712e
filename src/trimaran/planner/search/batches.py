"""Global batches near the one that was asked for."""

from __future__ import annotations

from trimaran.nouns.workload import Workload


def with_batch(workload: Workload, batch: int) -> Workload:
    """The workload under another global batch, which the caller knows to suit it."""
    return workload if batch == workload.global_batch else workload.model_copy(update={"global_batch": batch})


def batch_of(workload: Workload, per_step: int, tolerance: float) -> int:
    """The multiple of `per_step` nearest to the global batch, where it is within `tolerance` (relative).

    A ramp-up must still reach it. Without such a multiple the answer is the global batch itself, and
    the rules of trimaran.layout.rules then say what is wrong with it.
    """
    asked, ramp = workload.global_batch, workload.ramp_up
    nearest = round(asked / per_step) * per_step
    # Beyond as many steps as the increment has, the remainders repeat.
    reach = min(int(asked * tolerance) // per_step + 1, ramp.increment if ramp else 1)
    for distance in range(reach + 1):
        around = (nearest - distance * per_step, nearest + distance * per_step)
        for batch in sorted(around, key=lambda batch: abs(batch - asked)):
            if batch < 1 or abs(batch - asked) > asked * tolerance:
                continue
            if ramp is None or (batch >= ramp.start and (batch - ramp.start) % ramp.increment == 0):
                return batch
    return asked
