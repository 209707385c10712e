"""SweepSettings: which layouts are measured, for how long, under which circumstances."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from trimaran.layout.layout import Layout
from trimaran.nouns.noun import Noun, first_error
from trimaran.nouns.shaped_network import ShapedNetwork
from trimaran.nouns.slurm_settings import SlurmSettings
from trimaran.nouns.variant import Variant
from trimaran.recipe.ray_settings import RaySettings


class SweepSettings(Noun):
    """What to measure: layouts as given, or the most promising of the plan."""

    layouts: tuple[str, ...] = Field(default=(), description="short notation; empty: chosen by the plan")
    min_trials: int = Field(default=1, gt=0, le=1_000_000)
    max_trials: int = Field(default=24, gt=0, le=1_000_000)
    steps: int = Field(default=6, gt=1, le=1_000_000_000, description="steps of one trial")
    warmup_steps: int = Field(default=2, gt=0, description="steps before the timed ones")
    timeout_s: float = Field(default=600.0, gt=0, le=1e8)
    devices: tuple[Annotated[int, Field(gt=0)], ...] = Field(
        default=(), description="device counts to consider; empty: up to the cluster's"
    )
    fixed: dict[str, int | str | bool] = Field(default_factory=dict, description="layout fields held fixed")
    mem_margin: float = Field(default=0.05, ge=0, lt=1, description="share of memory the planner leaves free")
    networks: tuple[ShapedNetwork, ...] = Field(
        default=(), description="networks to measure every layout on, shaped inside this machine; empty: its own"
    )
    margin: float = Field(
        default=0.02, gt=0, lt=1, description="tuning ends when no other layout is likely to be faster by this share"
    )
    slurm: SlurmSettings | None = Field(default=None, description="None, and no `ray`: processes of this machine")
    ray: RaySettings | None = Field(default=None, description="None, and no `slurm`: processes of this machine")
    variants: tuple[Variant, ...] = Field(default=(), description="each layout is run under each; empty: plainly")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if unknown := sorted(set(self.fixed) - set(Layout.model_fields)):
            raise ValueError(f"fixed.{unknown[0]} is not a layout field: it is one of {', '.join(Layout.model_fields)}")
        for name, value in self.fixed.items():
            _check_fixed(name, value)
        if self.min_trials > self.max_trials:
            raise ValueError(
                f"min_trials {self.min_trials} exceeds max_trials {self.max_trials}: lower the one or raise the other"
            )
        if len({variant.text() for variant in self.variants}) < len(self.variants):
            raise ValueError("variants holds the same variant twice: drop one")
        names = [network.name for network in self.networks]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"networks has {twice!r} {names.count(twice)} times: give each a name of its own")
        if self.slurm and self.ray:
            raise ValueError("slurm and ray both ask to start the ranks: drop one of the sections")
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} leaves none of steps {self.steps} to be timed: raise steps"
            )
        return self


def _check_fixed(name: str, value: int | str | bool) -> None:
    """Raise ValueError where a layout's field has no such value: here, since it would be laid to the stated layouts."""
    if isinstance(value, str) and "," in value:
        return  # several, of which the plan chooses
    try:
        Layout.model_validate({name: value})
    except ValidationError as error:
        if error.errors()[0]["loc"]:  # else it is refused beside the usual values of other fields
            raise ValueError(f"fixed.{first_error(error)}") from None
