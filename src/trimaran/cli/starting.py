"""What a manifest starts, from a recipe and what `--set` says over its section [manifest]."""

from __future__ import annotations

from pathlib import Path

from trimaran.files.catalogue import validate
from trimaran.files.recipe_file import is_packaged, load_recipe, recipe_text
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError, assignments
from trimaran.planner.export.start import Start
from trimaran.recipe.manifest_settings import ManifestSettings
from trimaran.recipe.recipe import Recipe
from trimaran.recipe.train_settings import TrainSettings
from trimaran.study.stated import stated_layouts


def require_recipe_as_it_stands(recipe: Path | None, **over: object) -> None:
    """Raise TrimaranError where an option plans another training than the recipe's, which is what will run.

    A recipe also has to name its cluster: machines that a manifest asks for are not this one, which would be probed.
    """
    if recipe is None:
        return
    for name, value in over.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise TrimaranError(
                f"{option} {value} plans another training than that of {recipe}, which the manifest starts: state it "
                f"in the recipe"
            )
    if load_recipe(str(recipe)).cluster is None:
        raise TrimaranError(
            f"recipe {recipe}: cluster is missing or this-machine, and a manifest asks for nodes and devices: name "
            f'one, as cluster = "dgx-h100"'
        )


def start_of(recipe: Path | None, words: list[str], cluster: Cluster) -> Start:
    """What is started on a cluster; without a recipe at hand, the one whose path `--set recipe` states.

    Raises TrimaranError for a word that is no setting, and where no recipe is named.
    """
    base: Recipe | None = load_recipe(str(recipe)) if recipe else None
    stated = base.manifest.model_dump(exclude_unset=True) if base else {}
    given = assignments(words, "--set", "FIELD=VALUE", "image=registry/trimaran:1")
    settings = validate(ManifestSettings, stated | given, "--set")
    if recipe is None and settings.recipe is None:
        raise TrimaranError(
            "a manifest starts the training of a recipe, and none is named: give RECIPE.toml, or its path where the "
            "ranks run by --set recipe=PATH"
        )
    sweeps = settings.verb != "train"
    if sweeps and base is None:
        raise TrimaranError(
            f"manifest.verb is {settings.verb}, and how many devices its sweep uses stands in the recipe: "
            f"give RECIPE.toml"
        )
    carried = recipe is not None and settings.recipe is None and not is_packaged(str(recipe))
    return Start(
        cluster,
        settings,
        base.name if base else Path(settings.recipe or "").stem,
        str(recipe or ""),
        recipe_text(str(recipe)) if carried else None,
        (base.train if base else TrainSettings()).restarts,
        _sweep_devices(base, settings.verb, cluster) if base and sweeps else None,
    )


def _sweep_devices(recipe: Recipe, verb: str, cluster: Cluster) -> int:
    """How many devices the recipe's sweep uses at most. Raises TrimaranError where bench would have no layout."""
    layouts = [layout.devices for layout in stated_layouts(recipe)]
    if verb == "bench" and not layouts:
        raise TrimaranError(
            "manifest.verb is bench, and sweep.layouts of the recipe is empty: state them, or --set verb=tune"
        )
    planned = [] if verb == "bench" else list(recipe.sweep.devices or (cluster.devices,))
    return max([*layouts, *planned])
