"""`trimaran timeline`: who does what when in one iteration of a pipeline, simulated and measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimaran.cli.options import (
    CalibrationOption,
    ClusterOption,
    OverriddenRecipeArgument,
    RunsOption,
    StackOption,
    TrustOption,
    written_file,
)
from trimaran.cli.terminal import tell

if TYPE_CHECKING:
    from trimaran.layout.layout import Layout
    from trimaran.nouns.timeline import Timeline


def timeline(
    recipe: OverriddenRecipeArgument = None,
    layout: Annotated[str, typer.Option(help="Layout, as pp4,mbs1 or dp8,tp4,pp12,mbs2.")] = "pp2,mbs1",
    output: Annotated[Path, written_file(".json a Chrome or Perfetto trace; .png, .svg, .pdf a picture.")] = Path(
        "timeline.svg"
    ),
    model: Annotated[str | None, typer.Option(help="Model: catalogue name, TOML file or config.json.")] = None,
    cluster: ClusterOption = None,
    gbs: Annotated[int | None, typer.Option(help="Global batch, sequences a step.")] = None,
    seq: Annotated[
        int | None, typer.Option("--seq-len", "--seq", help="Sequence length, tokens. Default: the model's positions.")
    ] = None,
    stack: StackOption = None,
    calibration: CalibrationOption = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run the recipe's layout too, and show both, one below the other.")
    ] = False,
    runs: RunsOption = Path("runs"),
    trust: TrustOption = False,
) -> None:
    """Draw the pipeline schedule of a layout: every forward, backward and send of every rank.

    Example: trimaran timeline recipes/laptop.toml --layout pp2,mbs1 --measure -o timeline.svg

    Example: trimaran timeline --model gpt3-1b3 --cluster dgx-h100 --gbs 32 --layout dp1,tp1,pp4,mbs1 -o timeline.svg
    """
    from trimaran.cli.question import question_of
    from trimaran.cost.simulate import pipeline_run, simulate
    from trimaran.layout.notation import parse_layout
    from trimaran.layout.rules import check_layout
    from trimaran.nouns.noun import TrimaranError
    from trimaran.report.timelines import bubble_share, check_ending, write_timelines

    check_ending(output)
    over = {"--model": model, "--cluster": cluster, "--gbs": gbs, "--seq-len": seq, "--stack": stack}
    if recipe and measure and (option := next((option for option, value in over.items() if value is not None), None)):
        raise TrimaranError(
            f"{option} {over[option]} simulates another run than the recipe's, which --measure runs: state it in the "
            f"recipe, or leave --measure out"
        )
    question = question_of(
        recipe, runs, model=model, cluster=cluster, gbs=gbs, seq=seq, stack=stack, calibration=calibration
    )
    case = question.case
    chosen = parse_layout(layout, dict(question.sweep.fixed) if question.sweep else None)
    check_layout(chosen, case.workload, case.cluster, case.stack)
    timelines = {"simulated": simulate(pipeline_run(case, chosen))}
    if measure:
        timelines["measured"] = _measured(recipe, chosen, runs, trust=trust)
    write_timelines(timelines, output)
    told = ", ".join(
        f"{name} {drawn.duration_s:.3g} s, {bubble_share(drawn):.0%} bubble" for name, drawn in timelines.items()
    )
    tell(f"{chosen}: {told}; written to {output}", err=True)


def _measured(path: Path | None, layout: Layout, runs: Path, *, trust: bool) -> Timeline:
    from trimaran.cli.live_progress import say
    from trimaran.nouns.noun import TrimaranError
    from trimaran.study.measure_recipe import measure_timeline
    from trimaran.study.stated import runnable_recipe
    from trimaran.study.workspace import Workspace

    if path is None:
        raise TrimaranError("--measure runs the layout, and needs a recipe to say with what: give RECIPE.toml")
    recipe = runnable_recipe(path, trust=trust)
    return measure_timeline(recipe, Workspace(runs / recipe.name), layout, say=say)
