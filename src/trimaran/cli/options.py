"""Options that several verbs share, so that they read and behave the same everywhere."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from typer.models import OptionInfo

if TYPE_CHECKING:
    from trimaran.nouns.columns import Status


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


def written_file(says: str) -> OptionInfo:
    """The option for the file that a verb writes its answer to, refused before the work where it cannot be written."""
    option: OptionInfo = typer.Option("--output", "-o", callback=_writable, help=says)
    return option


def _writable(path: Path | None) -> Path | None:
    """The same path; raises TrimaranError where its folder cannot be written, or a folder or a pipe has its name."""
    from trimaran.nouns.noun import TrimaranError

    if path is None:
        return None
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe or a device"
        raise TrimaranError(f"--output {path} is {kind}: name a file to write")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise TrimaranError(f"--output {path}: nothing can be written into {folder}; choose another path")
    return path


def retried(words: list[str] | None) -> frozenset[Status]:
    """The statuses to run again; raises TrimaranError naming a word that is none."""
    from trimaran.nouns.columns import Status
    from trimaran.nouns.noun import TrimaranError

    known: dict[str, Status] = {status: status for status in get_args(Status)}
    for word in words or ():
        if word not in known:
            raise TrimaranError(f"--retry {word!r} is not a status: it is one of {', '.join(known)}")
    return frozenset(known[word] for word in words or ())
