"""The page of recipes begins as its command writes it, and names every recipe."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
PAGE = (RECIPES / "README.md").read_text(encoding="utf-8")


def test_the_page_begins_as_the_command_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    assert PAGE.startswith(importlib.import_module("run_all").HEADER)


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda recipe: recipe.stem)
def test_the_page_names_every_recipe(recipe: Path) -> None:
    assert recipe.name in PAGE or f"## {recipe.stem}\n" in PAGE
