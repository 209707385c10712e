"""The verbs, registered; each lives in a file of its own name."""

from __future__ import annotations

from typing import Annotated

import typer

from trimaran.cli.verbs import (
    bench,
    convert,
    data,
    explore,
    export,
    fit,
    import_,
    plan,
    predict,
    probe,
    report,
    sample,
    store,
    timeline,
    train,
    tune,
)
from trimaran.version import __version__

app = typer.Typer(
    name="trimaran",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Finds the fastest way to train a given transformer on a given cluster, proves it, and trains with it.",
)
for verb in (
    probe.probe, plan.plan, export.export, predict.predict, fit.fit, bench.bench, tune.tune, data.data, train.train,
    sample.sample, convert.convert, report.report, timeline.timeline, explore.explore,
):  # fmt: skip
    app.command()(verb)
app.command("import")(import_.import_)
app.add_typer(store.store, name="store")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"trimaran {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Global options."""
