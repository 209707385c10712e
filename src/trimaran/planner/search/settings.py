"""PlanSettings: what a search is asked, checked in one place whoever asks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationError

from trimaran.nouns.noun import Noun, TrimaranError, assignments, first_error
from trimaran.planner.search.objective import Objective

Fixable = int | bool | str | tuple[int | str, ...]


class PlanSettings(Noun):
    """Objective, constraints and extent of one search.

    `devices` is a cap; None stands for all of the cluster's. `fixed` holds choices of a layout at a value or a few
    (`{"tp": 8, "recompute": "full"}`); `mem_margin` is the share of a rank's memory left free;
    `gbs_tolerance` lets the global batch differ from the workload's by so much, relatively.
    """

    devices: int | None = Field(default=None, gt=0, le=10_000_000)
    device_counts: tuple[Annotated[int, Field(gt=0, le=10_000_000)], ...] = Field(
        default=(), description="the only numbers of devices to use; empty: any"
    )
    objective: Objective = Objective()
    top: int = Field(default=20, gt=0, le=10_000)
    fixed: dict[str, Fixable] = Field(default_factory=dict)
    mem_margin: float = Field(default=0.05, ge=0, lt=1)
    gbs_tolerance: float = Field(default=0.0, ge=0, le=0.1)


def settings_from(**given: object) -> PlanSettings:
    """Settings from plain values, objective fields among them; raises TrimaranError in one line."""
    objective = {name: given.pop(name) for name in Objective.model_fields if name in given}
    try:
        return PlanSettings.model_validate({**given, "objective": objective})
    except ValidationError as error:
        raise TrimaranError(f"plan: {first_error(error)}") from None


def fixed_choices(words: list[str]) -> dict[str, object]:
    """`NAME=VALUE` words as choices to hold, of one that is named again all its values.

    Raises TrimaranError naming the word that is not one.
    """
    fixed: dict[str, str] = {}
    for word in words:
        for name, value in assignments([word], "fixed choice", "NAME=VALUE", "tp=8").items():
            fixed[name] = f"{fixed[name]},{value}" if name in fixed else value
    return dict(fixed)
