"""Options that several verbs share, so that they read and behave the same everywhere."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


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
RecipeArgument = Annotated[Path, typer.Argument(help="Recipe: a TOML file that states a study.", metavar="RECIPE.toml")]
RetryOption = Annotated[
    list[str] | None,
    typer.Option("--retry", help="Run trials of this status again (oom, hang, fail, ...). Repeatable."),
]
TrustOption = Annotated[
    bool, typer.Option("--trust", help="Let the recipe name interpreters and libraries that the ranks then run.")
]
RunsOption = Annotated[Path, typer.Option("--runs", help="Folder under which each study has its own.")]
