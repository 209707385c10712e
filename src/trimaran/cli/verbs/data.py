"""`trimaran data`: a recipe's text as token files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimaran.cli.options import RecipeArgument, RunsOption
from trimaran.cli.terminal import tell


def data(
    recipe: RecipeArgument,
    megatron: Annotated[
        Path | None, typer.Option(help="Also write PREFIX.bin and PREFIX.idx as Megatron-LM does.", metavar="PREFIX")
    ] = None,
    runs: RunsOption = Path("runs"),
) -> None:
    """Tokenise a recipe's text now rather than when its first trial or training starts; prints the folder.

    Example: trimaran data recipes/laptop.toml --megatron corpus
    """
    from trimaran.files.recipe_file import load_recipe
    from trimaran.study.workspace import Workspace

    stated = load_recipe(str(recipe))
    tell(str(Workspace(runs / stated.name).data(stated, megatron=megatron, follows="nothing")))
