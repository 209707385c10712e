"""`trimaran tune`: plan, measure, learn, until the fastest layout is known; then train with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimaran.cli.options import FormatOption, OutputFormat, RecipeArgument, RetryOption, RunsOption, TrustOption
from trimaran.cli.terminal import tell


def tune(
    recipe: RecipeArgument,
    runs: RunsOption = Path("runs"),
    trust: TrustOption = False,
    retry: RetryOption = None,
    train: Annotated[bool, typer.Option("--train/--no-train", help="Train with the winner afterwards.")] = True,
    form: FormatOption = OutputFormat.table,
) -> None:
    """Find the fastest layout of a recipe by as few trials as possible, and train with it.

    Stops when no other layout is likely to be faster. Interrupted, it goes on where it stopped.

    Example: trimaran tune recipes/laptop.toml
    """
    from trimaran.cli.live_progress import TrainingProgress, TrialProgress, say
    from trimaran.cli.options import retried
    from trimaran.files.catalogue import write_atomically
    from trimaran.report.disturbance import disturbed
    from trimaran.report.measured_rows import FIELDS, records
    from trimaran.report.tables import render
    from trimaran.report.training_summary import summary
    from trimaran.study.stated import runnable_recipe
    from trimaran.study.train_recipe import train_recipe
    from trimaran.study.tune.tune_recipe import tune_recipe
    from trimaran.study.workspace import Workspace

    again = retried(retry)
    stated = runnable_recipe(recipe, trust=trust)
    workspace = Workspace(runs / stated.name)
    with TrialProgress(stated.sweep.max_trials, at_most=True) as progress:
        tuned = tune_recipe(
            stated, workspace, retry=again, training=train, on_progress=progress, on_verdict=progress.verdict, say=say
        )  # fmt: skip
    rows = records(tuned.rows)
    write_atomically(workspace.table, render(rows, FIELDS, "markdown") + "\n")
    tell(render(rows, FIELDS, form.value))
    best, verdict = tuned.winning_row, tuned.verdict
    within = f"{stated.sweep.margin:.0%}"
    certainty = f"certain to {within}"
    if not verdict.certain:
        certainty = f"not certain: with {verdict.rival_chance:.0%} chance another is faster by more than {within}"
    say(
        f"winner: {tuned.winner}, {best.sec_per_it:.3f} s/it (predicted {best.predicted_sec_per_it:.3f}), "
        f"{len(rows)} layouts measured; {certainty}"
    )
    if beside := disturbed(tuned.rows):
        say(beside)
    say(f"table in {workspace.table}, store in {workspace.store}")
    if train:
        row, cluster = train_recipe(
            stated, workspace, tuned.winner, show=TrainingProgress, say=say, cluster=tuned.cluster
        )  # fmt: skip
        told = summary(row, stated, cluster, tuned.winner, workspace.training, best)
        tell(told, err=form is not OutputFormat.table)
