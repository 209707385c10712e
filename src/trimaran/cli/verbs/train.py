"""`trimaran train`: train a recipe's model with a layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimaran.cli.joining import place_among_ranks
from trimaran.cli.options import RecipeArgument, RunsOption, TrustOption
from trimaran.cli.terminal import tell

if TYPE_CHECKING:
    from trimaran.layout.layout import Layout
    from trimaran.recipe.recipe import Recipe
    from trimaran.study.workspace import Workspace


def train(
    recipe: RecipeArgument,
    layout: Annotated[
        str | None, typer.Option(help="Layout, as dp2,tp2,pp2,mbs1. Default: the fastest measured one.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, on this layout or another.")
    ] = False,
    trace: Annotated[
        int, typer.Option(min=0, help="Profile so many steps, from the third on, into train/trace.RANK.json.")
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Trace one step of a rank of each kind, without devices, beside the plan.")
    ] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="With --dry-run: this rank alone.")] = None,
    runs: RunsOption = Path("runs"),
    trust: TrustOption = False,
) -> None:
    """Train all steps of a recipe; log, losses and result are left under RUNS/NAME/train, checkpoints beside it.

    SIGTERM, SIGUSR1, and SIGHUP of a lost terminal, end it with status 75 after a checkpoint. Under torchrun or srun
    its processes are the ranks.

    Example: trimaran train recipes/laptop.toml --layout dp2,mbs4
    """
    from trimaran.cli.live_progress import TrainingProgress, say
    from trimaran.layout.notation import parse_layout
    from trimaran.nouns.noun import TrimaranError
    from trimaran.report.training_summary import summary
    from trimaran.study.stated import runnable_recipe
    from trimaran.study.train_recipe import fastest_layout, measured_before, train_recipe
    from trimaran.study.workspace import Workspace

    if rank is not None and not dry_run:
        raise TrimaranError(f"--rank {rank} names the rank of a --dry-run: give both, or neither to train")
    if dry_run and (resume or trace):
        option = "--resume" if resume else f"--trace {trace}"
        raise TrimaranError(f"{option} is of a training, and --dry-run starts none: leave one of them out")
    joined = place_among_ranks()
    if dry_run and joined and joined.rank:
        return  # rank 0 traces for all
    stated = runnable_recipe(recipe, trust=trust)
    workspace = Workspace(runs / stated.name)
    chosen = parse_layout(layout, dict(stated.sweep.fixed)) if layout else fastest_layout(stated, workspace)
    if dry_run:
        tell(_traced(stated, workspace, chosen, rank))
        return
    if chosen is None:
        raise TrimaranError(
            f"no layout of {stated.name} was measured yet: give --layout, or `trimaran tune {recipe}` first"
        )
    row, cluster = train_recipe(
        stated, workspace, chosen, show=TrainingProgress, say=say, joined=joined, resume=resume, trace_steps=trace
    )
    before = measured_before(stated, workspace, row)
    tell(summary(row, stated, cluster, chosen, workspace.training, before))


def _traced(recipe: Recipe, workspace: Workspace, layout: Layout | None, rank: int | None) -> str:
    """A table of what a dry run traced, on the stated or the fastest measured layout, or else on the planned one."""
    from trimaran.cli.live_progress import say
    from trimaran.report.dry_run import dry_run_table
    from trimaran.study.dry_run import case_to_trace, dry_run
    from trimaran.study.train_recipe import planned_layout

    case = case_to_trace(recipe, workspace)
    chosen = layout or planned_layout(recipe, case.cluster)
    return dry_run_table(chosen, case.cluster.name, dry_run(case, recipe.train, chosen, rank, say=say))
