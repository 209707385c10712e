"""The weights that a training begins with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from trimaran.files.user_file import from_home
from trimaran.protocol.job import TrainJob
from trimaran.train.comm.group import Group
from trimaran.train.model.weight import Initial, WeightSpec, drawn
from trimaran.train.state.manifest import saved_steps


def goes_on(job: TrainJob, world: Group, device: torch.device) -> bool:
    """Whether the training goes on from a checkpoint, as rank 0 sees it: other machines may see an older folder."""
    there = torch.zeros(1, device=device)
    if job.resume and job.checkpoint_dir is not None:
        there += world.index == 0 and bool(saved_steps(Path(job.checkpoint_dir)))
        world.all_reduce(there)
    return there.item() > 0


def first_weights(job: TrainJob, alive: Callable[[], None], *, replaced: bool = False) -> Initial:
    """What the training begins with: what the recipe names, or numbers drawn from its seed.

    Where those of a checkpoint take their place (`replaced`) what the recipe names is not read, and may be gone.
    `alive` is called for each weight, and while files are checked: large ones take minutes. Raises TrimaranError where
    the recipe names another model's weights.
    """
    values = drawn(job.train.seed)
    if job.train.init_from is not None and not replaced:
        # the libraries that read weights, which a training from drawn numbers does not need
        from trimaran.train.state.weight_source import check_same_model, initial_from, open_source

        source = open_source(from_home(job.train.init_from), alive)
        check_same_model(source, job.workload.model, "train.init_from")
        values = initial_from(source)

    def telling(name: str, spec: WeightSpec) -> Tensor:
        alive()
        return values(name, spec)

    return telling
