"""How a manifest starts a recipe's training: on which nodes, by which command, with what refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import counted
from trimaran.recipe.manifest_settings import LONGEST_NAME, ManifestSettings

# torchrun's own (torch/distributed/launcher/api.py of 2.13), by which it waits for ranks that it told to leave.
GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
# torchrun's and Kubeflow Trainer's (pkg/constants/constants.go of kubeflow/trainer, commit 8c0f5059bd51).
PORT = 29500


@dataclass(frozen=True)
class Start:
    """A recipe's training as a manifest starts it: its cluster, its name, what `[manifest]` says, and the recipe.

    `recipe_file` is the recipe as it was named; `recipe_text` is its content where the manifest has to carry it, None
    where the recipe is found by that name or by the path of the settings. `restarts` is how often [train] says, and
    `sweep_devices` how many devices its sweep uses at most.
    """

    cluster: Cluster
    settings: ManifestSettings
    recipe_name: str
    recipe_file: str
    recipe_text: str | None
    restarts: int
    sweep_devices: int | None = None

    @property
    def sweeps(self) -> bool:
        """Whether a sweep is started, which starts the ranks of its trials by itself."""
        return self.settings.verb != "train"

    @property
    def name(self) -> str:
        """The name of what is made, a label of DNS."""
        if self.settings.name:
            return self.settings.name
        word = re.sub("[^a-z0-9]+", "-", self.recipe_name.lower())
        return (word if word[:1].isalpha() else f"train-{word}")[:LONGEST_NAME].strip("-")

    @property
    def carried_file(self) -> str:
        """The name under which the recipe is carried, which is also the name of one that states none."""
        plain = re.fullmatch(r"[A-Za-z0-9_.-]+", self.recipe_name)
        return f"{self.recipe_name if plain else self.name}.toml"

    @property
    def most_restarts(self) -> int:
        """How often all ranks are started anew."""
        return self.restarts if self.settings.restarts is None else self.settings.restarts

    def needed(self, field: str, why: str) -> str:
        """A setting that has no default. Raises TrimaranError where it is not stated."""
        value: str | None = getattr(self.settings, field)
        if value is None:
            raise TrimaranError(f"manifest.{field} is not stated, {why}: give --set {field}=..., or state [manifest]")
        return value

    def runs_beside(self, *others: str) -> str:
        """Where the volume is mounted. Raises TrimaranError where that lies in what is mounted besides, or holds it."""
        runs = PurePosixPath(self.settings.runs)
        for other in others:
            if runs.is_relative_to(other) or PurePosixPath(other).is_relative_to(runs):
                raise TrimaranError(
                    f"manifest.runs is {self.settings.runs}, and the manifest mounts {other} besides: give another "
                    f"folder, as --set runs=/runs"
                )
        return self.settings.runs

    def nodes(self, layout: Layout) -> tuple[int, int]:
        """Nodes, and ranks on each, as the cluster's nodes are filled.

        torchrun starts as many ranks on every node. Raises TrimaranError where the layout leaves a node half full, or
        a sweep needs more than one: nothing there starts ranks on another.
        """
        on_one = self.cluster.devices_replaced
        if self.sweeps:
            most = self.sweep_devices or self.cluster.devices
            if most > on_one:
                raise TrimaranError(
                    f"manifest.verb is {self.settings.verb}, and the sweep uses {most} devices of nodes of {on_one}: "
                    f"hold it to one node by sweep.devices or sweep.layouts, or run it on a Ray of several (sweep.ray)"
                )
            return 1, most
        if layout.devices <= on_one:
            return 1, layout.devices
        if layout.devices % on_one:
            raise TrimaranError(
                f"layout {layout} has {layout.devices} ranks, which do not fill nodes of {on_one} devices: hold a "
                f"multiple of {on_one} by --devices"
            )
        return layout.devices // on_one, on_one

    def cores(self, ranks: int) -> int:
        """Cores of a node that so many ranks on CPUs compute with. Raises TrimaranError where none are stated."""
        if not self.cluster.device.cores:
            raise TrimaranError(
                f"device.cores of cluster {self.cluster.name or 'without a name'} is 0, and a manifest asks for the "
                f"cores of its ranks: state them in the device"
            )
        return min(ranks * self.cluster.device.cores, self.cluster.cores_per_node or ranks * self.cluster.device.cores)

    def command(self, layout: Layout, carried: str, torchrun: Sequence[str] = ()) -> list[str]:
        """What is run; `carried` is the folder of a recipe that the manifest carries.

        A training goes on from the newest checkpoint, and a sweep with what is not measured, so that every start may
        be another.
        """
        path = self.settings.recipe or (self.recipe_file if self.recipe_text is None else self._carried_path(carried))
        runs = ["--runs", self.settings.runs]
        if self.sweeps:
            return ["python", "-m", "trimaran", self.settings.verb, path, *runs]
        return [*torchrun, "-m", "trimaran", "train", path, "--layout", str(layout), "--resume", *runs]

    def where(self, layout: Layout) -> str:
        """What is started on which nodes, in words."""
        nodes, ranks = self.nodes(layout)
        what = f"trimaran {self.settings.verb}" if self.sweeps else f"layout {layout}"
        return f"{what} on {counted(nodes, 'node')} of {ranks}"

    def _carried_path(self, folder: str) -> str:
        return f"{folder}/{self.carried_file}"


class _Blocks(yaml.SafeDumper):  # type: ignore[misc]
    """Writes text of several lines as it is, and nothing by reference."""

    def ignore_aliases(self, data: Any) -> bool:
        """All: a reader of a manifest should not have to look elsewhere."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Blocks.add_representer(str, _text)


def manifest(comment: str, documents: Sequence[dict[str, Any]]) -> str:
    """Documents as YAML, below a line on what they do."""
    text = yaml.dump_all(documents, Dumper=_Blocks, sort_keys=False, width=1000)
    return f"# {comment}\n{text}".rstrip()
