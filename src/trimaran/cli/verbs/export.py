"""`trimaran export`: a layout as another trainer's flags or configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimaran.cli.options import ClusterOption, OverriddenRecipeArgument, RunsOption, StackOption
from trimaran.cli.terminal import tell


def export(
    recipe: OverriddenRecipeArgument = None,
    to: Annotated[
        str, typer.Option("--to", help="megatron-lm, megatron-deepspeed, torchtitan or deepspeed.")
    ] = "megatron-lm",
    layout: Annotated[
        str | None, typer.Option(help="Layout, as dp8,tp4,pp12,mbs2. Default: the best of the plan.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model: catalogue name, TOML file or config.json.")] = None,
    cluster: ClusterOption = None,
    gbs: Annotated[int | None, typer.Option(help="Global batch, sequences a step.")] = None,
    devices: Annotated[int | None, typer.Option(help="Devices to use at most. Default: all of the cluster.")] = None,
    seq: Annotated[
        int | None, typer.Option("--seq-len", "--seq", help="Sequence length, tokens. Default: the model's positions.")
    ] = None,
    stack: StackOption = None,
    ramp_up: Annotated[str | None, typer.Option(help="Batch ramp-up START,INCREMENT,SAMPLES.")] = None,
    fix: Annotated[list[str] | None, typer.Option(help="Hold a choice: tp=8. May be repeated.")] = None,
    runs: RunsOption = Path("runs"),
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write. Default: print.")] = None,
) -> None:
    """Write a layout as flags of Megatron-LM or Megatron-DeepSpeed, or as a torchtitan or DeepSpeed config.

    Example: trimaran export --to megatron-deepspeed --model bloom-176b --cluster jean-zay-a100-80gb --gbs 2048
    """
    from trimaran.cli.question import TRAINER_STACKS, question_of
    from trimaran.files.catalogue import write_atomically
    from trimaran.layout.rules import check_layout
    from trimaran.planner.export.exporters import export as write
    from trimaran.planner.export.exporters import first_exported
    from trimaran.planner.planner import on_devices, plan_with
    from trimaran.planner.why import complete

    # Without a stack (or a recipe's) the layout is planned for the software that will run it.
    chosen_stack = stack or (None if recipe else TRAINER_STACKS.get(to))
    question = question_of(
        recipe, runs, model=model, cluster=cluster, gbs=gbs, seq=seq, stack=chosen_stack, ramp_up=ramp_up
    )
    case, settings = question.case, question.settings(devices, fix)
    if layout is None:
        layouts = [entry.layout for entry in plan_with(case, settings).entries]
        chosen, text = first_exported(layouts, case.workload, case.stack, to)
    else:
        chosen = complete(layout, case, settings)
        check_layout(chosen, case.workload, on_devices(case.cluster, settings.devices or 0), case.stack)
        text = write(chosen, case.workload, case.stack, to)
    tell(f"layout {chosen}", err=True)
    if output is None:
        tell(text)
    else:
        write_atomically(output, text + "\n")
