"""Options that several verbs share, so that they read and behave the same everywhere."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

if TYPE_CHECKING:
    from trimaran.nouns.measurement import Status


class OutputFormat(StrEnum):
    """How a table is printed."""

    table = "table"
    json = "json"
    csv = "csv"
    markdown = "markdown"
    latex = "latex"


FormatOption = Annotated[OutputFormat, typer.Option("--format", help="How to print the answer.")]
ClusterOption = Annotated[
    str | None, typer.Option("--cluster", help="Cluster: catalogue name or TOML file.", metavar="C")
]
StackOption = Annotated[str | None, typer.Option("--stack", help="Training software: catalogue name or TOML file.")]
CalibrationOption = Annotated[
    str | None,
    typer.Option("--calibration", help="Calibration file; `none` leaves the priors. Default: the shipped one, if any."),
]
RecipeArgument = Annotated[
    Path,
    typer.Argument(
        help="Recipe: a TOML file of model, cluster and training, or the name of a packaged one (laptop).",
        metavar="RECIPE.toml",
    ),
]
OverriddenRecipeArgument = Annotated[
    Path | None, typer.Argument(help="Recipe; the options below override it.", metavar="[RECIPE.toml]")
]
RetryOption = Annotated[
    list[str] | None,
    typer.Option("--retry", help="Run trials of this status again (oom, hang, fail, ...). Repeatable."),
]
TrustOption = Annotated[
    bool,
    typer.Option("--trust", help="Let the recipe name interpreters, libraries and images that the ranks then run."),
]
RunsOption = Annotated[Path, typer.Option("--runs", help="Folder under which each study has its own.")]


def retried(words: list[str] | None) -> frozenset[Status]:
    """The statuses to run again; raises TrimaranError naming a word that is none."""
    from trimaran.nouns.measurement import Status
    from trimaran.nouns.noun import TrimaranError

    known: dict[str, Status] = {status: status for status in get_args(Status)}
    for word in words or ():
        if word not in known:
            raise TrimaranError(f"--retry {word!r} is not a status: it is one of {', '.join(known)}")
    return frozenset(known[word] for word in words or ())
