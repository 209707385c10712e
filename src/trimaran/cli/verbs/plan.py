"""`trimaran plan`: every layout that is valid and fits, ranked, and why the others fall out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimaran.cli.options import (
    CalibrationOption,
    ClusterOption,
    FormatOption,
    OutputFormat,
    OverriddenRecipeArgument,
    RunsOption,
    StackOption,
)
from trimaran.cli.terminal import tell

if TYPE_CHECKING:
    from trimaran.cost.case import Case
    from trimaran.layout.layout import Layout
    from trimaran.nouns.workload import Workload
    from trimaran.planner.plan import Plan
    from trimaran.recipe.train_settings import TrainSettings
    from trimaran.report.tables import Format


def plan(
    recipe: OverriddenRecipeArgument = None,
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
    optimizer: Annotated[str | None, typer.Option(help="adam or sgd.")] = None,
    tokens: Annotated[float | None, typer.Option(help="Tokens to train on (300e9): gives days and cost.")] = None,
    ramp_up: Annotated[
        str | None, typer.Option(help="Batch ramp-up START,INCREMENT,SAMPLES; every step must divide.")
    ] = None,
    grow_nodes: Annotated[
        bool, typer.Option("--grow-nodes", help="Let nodes and micro-batch grow with the ramp-up, by restarts.")
    ] = False,
    gbs_tolerance: Annotated[float | None, typer.Option(help="Let GBS differ by this share (0.001).")] = None,
    mem_margin: Annotated[float | None, typer.Option(help="Share of memory left free. Default 0.05.")] = None,
    fix: Annotated[
        list[str] | None, typer.Option(help="Hold a choice: tp=8, recompute=full, mbs=1,2. May be repeated.")
    ] = None,
    objective: Annotated[
        str, typer.Option(help="time: fastest; cost: cheapest token; devices: fewest that meet a limit.")
    ] = "time",
    deadline_days: Annotated[float | None, typer.Option(help="Finish --tokens within so many days.")] = None,
    price: Annotated[float | None, typer.Option(help="Price of a device-hour, in place of the cluster's.")] = None,
    faults: Annotated[
        str | None, typer.Option(help="How often devices fail: catalogue name or TOML file. Counts with --tokens.")
    ] = None,
    budget: Annotated[float | None, typer.Option(help="Finish --tokens for at most so much money.")] = None,
    why: Annotated[
        str | None, typer.Option(help="Explain one layout, as dp8,tp4,pp12,mbs2, beside the best.", metavar="LAYOUT")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Trace one step of the best layouts' ranks, without devices (as train --dry-run)."
        ),
    ] = False,
    top: Annotated[int, typer.Option(help="How many layouts to rank.")] = 20,
    calibration: CalibrationOption = None,
    runs: RunsOption = Path("runs"),
    form: FormatOption = OutputFormat.table,
) -> None:
    """Rank every layout that is valid and fits.

    Example: trimaran plan --model bloom-176b --cluster jean-zay-a100-80gb --devices 384 --gbs 2048
    """
    import json

    from trimaran.cli.question import question_of
    from trimaran.nouns.noun import TrimaranError
    from trimaran.planner.goodput.forecast import forecast
    from trimaran.planner.planner import plan_with
    from trimaran.planner.sizes import on_devices
    from trimaran.report.forecasts import forecast_lines
    from trimaran.report.planned import FIELDS, as_json, explanation, headline, ramp_up_table, records
    from trimaran.report.tables import render

    question = question_of(
        recipe, runs, model=model, cluster=cluster, gbs=gbs, seq=seq, stack=stack, optimizer=optimizer, tokens=tokens,
        ramp_up=ramp_up, calibration=calibration, price=price, faults=faults,
    )  # fmt: skip
    settings = question.settings(
        devices, fix, goal=objective, deadline_days=deadline_days, budget=budget, top=top,
        gbs_tolerance=gbs_tolerance, mem_margin=mem_margin,
    )  # fmt: skip
    # Where nodes may grow with the batch, the layout of the full batch need not divide the small ones.
    case = question.case
    if grow_nodes and case.workload.ramp_up is None:
        raise TrimaranError(
            "--grow-nodes lets nodes grow with a batch ramp-up, which is not stated: state one, as --ramp-up "
            + ",".join(map(str, _a_ramp_up(case.workload)))
        )
    if grow_nodes and settings.gbs_tolerance:
        raise TrimaranError(
            f"--gbs-tolerance {settings.gbs_tolerance:g} lets the global batch differ from "
            f"{case.workload.global_batch}, to which --grow-nodes lets it grow: leave one of them out"
        )
    ranked = case.with_workload(case.workload.model_copy(update={"ramp_up": None})) if grow_nodes else case
    if why is not None:
        if check:
            raise TrimaranError("--check traces the best layouts of a plan, and --why explains one: leave one out")
        from trimaran.planner.why import explain
        from trimaran.report.explained import answer

        tell(answer(explain(why, ranked, settings), form.value))
        return
    if check:
        _refuse_check(case, form)
    planned = plan_with(ranked, settings)
    printed: Format = form.value
    schedule = None
    if case.workload.ramp_up:
        from trimaran.planner.ramp_up import ramp_up_schedule

        used = case.on(on_devices(case.cluster, planned.devices))
        schedule = ramp_up_schedule(
            planned.best.layout, used, planned.objective, mem_margin=planned.mem_margin
        )  # fmt: skip
    expected = forecast(ranked, planned, settings, question.recovery)
    if form is OutputFormat.json:
        tell(json.dumps(as_json(planned, schedule, expected), indent=2, allow_nan=False))
        return
    tell(headline(planned, assumes_stack=question.assumes_stack) + "\n", err=form is OutputFormat.csv)
    tell(render(records(planned), FIELDS, printed))
    tell("\n" + explanation(planned), err=form is OutputFormat.csv)
    if told := forecast_lines(expected, planned.best.days):
        tell(f"\n{told}", err=form is OutputFormat.csv)
    if schedule is not None:
        tell(f"\n{ramp_up_table(schedule, printed)}", err=form is OutputFormat.csv)
    if check:
        _check(_as_planned(ranked, planned), question.train)


def _a_ramp_up(workload: Workload) -> tuple[int, int, int]:
    """A ramp-up that the workload may have: from half its batch, where that is whole, over a tenth of its samples."""
    start = workload.global_batch // 2 if workload.global_batch % 2 == 0 else 1
    return start, start, max(1, int((workload.tokens or 3e11) / workload.seq_len / 10))


def _refuse_check(case: Case, form: OutputFormat) -> None:
    """Before a long search: what --check cannot trace or print."""
    from trimaran.nouns.noun import TrimaranError
    from trimaran.study.dry_run import refuse_untraceable
    from trimaran.study.torch_programs import require_torch

    require_torch("--check")
    if form is not OutputFormat.table:
        raise TrimaranError(
            f"--check prints tables of what it traced, not --format {form.value}: leave one of them out"
        )
    refuse_untraceable(case)


def _as_planned(case: Case, planned: Plan) -> list[tuple[Layout, Case]]:
    """The layouts that a plan of the case names to measure, each with the nodes and the batch of its entry."""
    from trimaran.planner.search.batches import with_batch
    from trimaran.planner.sizes import on_devices

    on_all = case.on(on_devices(case.cluster, planned.devices))
    batches = {entry.layout: entry.global_batch for entry in reversed(planned.entries)}
    return [(layout, on_all.with_workload(with_batch(case.workload, batches[layout]))) for layout in planned.measure]


def _check(asked: list[tuple[Layout, Case]], train: TrainSettings) -> None:
    """Trace layouts, one after the other, as `train --dry-run` does."""
    from trimaran.cli.live_progress import say
    from trimaran.report.dry_run import dry_run_table
    from trimaran.study.dry_run import dry_run

    for layout, case in asked:
        tell("\n" + dry_run_table(layout, case.cluster.name, dry_run(case, train, layout, say=say)))
