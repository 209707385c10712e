"""Recipes from TOML files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimaran.files.catalogue import (
    CATALOG,
    catalogue_names,
    cluster_from,
    load_cluster,
    load_model,
    load_stack,
    looks_like_path,
    named_from,
    read_table,
    stack_from,
    unknown_name,
    validate,
    whole_path,
)
from trimaran.files.user_file import NOUN_BYTES, read_text
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError, unknown
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload
from trimaran.recipe.data_settings import STDLIB_WORDS, TOKENIZER_WORDS
from trimaran.recipe.recipe import Recipe

# Fields of [data] and [train] that name files or folders, each with the words that name none.
_PATHS: dict[str, tuple[str, ...]] = {"paths": STDLIB_WORDS, "tokenizer": TOKENIZER_WORDS, "init_from": ()}


def load_recipe(path: str) -> Recipe:
    """A Recipe from a TOML file, or by the name of a packaged one where no file has it.

    `[model]`, `[cluster]` and `stack` may each be a table or `name = "..."` (catalogue name or
    file). Every path counts from the recipe's folder. A cluster of the name `this-machine` is left to be probed.
    """
    file = Path(str(CATALOG / "recipes" / f"{path}.toml")) if is_packaged(path) else Path(path)
    if not (is_packaged(path) or looks_like_path(path) or file.exists()):
        if path in catalogue_names("models"):
            raise TrimaranError(
                f"{path!r} is a model and no recipe: a recipe names it in [model], and plan takes it as --model {path}"
            )
        raise TrimaranError(unknown_name("recipes", path))
    table, source = read_table(file, f"recipe {path}")
    folder = file.parent
    known = {"name", "stack", "model", "cluster", "workload", "data", "sweep", "train", "tables", "manifest"}
    if strange := sorted(set(table) - known):
        raise TrimaranError(f"{source}: section {unknown(strange[0], sorted(known))}")
    for section in ("model", "workload"):
        if not isinstance(table.get(section), dict):
            stated = f"is {table[section]!r} and no section: write it" if section in table else "is missing: add it"
            example = ', as [model] and under it name = "llama3-8b"' if section == "model" else ""
            raise TrimaranError(f"{source}: section [{section}] {stated}{example}")
    workload = {**table["workload"], "model": _model_of(table["model"], source, folder)}
    for section in ("data", "sweep", "train", "manifest"):
        if not isinstance(table.get(section, {}), dict):
            raise TrimaranError(f"{source}: {section} is not a section: write it as [{section}]")
    recipe: dict[str, Any] = {
        "name": table.get("name", Path(path).stem),
        "workload": validate(Workload, workload, f"{source} [workload]"),
        "stack": _stack_of(table.get("stack", "trimaran"), source, folder),
        "cluster": _cluster_of(table.get("cluster"), source, folder),
    }
    recipe |= {section: table[section] for section in ("sweep", "tables", "manifest") if section in table}
    recipe |= {section: _from_folder(table[section], folder) for section in ("data", "train") if section in table}
    return validate(Recipe, recipe, source)


def is_packaged(path: str) -> bool:
    """Whether a recipe is meant by its name, which every installation of Trimaran knows."""
    return path in catalogue_names("recipes") and not Path(path).exists()


def recipe_text(path: str) -> str:
    """A recipe's file as it stands, to be read in another folder.

    Raises TrimaranError where it names files beside it.
    """
    text = read_text(path, f"recipe {path}", NOUN_BYTES, "give a TOML file")
    if beside := next(_files_beside(read_table(Path(path), f"recipe {path}")[0]), None):
        raise TrimaranError(
            f"recipe {path} names {beside!r}, a file beside it, and only the recipe is carried: write its whole path "
            f"where the ranks run, or put the recipe there too and state that by --set recipe=PATH"
        )
    return text


def _files_beside(table: dict[str, Any]) -> Iterator[str]:
    """Paths that count from the recipe's folder."""
    nouns = [table.get(section) for section in ("model", "cluster", "stack")]
    named = [noun.get("name") if isinstance(noun, dict) and set(noun) == {"name"} else noun for noun in nouns]
    yield from (name for name in named if isinstance(name, str) and looks_like_path(name) and name[:1] not in "/~")
    data = table.get("data", {})
    for section in (data, table.get("train", {}), *data.get("blend", ())):
        for name, words in _PATHS.items():
            stated = section.get(name, ())
            for path in [stated] if isinstance(stated, str) else stated:
                if isinstance(path, str) and path not in words and path[:1] not in "/~":
                    yield path


def _model_of(table: Any, source: str, folder: Path) -> Model:
    if isinstance(table, dict) and set(table) == {"name"} and isinstance(table["name"], str):
        return load_model(named_from(table["name"], folder))
    if isinstance(table, str):
        return load_model(named_from(table, folder))
    return validate(Model, table, f"{source} [model]")


def _stack_of(value: Any, source: str, folder: Path) -> Stack:
    if isinstance(value, str):
        return load_stack(named_from(value, folder))
    if not isinstance(value, dict):
        raise TrimaranError(f"{source}: stack is {value!r}, expected a catalogue name, a file or a section [stack]")
    return stack_from(value, f"{source} [stack]", folder)


def _cluster_of(value: Any, source: str, folder: Path) -> Cluster | None:
    name = value["name"] if isinstance(value, dict) and set(value) == {"name"} else value
    if name is None or name == "this-machine":
        return None
    if isinstance(name, str):
        return load_cluster(named_from(name, folder))
    if not isinstance(value, dict):
        raise TrimaranError(f"{source}: cluster is {value!r}, expected a catalogue name, a file or a section [cluster]")
    return cluster_from(value, f"{source} [cluster]", folder)


def _from_folder(section: Any, folder: Path) -> Any:
    """A section, or an entry of its blend, with whole paths; what is not as it should be is left to be refused."""
    if not isinstance(section, dict):
        return section
    resolved = dict(section)
    for name, words in _PATHS.items():
        stated = section.get(name)
        if isinstance(stated, str) and name != "paths":
            resolved[name] = _whole(stated, words, folder)
        elif isinstance(stated, list) and name == "paths":
            resolved[name] = [_whole(each, words, folder) for each in stated]
    if isinstance(section.get("blend"), list):
        resolved["blend"] = [_from_folder(entry, folder) for entry in section["blend"]]
    return resolved


def _whole(stated: Any, words: tuple[str, ...], folder: Path) -> Any:
    return whole_path(stated, folder) if isinstance(stated, str) and stated and stated not in words else stated
