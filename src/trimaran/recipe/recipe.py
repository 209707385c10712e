"""Recipe: one TOML file for plan, bench, tune, predict and train, which read their parts."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import Noun
from trimaran.nouns.shaped_network import ShapedNetwork
from trimaran.nouns.stack import Stack
from trimaran.nouns.variant import PLAIN, Variant
from trimaran.nouns.workload import Workload
from trimaran.recipe.data_settings import DataSettings
from trimaran.recipe.manifest_settings import ManifestSettings
from trimaran.recipe.published import PublishedTable
from trimaran.recipe.sweep_settings import SweepSettings
from trimaran.recipe.train_settings import TrainSettings

_FOLDER_NAME = re.compile(r"\w[\w.+ -]{0,99}")


class Recipe(Noun):
    """Model and workload, cluster, stack, sweep, data, training, and published tables to be repeated."""

    name: str = Field(description="also the folder of its study")
    workload: Workload
    cluster: Cluster | None = Field(default=None, description="None: probe this machine")
    stack: Stack
    data: DataSettings = DataSettings()
    sweep: SweepSettings = SweepSettings()
    train: TrainSettings = TrainSettings()
    manifest: ManifestSettings = ManifestSettings()
    tables: tuple[PublishedTable, ...] = Field(default=(), description="published tables to be repeated")

    @property
    def variant(self) -> Variant:
        """What tune and train run under: the only variant of the sweep, or none."""
        return self.sweep.variants[0] if len(self.sweep.variants) == 1 else PLAIN

    @property
    def network(self) -> ShapedNetwork | None:
        """What tune and train run on: the only network of the sweep, or none."""
        return self.sweep.networks[0] if len(self.sweep.networks) == 1 else None

    def variant_text(self, variant: Variant) -> str:
        """What keys and rows say of a trial under a variant: the variant, and the software that Slurm's nodes have.

        A variant's interpreter goes before that of the nodes.
        """
        software = self.sweep.slurm.software() if self.sweep.slurm else {}
        if variant.python is not None:
            software.pop("python", None)
        return ";".join(filter(None, (variant.text(), *(f"{name}={value}" for name, value in software.items()))))

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not _FOLDER_NAME.fullmatch(name):
            raise ValueError("a study's folder has this name: use letters, digits, spaces and . _ + -, at most 100")
        return name

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("balance_loss", "router_z_loss"):
            weight = getattr(self.train, name)
            if weight and not self.workload.model.experts:
                raise ValueError(f"train.{name} is {weight:g}, but model.experts is 0: leave it out, or state experts")
        rate, usual = self.train.router_bias_rate, TrainSettings.model_fields["router_bias_rate"].default
        if rate not in (0.0, usual) and not (self.workload.model.experts and self.workload.model.router.bias):
            raise ValueError(
                f"train.router_bias_rate is {rate:g}, but the routers have no biases (model.router.bias is false): "
                f"leave it out, or set bias to true"
            )
        return self
