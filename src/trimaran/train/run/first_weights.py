"""The weights that a training begins with."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from trimaran.files.user_file import from_home
from trimaran.protocol.job import TrainJob
from trimaran.train.model.weight import Initial, WeightSpec, drawn


def first_weights(job: TrainJob, alive: Callable[[], None]) -> Initial:
    """What the training begins with: what the recipe names, or numbers drawn from its seed.

    `alive` is called for each weight, and while files are checked: large ones take minutes. Raises TrimaranError where
    the recipe names another model's weights.
    """
    values = drawn(job.train.seed)
    if job.train.init_from is not None:
        # the libraries that read weights, which a training from drawn numbers does not need
        from trimaran.train.state.weight_source import check_same_model, initial_from, open_source

        source = open_source(from_home(job.train.init_from), alive)
        check_same_model(source, job.workload.model, "train.init_from")
        values = initial_from(source)

    def telling(name: str, spec: WeightSpec) -> Tensor:
        alive()
        return values(name, spec)

    return telling
