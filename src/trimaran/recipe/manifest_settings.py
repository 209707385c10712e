"""ManifestSettings: what a manifest of Kubernetes or SkyPilot says of the machines that run a recipe's training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trimaran.nouns.faults import MOST_RESTARTS
from trimaran.nouns.noun import Noun

# The pods' names, NAME-node-0-NUMBER, are host names of at most 63 characters.
LONGEST_NAME = 40
_Label = Annotated[str, Field(pattern=rf"^[a-z]([a-z0-9-]{{0,{LONGEST_NAME - 2}}}[a-z0-9])?$")]
# No part of a path is empty, `.` or `..`, so that what lies in another is known.
_Path = Annotated[str, Field(pattern=r"^(/\.?[A-Za-z0-9_+@-][A-Za-z0-9_.+@-]*)+/?$", max_length=300)]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9/][A-Za-z0-9_.+/@-]{0,300}$")]
# Labels of Kubernetes (validation of k8s.io/apimachinery): a name of at most 63 characters, in a domain or in none.
_LABEL_WORD = "[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LabelName = Annotated[str, Field(pattern=rf"^([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_LABEL_WORD}$")]
_LabelValue = Annotated[str, Field(pattern=rf"^({_LABEL_WORD})?$")]
_Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/@+-]{0,499}$")]


class ManifestSettings(Noun):
    """`[manifest]`, or `--set FIELD=VALUE`: what `trimaran export` cannot know of a cluster.

    The image has Trimaran and PyTorch. `volume` is where a training leaves log and checkpoints: a claim of a volume
    that all nodes write to (ReadWriteMany), of SkyPilot the name of such a volume.
    """

    image: _Word | None = Field(default=None, description="of a container; needed")
    volume: _Word | None = Field(default=None, description="claim, or SkyPilot's name, of the shared volume; needed")
    runs: _Path = Field(default="/runs", description="where the volume is mounted, `--runs` of the training")
    recipe: _Name | None = Field(
        default=None, description="the recipe's path where the ranks run; None: the manifest carries the recipe"
    )
    name: _Label | None = Field(default=None, description="of what the manifest makes; None: after the recipe")
    namespace: _Label | None = Field(default=None, description="of Kubernetes; None: kubectl's")
    verb: Literal["train", "bench", "tune"] = Field(
        default="train", description="what is started: the training, or a sweep, which starts its own ranks on one node"
    )
    restarts: int | None = Field(default=None, ge=0, le=MOST_RESTARTS, description="None: as often as [train] says")
    shared_memory_gib: int | None = Field(
        default=None, gt=0, le=1_000_000, description="of /dev/shm; None: what a node's memory allows"
    )
    grace_s: int = Field(default=120, gt=0, le=86_400, description="from SIGTERM to SIGKILL: time to save")
    resource: _Word | None = Field(default=None, description="Kubernetes' name of a device; None: the device's own")
    accelerator: _Word | None = Field(default=None, description="SkyPilot's name of a device; None: the device's own")
    infra: _Word | None = Field(default=None, description="SkyPilot's cloud/region, as k8s; None: any")
    node_selector: dict[_LabelName, _LabelValue] = Field(
        default_factory=dict, description="labels of the nodes to run on"
    )
