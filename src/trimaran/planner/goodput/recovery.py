"""What a training has measured of its own faults takes the place of what a plan would assume of them."""

from __future__ import annotations

from trimaran.nouns.faults import Faults
from trimaran.nouns.noun import Noun


class Recovery(Noun):
    """Medians in seconds, over so many restarts and checkpoints of the training that `source` tells of; None: no such.

    A restart lasts from when a fault was noticed to the next step, what was waited for nodes left out; it includes
    reading the checkpoint.
    """

    source: str
    restarts: int = 0
    detect_s: float | None = None
    restart_s: float | None = None
    saves: int = 0
    save_s: float | None = None


def with_measured(faults: Faults, recovery: Recovery) -> tuple[Faults, tuple[str, ...]]:
    """The faults with what they do not state taken from the training, and a sentence on each that was."""
    update: dict[str, float] = {}
    told = []
    if faults.restart_s is None and recovery.restart_s is not None and recovery.detect_s is not None:
        update["restart_s"] = recovery.restart_s
        told.append(
            f"a restart takes {recovery.restart_s:.3g} s, the median of {recovery.restarts} in {recovery.source}"
        )
        if "detect_s" not in faults.model_fields_set:
            update["detect_s"] = recovery.detect_s
            told.append(f"a fault is noticed after {recovery.detect_s:.3g} s, by the same")
        update["load_s"] = 0.0  # it is in the restart
    if faults.save_s is None and recovery.save_s is not None:
        update["save_s"] = recovery.save_s
        told.append(
            f"a checkpoint stops the training for {recovery.save_s:.3g} s, the median of {recovery.saves} in "
            f"{recovery.source}"
        )
    return faults.model_copy(update=update), tuple(told)
