"""Workspace: the folder of a study, with its cluster file, token files, trials, store and training."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trimaran.files.catalogue import load_cluster, write_atomically
from trimaran.layout.layout import Layout
from trimaran.layout.rules import check_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import printable
from trimaran.protocol.job import DataJob, Training
from trimaran.recipe.recipe import Recipe
from trimaran.store import waiting_for
from trimaran.store.claims import Claims
from trimaran.study.stated import require_probed_here, stated_layouts, unprobed_machine
from trimaran.study.torch_programs import job_text, probe_machine, run_program

_LOOK_AGAIN_S = 0.5
# What is done with a text once it is tokenised.
Follows = Literal["nothing", "trials", "training"]


@dataclass(frozen=True)
class Workspace:
    """Paths of a study, and the two things that have to be made before its first trial.

    Raises TrimaranError for a folder whose name no file of the study can hold.
    """

    folder: Path

    def __post_init__(self) -> None:
        try:
            str(self.folder).encode()
        except UnicodeEncodeError:
            raise TrimaranError(f"--runs {printable(str(self.folder))} is not Unicode: choose another folder") from None

    @property
    def store(self) -> Path:
        """The database of measurements."""
        return self.folder / "store.sqlite"

    @property
    def trials(self) -> Path:
        """A folder for every trial's log and evidence."""
        return self.folder / "trials"

    @property
    def calibration(self) -> Path:
        """The cost model fitted to this study's measurements."""
        return self.folder / "calibration.toml"

    @property
    def table(self) -> Path:
        """What was measured, as a Markdown table."""
        return self.folder / "table.md"

    @property
    def training(self) -> Path:
        """The training's log and result."""
        return self.folder / "train"

    @property
    def cluster_file(self) -> Path:
        """This machine, as the probe measured it."""
        return self.folder / "cluster.toml"

    def cluster(self, recipe: Recipe, layouts: Sequence[Layout] | None = None, *, runs_here: bool = True) -> Cluster:
        """The recipe's cluster, or this machine as a probe measures it on the first call.

        Layouts to run on it, the recipe's own if none are given, are refused before the probe where no machine of
        as many slots could run them. Raises TrimaranError for those, when the probe fails or its file is not valid, and
        where that file is of another machine or of fewer slots, unless nothing `runs_here`.
        """
        if recipe.cluster is not None:
            return recipe.cluster
        if recipe.sweep.slurm is not None or recipe.sweep.ray is not None:
            whose = "Slurm's" if recipe.sweep.slurm is not None else "Ray's"
            raise TrimaranError(
                f"recipe {recipe.name}: cluster is missing, and a probe of this machine says nothing of {whose} nodes: "
                f'name one, as cluster = "dgx-h100", or a file that `trimaran probe` wrote there'
            )
        layouts = stated_layouts(recipe) if layouts is None else layouts
        if not self.cluster_file.exists():
            for layout in layouts:
                check_layout(layout, recipe.workload, unprobed_machine(recipe, layouts), recipe.stack)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._probe(recipe, layouts)
        probed = load_cluster(str(self.cluster_file))
        if runs_here:
            require_probed_here(self.cluster_file, probed, layouts)
        return probed

    def _probe(self, recipe: Recipe, layouts: Sequence[Layout]) -> None:
        """Probe this machine, or wait for another process that does: two at once would each measure the other."""
        claims, told = Claims(self.folder / "probe.claims"), set[str]()
        try:
            while not claims.take("probe"):
                if (holder := claims.holder("probe")) and (text := waiting_for(holder, "probes")) not in told:
                    print(text, file=sys.stderr, flush=True)
                    told.add(text)
                time.sleep(_LOOK_AGAIN_S)
            if not self.cluster_file.exists():
                probe_machine(recipe, layouts, self.cluster_file)
        finally:
            claims.close()

    def data(self, recipe: Recipe, megatron: Path | None = None, *, follows: Follows = "trials") -> Path:
        """Folder of the recipe's token files, made on the first call; `megatron` is a prefix to write them to as well.

        Raises TrimaranError when a text cannot be read or the disk is full, and for what that which `follows` would be
        refused for.
        """
        job = DataJob(data=recipe.data, vocab=recipe.workload.model.vocab, cache_dir=str(self.folder / "data"))
        if megatron is not None:
            job = job.model_copy(update={"megatron": str(megatron)})
        if follows != "nothing":
            training = Training(workload=recipe.workload, train=recipe.train, trials=follows == "trials")
            job = job.model_copy(update={"training": training})
        path = self.folder / "data.json"
        write_atomically(path, job_text(job, "data"))
        told = run_program("trimaran.train.programs.tokenise", [str(path)], "data", capture=True)
        return Path(job.cache_dir, told.strip().splitlines()[-1])
