"""Faults: how often devices of a cluster fail, how long a training then stands still, and which nodes stand by."""

from __future__ import annotations

from pydantic import Field, model_validator

from trimaran.nouns.noun import Noun

# Faults of one device in a day: one in three million years, ten in a second.
RAREST, MOST_FREQUENT = 1e-9, 1e6
# What counts restarts elsewhere holds 32 bits (maxRestarts of a JobSet); nobody starts a training anew as often.
MOST_RESTARTS = 100_000


class Faults(Noun):
    """What interrupts trainings on a cluster: `faults` in `days` on `devices`, as somebody counted or published them.

    After a fault a training stands still for `detect_s` and `restart_s`, until its next step; `load_s` of them, reading
    the checkpoint, are counted in `restart_s` where they are not stated. `save_s` is how long a checkpoint stops the
    training. Of a share `away_share` of the faults the node is away for `repair_hours`, and one of `spare_nodes` takes
    its place.
    """

    name: str = ""
    faults: float = Field(gt=0, le=1e9)
    days: float = Field(gt=0, le=1e6)
    devices: int = Field(gt=0, le=10_000_000)
    detect_s: float = Field(default=0.0, ge=0, le=1e7)
    restart_s: float | None = Field(default=None, ge=0, le=1e7, description="None: not stated")
    load_s: float = Field(default=0.0, ge=0, le=1e7)
    save_s: float | None = Field(default=None, ge=0, le=1e7, description="None: by the copy to host memory")
    away_share: float = Field(default=1.0, ge=0, le=1)
    repair_hours: float | None = Field(default=None, gt=0, le=1e6, description="None: another node is always there")
    spare_nodes: int = Field(default=0, ge=0, le=100_000)
    preemptions_per_device_day: float | None = Field(
        default=None, ge=0, le=1e6, description="of spot devices; None: not stated"
    )
    source: str = ""

    @model_validator(mode="after")
    def _check_rate(self) -> Faults:
        if not RAREST <= self.per_device_day <= MOST_FREQUENT:
            raise ValueError(
                f"{self.faults:g} faults in {self.days:g} days on {self.devices} devices are {self.per_device_day:.3g} "
                f"of one device in a day: state between {RAREST:g} and {MOST_FREQUENT:g}"
            )
        return self

    @property
    def per_device_day(self) -> float:
        """Faults of one device in a day, in the mean."""
        return self.faults / self.days / self.devices
