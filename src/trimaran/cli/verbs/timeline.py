"""`trimaran timeline`: who does what when in one iteration of a pipeline, simulated and measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimaran.cli.options import CalibrationOption, ClusterOption, RunsOption, StackOption
from trimaran.cost.case import Case

if TYPE_CHECKING:
    from trimaran.layout.layout import Layout
    from trimaran.nouns.timeline import Timeline


def timeline(
    recipe: Annotated[
        Path | None, typer.Argument(help="Recipe; the options below override it.", metavar="[RECIPE.toml]")
    ] = None,
    layout: Annotated[str, typer.Option(help="Layout, as pp4,mbs1 or dp8,tp4,pp12,mbs2.")] = "pp2,mbs1",
    output: Annotated[
        Path, typer.Option("--output", "-o", help=".json a Chrome or Perfetto trace; .png, .svg, .pdf a picture.")
    ] = Path("timeline.svg"),
    model: Annotated[str | None, typer.Option(help="Model: catalogue name, TOML file or config.json.")] = None,
    cluster: ClusterOption = None,
    gbs: Annotated[int | None, typer.Option(help="Global batch, sequences a step.")] = None,
    seq: Annotated[int | None, typer.Option(help="Sequence length, tokens. Default: the model's positions.")] = None,
    stack: StackOption = None,
    calibration: CalibrationOption = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run the recipe's layout too, and show both, one below the other.")
    ] = False,
    runs: RunsOption = Path("runs"),
) -> None:
    """Draw the pipeline schedule of a layout: every forward, backward and send of every rank.

    Example: trimaran timeline recipes/laptop.toml --layout pp2,mbs1 --measure -o timeline.svg

    Example: trimaran timeline --model gpt3-1b3 --cluster dgx-h100 --gbs 32 --layout dp1,tp1,pp4,mbs1 -o timeline.svg
    """
    from trimaran.cli.asked import study_of
    from trimaran.cost.simulate import pipeline_run, simulate
    from trimaran.layout.notation import parse_layout
    from trimaran.layout.rules import check_layout
    from trimaran.report.timelines import bubble_share, write_timelines

    study = study_of(
        recipe, runs, model=model, cluster=cluster, gbs=gbs, seq=seq, stack=stack, calibration=calibration
    )  # fmt: skip
    wanted = parse_layout(layout)
    check_layout(wanted, study.workload, study.cluster, study.stack)
    run = pipeline_run(Case.of(study.workload, study.cluster, study.stack, study.calibration), wanted)
    drawn = {"simulated": simulate(run)}
    if measure:
        drawn["measured"] = _measured(recipe, wanted, runs)
    write_timelines(drawn, output)
    told = ", ".join(f"{name} {one.duration_s:.3g} s, {bubble_share(one):.0%} bubble" for name, one in drawn.items())
    typer.echo(f"{wanted}: {told}; written to {output}", err=True)


def _measured(recipe: Path | None, layout: Layout, runs: Path) -> Timeline:
    from trimaran.bench.recorded import record_timeline
    from trimaran.cli.progress import say
    from trimaran.files.recipe_file import load_recipe
    from trimaran.nouns.noun import TrimaranError
    from trimaran.report.timelines import read_timeline
    from trimaran.study.workspace import Workspace, require_own_trainer

    if recipe is None:
        raise TrimaranError("--measure runs the layout, and needs a recipe to say with what: give RECIPE.toml")
    study = load_recipe(str(recipe))
    require_own_trainer(study)
    place = Workspace(runs / study.name)
    say(f"running {study.sweep.steps} steps with {layout}")
    cluster, data = place.cluster(study), place.data(study)
    return read_timeline(record_timeline(study, cluster, layout, data_dir=data, work_dir=place.folder / "timelines"))
