"""SlurmSettings: how a sweep asks Slurm for nodes."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trimaran.nouns.noun import Noun

_Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,:@+-]{0,199}$")]
_Features = Annotated[str, Field(pattern=r"^[A-Za-z0-9_\[(][A-Za-z0-9_.,:@+&|*()\[\]-]{0,199}$")]


# A node list of Slurm's: `n[1-4,7],gpu3`.
_Hosts = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.,\[\]-]{0,999}$")]
_Image = Annotated[str, Field(pattern=r"^[A-Za-z0-9_/][A-Za-z0-9_.:/@#+-]{0,499}$")]
_Mount = Annotated[str, Field(pattern=r"^/[^\s,:]{1,400}:/[^\s,:]{1,400}(:[a-z+]{1,40})?$")]
_Module = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+/@=-]{0,199}$")]
_Python = Annotated[str, Field(pattern=r"^/[^\s,;:]{1,400}$")]


class SlurmSettings(Noun):
    """`[sweep.slurm]`: its presence has a recipe's ranks started by Slurm.

    `submit` says what is asked of a login node's queue: `allocation`, nodes that are held while trial after trial
    runs on them, or `job`, a job for each trial. With `at_once` above one, so many trials run side by side, on as
    many allocations (a job array) or jobs. Inside a Slurm job, trials are steps of that job. Trials whose
    nodes fail are run again; with `requeue` also those whose job was preempted, cancelled or out of time.

    Ranks run under `python` where it is stated, with `modules` loaded on every node, or in a container that Pyxis
    makes of `container_image`, in which `python` is.
    """

    submit: Literal["allocation", "job"] = "allocation"
    partition: _Word | None = None
    account: _Word | None = None
    constraint: _Features | None = None
    time_limit_min: int | None = Field(default=None, gt=0, le=525_600, description="None: the partition's")
    nodes: int | None = Field(default=None, gt=0, description="of an allocation; None: as many as a trial needs")
    groups: dict[str, _Hosts] = Field(
        default_factory=dict, description="the nodes of each group of the cluster, in their order: east = 'n[1-4]'"
    )
    at_once: int = Field(default=1, gt=0, le=1000)
    requeue: bool = False
    python: _Python | None = Field(
        default=None, description="whole path of the nodes' or the container's interpreter; None: this one's"
    )
    modules: tuple[_Module, ...] = Field(default=(), description="loaded on every node before its ranks start")
    container_image: _Image | None = Field(default=None, description="srun --container-image of Pyxis")
    container_mounts: tuple[_Mount, ...] = Field(
        default=(), description="FROM:TO or FROM:TO:FLAGS, beside the folders of the run, which are mounted anyway"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.groups and self.at_once > 1:
            raise ValueError(f"groups name nodes, of which {self.at_once} trials at once would need each: drop at_once")
        if self.container_image is None and self.container_mounts:
            raise ValueError("container_mounts are of a container, and container_image is not stated: state it")
        if self.container_image is not None and self.python is None:
            raise ValueError(
                "container_image is stated and python is not: write the path of the image's interpreter, as "
                "/usr/bin/python3"
            )
        if self.container_image is not None and self.modules:
            raise ValueError("modules are a node's, and container_image takes its place: drop one of them")
        return self

    def software(self) -> dict[str, str]:
        """What ranks run in, where it is stated: another of these makes another trial."""
        stated = {
            "container_image": self.container_image,
            "python": self.python,
            "modules": ",".join(self.modules),
        }
        return {name: value for name, value in stated.items() if value}

    def foreign_code(self) -> str | None:
        """The first setting that makes a rank run a program of its choice; None where none does."""
        stated = {"container_image": self.container_image, "python": self.python}
        return next((f"{name} = {value!r}" for name, value in stated.items() if value is not None), None)
