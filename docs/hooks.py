"""What MkDocs takes from elsewhere: pages of the repository, every verb's --help, the table columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import typer
from typer.main import get_command

from trimaran.cli.app import app
from trimaran.files.catalogue import catalogue_names, load_cluster, load_model, load_stack
from trimaran.nouns.columns import BY_NAME
from trimaran.report.tables import Field, render

ROOT = Path(__file__).parents[1]
VERBS, TABLE = "<!-- verbs -->", "<!-- columns -->"
MODELS, CLUSTERS, STACKS = "<!-- models -->", "<!-- clusters -->", "<!-- stacks -->"
PAGES = {
    "<!-- readme -->": "README.md",
    "<!-- contributing -->": "CONTRIBUTING.md",
    "<!-- studies -->": "recipes/README.md",
}
# Where the site has what these pages point to in the repository.
MOVED = {
    "](docs/": "](",
    "](recipes/README.md)": "](studies.md)",
    "](CONTRIBUTING.md)": "](contributing.md)",
    "](benchmarks/results)": "](fidelity.md)",
    "](src/trimaran/catalog)": "](reference/catalogue.md)",
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill the marks of the pages that are the repository's and of the reference."""
    for mark, file in PAGES.items():
        if mark in markdown:
            markdown = (ROOT / file).read_text(encoding="utf-8")
            for there, here in MOVED.items():
                markdown = markdown.replace(there, here)
    if VERBS in markdown:
        markdown = markdown.replace(VERBS, verbs())
    if TABLE in markdown:
        markdown = markdown.replace(TABLE, columns())
    for mark, table in ((MODELS, models), (CLUSTERS, clusters), (STACKS, stacks)):
        if mark in markdown:
            markdown = markdown.replace(mark, table())
    return markdown


def verbs() -> str:
    """A section a verb: its help text, its arguments and options."""
    root = get_command(app)
    assert isinstance(root, click.Group | typer.core.TyperGroup)
    return "\n".join(_section(command, f"trimaran {name}", 2) for name, command in root.commands.items())


def _section(command: Any, name: str, level: int) -> str:
    context = click.Context(command, info_name=name)
    lines = [f"{'#' * level} {name}", ""]
    for part in (command.help or "").split("\n\n"):
        text = " ".join(part.split())
        example = text.removeprefix("Example: ")
        lines += ["```sh", example, "```", ""] if example != text else [text, ""]
    shown = [parameter for parameter in command.params if parameter.name != "help"]
    if shown:
        lines += ["| argument or option | meaning |", "| --- | --- |"]
        lines += [_row(parameter, context) for parameter in shown]
        lines.append("")
    for child, below in getattr(command, "commands", {}).items():
        lines.append(_section(below, f"{name} {child}", level + 1))
    return "\n".join(lines)


def _row(parameter: Any, context: click.Context) -> str:
    is_option = parameter.param_type_name == "option"
    name = (
        ", ".join(f"`{word}`" for word in parameter.opts) if is_option else f"`{parameter.metavar or parameter.name}`"
    )
    help_text = (getattr(parameter, "help", None) or "").replace("|", "\\|").replace("<", "&lt;")
    default = parameter.get_default(context)
    told = is_option and not isinstance(default, bool) and isinstance(default, str | int | float | Path)
    said = f" Default: `{getattr(default, 'value', default)}`." if told else ""
    return f"| {name} | {help_text}{said} |"


def columns() -> str:
    """The table contract, from the one list that the program reads."""
    lines = ["| column | type | unit | default | meaning |", "| --- | --- | --- | --- | --- |"]
    for column in BY_NAME.values():
        default = "required" if column.required else "" if column.default is None else f"`{column.default}`"
        choices = f" One of {', '.join(column.choices)}." if column.choices else ""
        lines.append(f"| `{column.name}` | {column.kind} | {column.unit} | {default} | {column.says}.{choices} |")
    return "\n".join(lines)


def models() -> str:
    """The catalogue's models by their sizes."""
    fields = (
        Field("name", "`--model`", left=True),
        Field("billions", "parameters", ".3g", " x 10^9"),
        *(Field(key, key) for key in ("layers", "hidden", "heads", "experts", "tokens")),
    )
    known = {name: load_model(name) for name in catalogue_names("models")}
    rows = [
        {
            "name": f"`{name}`",
            "billions": model.unpadded_parameters / 1e9,
            "layers": model.layers,
            "hidden": model.hidden,
            "heads": model.heads,
            "experts": f"{model.top_k} of {model.experts}" if model.experts else None,
            "tokens": f"{model.max_positions:,}",
        }
        for name, model in known.items()
    ]
    return render(rows, fields, "markdown")


def clusters() -> str:
    """The catalogue's clusters: their devices, and what their figures come from."""
    fields = (
        Field("name", "`--cluster`", left=True), Field("devices", "devices", left=True),
        Field("source", "source", left=True),
    )  # fmt: skip
    known = {name: load_cluster(name) for name in catalogue_names("clusters")}
    rows = [
        {
            "name": f"`{name}`",
            "devices": f"{cluster.devices:,} {cluster.device.name}, {cluster.device.mem_gib:g} GiB each",
            "source": cluster.source,
        }
        for name, cluster in known.items()
    ]
    return render(rows, fields, "markdown")


def stacks() -> str:
    """The catalogue's stacks: the software and the version that each stands for."""
    fields = Field("name", "`--stack`", left=True), Field("software", "software", left=True)
    rows = [{"name": f"`{name}`", "software": load_stack(name).software} for name in catalogue_names("stacks")]
    return render(rows, fields, "markdown")
