"""What plan, export and timeline are asked about: a recipe, options, or a recipe with options over it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimaran.api import calibration_of, usual_stack, workload_of
from trimaran.cost.case import Case
from trimaran.files.catalogue import load_cluster, load_faults, load_stack
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.workload import Workload
from trimaran.planner.search.settings import PlanSettings, fixed_choices, settings_from

if TYPE_CHECKING:
    from trimaran.planner.goodput.recovery import Recovery
    from trimaran.recipe.recipe import Recipe
    from trimaran.recipe.sweep_settings import SweepSettings
    from trimaran.recipe.train_settings import TrainSettings

# Dearer than any device: a price in another unit.
_MOST_PRICE = 1e9


@dataclass(frozen=True)
class PlanQuestion:
    """The case that a verb is asked about, and what of its recipe counts beside; if its stack is assumed.

    `training` is the folder of the recipe's training, where that is on the cluster that is asked about.
    """

    case: Case
    sweep: SweepSettings | None
    assumes_stack: bool = False
    recipe_train: TrainSettings | None = None
    training: Path | None = None

    @property
    def recovery(self) -> Recovery | None:
        """What the recipe's training has measured of its faults, where it has trained on this cluster."""
        if self.training is None:
            return None
        from trimaran.study.training.recovered import recovery_in

        return recovery_in(self.training, self.case.workload.model)

    @property
    def train(self) -> TrainSettings:
        """How the recipe trains, or as usual where there is none."""
        from trimaran.recipe.train_settings import TrainSettings  # a large noun, which most questions do without

        return self.recipe_train or TrainSettings()

    def settings(self, devices: int | None, fix: list[str] | None, **more: object) -> PlanSettings:
        """How to search: as the recipe's sweep says where no option says more. Raises TrimaranError."""
        given = {name: value for name, value in more.items() if value is not None} | {"devices": devices}
        fixed = fixed_choices(fix or [])
        if self.sweep is None:
            return settings_from(fixed=fixed, **given)
        stated = {"device_counts": self.sweep.devices if devices is None else (), "mem_margin": self.sweep.mem_margin}
        return settings_from(fixed=self.sweep.fixed | fixed, **stated | given)


def question_of(
    recipe: Path | None,
    runs: Path,
    *,
    model: str | None,
    cluster: str | None,
    gbs: int | None,
    seq: int | None = None,
    stack: str | None = None,
    optimizer: str | None = None,
    tokens: float | None = None,
    ramp_up: str | None = None,
    calibration: str | None = None,
    price: float | None = None,
    faults: str | None = None,
) -> PlanQuestion:
    """The question that recipe and options state together; options win. Raises TrimaranError."""
    base = None if recipe is None else _recipe(recipe)
    if base is None:
        for name, value in (("--model", model), ("--cluster", cluster), ("--gbs", gbs)):
            if value is None:
                raise TrimaranError(f"{name} is missing: state it, or give a recipe file")
    known_cluster = _priced(_cluster(base, cluster, runs), price)
    if faults is not None:
        known_cluster = known_cluster.model_copy(update={"faults": load_faults(faults)})
    known_stack = base.stack if base and stack is None else load_stack(stack or usual_stack(known_cluster))
    known_calibration = calibration_of(calibration, known_cluster, known_stack)
    asked: dict[str, Any] = {"model": model, "gbs": gbs, "seq": seq, "optimizer": optimizer, "tokens": tokens}
    asked["ramp_up"] = None if ramp_up is None else _numbers(ramp_up)
    stated = {} if base is None else _stated(base.workload, seq=model is None)
    workload = workload_of(**stated | {name: value for name, value in asked.items() if value is not None})
    if price is not None and workload.tokens is None:
        raise TrimaranError(f"--price {price:g} is counted over a whole training: state its extent, as --tokens 1e12")
    if faults is not None and workload.tokens is None:
        raise TrimaranError(f"--faults {faults} is counted over a whole training: state its extent, as --tokens 1e12")
    case = Case.of(workload, known_cluster, known_stack, known_calibration)
    assumed = base is None and stack is None
    # of another cluster than the recipe's nothing was measured there
    training = runs / base.name / "train" if base and cluster is None else None
    return PlanQuestion(case, base.sweep if base else None, assumed, base.train if base else None, training)


def _recipe(path: Path) -> Recipe:
    from trimaran.files.recipe_file import load_recipe  # a large noun, which a question of options alone does without

    return load_recipe(str(path))


def _cluster(base: Recipe | None, cluster: str | None, runs: Path) -> Cluster:
    if cluster is not None or base is None:
        return load_cluster(cluster or "")
    from trimaran.study.workspace import Workspace

    return Workspace(runs / base.name).cluster(base, runs_here=False)


def _priced(cluster: Cluster, price: float | None) -> Cluster:
    if price is None:
        return cluster
    if not 0 < price < _MOST_PRICE:
        raise TrimaranError(f"--price {price:g} is not between 0 and {_MOST_PRICE:g} a device-hour: state another")
    stated = {"price_per_device_hour": price}
    groups = tuple(group.model_copy(update=stated) for group in cluster.groups)
    return cluster.model_copy(update={**stated, "groups": groups})


def _stated(workload: Workload, *, seq: bool) -> dict[str, Any]:
    """What a recipe says, by the words of `workload_of`; its sequence length is not that of another model."""
    ramp_up = list(workload.ramp_up.model_dump().values()) if workload.ramp_up else None
    stated: dict[str, Any] = {"model": workload.model, "gbs": workload.global_batch, "optimizer": workload.optimizer}
    return stated | {"tokens": workload.tokens, "ramp_up": ramp_up} | ({"seq": workload.seq_len} if seq else {})


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise TrimaranError(
            f"--ramp-up {text!r} is not START,INCREMENT,SAMPLES: write for example 32,32,6000000"
        ) from None
