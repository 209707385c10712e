"""`trimaran bench`: measure each layout of a recipe's sweep into the store."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from trimaran.cli.options import FormatOption, OutputFormat, RecipeArgument, RetryOption, RunsOption, TrustOption
from trimaran.cli.terminal import tell


class Scale(StrEnum):
    """Sizes that published tables can be mapped down to."""

    laptop = "laptop"


def bench(
    recipe: RecipeArgument,
    runs: RunsOption = Path("runs"),
    retry: RetryOption = None,
    soak: Annotated[
        int, typer.Option(min=0, help="Steps that each trial makes beyond the recipe's, for memory that runs out late.")
    ] = 0,
    trust: TrustOption = False,
    scale: Annotated[
        Scale | None, typer.Option(help="laptop: the recipe's published tables, mapped down to this machine.")
    ] = None,
    table: Annotated[
        list[str] | None, typer.Option(help="With --scale: only this table of the recipe. May be repeated.")
    ] = None,
    form: FormatOption = OutputFormat.table,
) -> None:
    """Measure every layout that the recipe's sweep states; finished ones are kept, never repeated.

    Example: trimaran bench recipes/laptop.toml

    Example: trimaran bench recipes/bloom-176b.toml --scale laptop --table tp
    """
    from trimaran.cli.live_progress import TrialProgress, say
    from trimaran.cli.options import retried
    from trimaran.nouns.noun import TrimaranError
    from trimaran.report.measured_rows import FIELDS, records
    from trimaran.report.tables import render
    from trimaran.study.measure_recipe import measure_recipe, require_one_ran
    from trimaran.study.stated import runnable_recipe
    from trimaran.study.workspace import Workspace

    again = retried(retry)
    if scale is not None:
        for option, value in {"--retry": retry and retry[0], "--soak": soak}.items():
            if value:
                raise TrimaranError(f"{option} {value} is of the recipe's own trials, not of --scale's: leave one out")
        _small(recipe, table or [], runs, form)
        return
    if table:
        raise TrimaranError(f"--table {table[0]} is of the recipe's published tables: add --scale laptop to measure it")
    stated = runnable_recipe(recipe, trust=trust)
    if not stated.sweep.layouts:
        raise TrimaranError(
            f"recipe {recipe}: sweep.layouts is empty, so bench has nothing to measure: fill it, or tune"
        )
    rows = measure_recipe(stated, Workspace(runs / stated.name), show=TrialProgress, say=say, retry=again, soak=soak)
    tell(render(records(rows), FIELDS, form.value))
    require_one_ran(rows)


def _small(path: Path, names: list[str], runs: Path, form: OutputFormat) -> None:
    """Measure the recipe's published tables mapped down, and answer each one's question."""
    from trimaran.cli.live_progress import TrialProgress, say
    from trimaran.files.recipe_file import load_recipe
    from trimaran.report.published_answers import as_json, as_text
    from trimaran.study.published.small_tables import measure_small
    from trimaran.study.workspace import Workspace

    recipe = load_recipe(str(path))
    tables = measure_small(recipe, names, Workspace(runs / f"{recipe.name}-laptop"), show=TrialProgress, say=say)
    tell(as_json(tables) if form.value == "json" else as_text(tables, form.value))
