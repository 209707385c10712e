"""`trimaran export`: a layout as another trainer's flags or configuration, or as a manifest that starts a training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimaran.cli.options import ClusterOption, OverriddenRecipeArgument, RunsOption, StackOption, written_file
from trimaran.cli.terminal import tell


def export(
    recipe: OverriddenRecipeArgument = None,
    to: Annotated[
        str,
        typer.Option(
            "--to", help="megatron-lm, megatron-deepspeed, torchtitan or deepspeed; trainjob, jobset or skypilot."
        ),
    ] = "megatron-lm",
    layout: Annotated[
        str | None,
        typer.Option(
            help="Layout, as dp8,tp4,pp12,mbs2; what it leaves out is chosen as a plan would, unless it states dp, tp, "
            "pp, mbs and precision. Default: the best of the plan."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model: catalogue name, TOML file or config.json.")] = None,
    cluster: ClusterOption = None,
    gbs: Annotated[int | None, typer.Option(help="Global batch, sequences a step.")] = None,
    devices: Annotated[
        int | None, typer.Option(help="Devices to use at most. Default: the cluster, or what of it is worth it.")
    ] = None,
    seq: Annotated[
        int | None, typer.Option("--seq-len", "--seq", help="Sequence length, tokens. Default: the model's positions.")
    ] = None,
    stack: StackOption = None,
    ramp_up: Annotated[str | None, typer.Option(help="Batch ramp-up START,INCREMENT,SAMPLES.")] = None,
    fix: Annotated[list[str] | None, typer.Option(help="Hold a choice: tp=8. May be repeated.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A field of a manifest, over the recipe's own: image=NAME. May be repeated."),
    ] = None,
    runs: RunsOption = Path("runs"),
    for_version: Annotated[
        str | None,
        typer.Option(
            "--for-version",
            help="The trainer's version where its forms differ: megatron-lm 0.19 ... 0.15, torchtitan "
            "0.3 or 0.2, deepspeed 0.19 or 0.18. Default: the newest.",
            metavar="V",
        ),
    ] = None,
    output: Annotated[Path | None, written_file("File to write. Default: print.")] = None,
) -> None:
    """Write a layout as flags or configuration of another trainer, or as a manifest that starts a recipe's training.

    Manifests are a TrainJob of Kubeflow Trainer, a JobSet of Kubernetes, a task of SkyPilot.

    Example: trimaran export --to megatron-deepspeed --model bloom-176b --cluster jean-zay-a100-80gb --gbs 2048
    """
    from dataclasses import replace

    from trimaran.cli.question import question_of
    from trimaran.cli.starting import require_recipe_as_it_stands, start_of
    from trimaran.files.catalogue import write_atomically
    from trimaran.layout.layout import Layout
    from trimaran.layout.rules import check_layout
    from trimaran.nouns.noun import TrimaranError
    from trimaran.planner.export.exporters import exporter_of, first_exported
    from trimaran.planner.planner import plan_with
    from trimaran.planner.sizes import on_devices
    from trimaran.planner.why import complete

    exporter = exporter_of(to, for_version)  # a word that is not known is told before a search of seconds
    starts = exporter.starts
    if starts:
        require_recipe_as_it_stands(
            recipe, model=model, cluster=cluster, gbs=gbs, seq_len=seq, stack=stack, ramp_up=ramp_up
        )
    elif settings:
        raise TrimaranError(f"--set {settings[0]} is of a manifest, and {to} is another trainer's: leave it out")
    # Without a stack (or a recipe's) the layout is planned for the software that will run it.
    chosen_stack = stack or (None if recipe else exporter.stack)
    question = question_of(
        recipe, runs, model=model, cluster=cluster, gbs=gbs, seq=seq, stack=chosen_stack, ramp_up=ramp_up
    )
    case, search = question.case, question.settings(devices, fix)
    start = start_of(recipe, settings or [], case.cluster) if starts else None
    narrowed = replace(case, stack=exporter.planned_for(case.stack, case.model, for_version))
    seconds: list[float] = []
    if start is not None and start.sweeps:
        if layout is not None:
            raise TrimaranError(
                f"--layout {layout} is of a training, and manifest.verb is {start.settings.verb}: a sweep measures the "
                f"recipe's layouts; leave it out"
            )
        layouts = [Layout()]  # of none: a sweep starts the ranks of each of its own
    elif layout is None:
        entries = plan_with(narrowed, search).entries
        layouts, seconds = [entry.layout for entry in entries], [entry.sec_per_it for entry in entries]
    else:
        layouts = [complete(layout, narrowed, search)]
        check_layout(layouts[0], case.workload, on_devices(case.cluster, search.devices or 0), case.stack)
    chosen = first_exported(layouts, case.workload, case.stack, to, for_version, start)
    if start is None or not start.sweeps:
        tell(f"layout {chosen.layout}", err=True)
    if chosen.passed:
        slower = f"{seconds[chosen.passed] / seconds[0]:.2f} times the first one's time"
        tell(f"note: it is number {chosen.passed + 1} of the plan, {slower}, since {chosen.refused}", err=True)
    if output is None:
        tell(chosen.text)
    else:
        write_atomically(output, chosen.text + "\n")
