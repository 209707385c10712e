"""`trimaran tune`: plan, measure, learn, until the fastest layout is known; then train with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimaran.cli.options import FormatOption, OutputFormat, RecipeArgument, RetryOption, RunsOption, TrustOption


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
    from trimaran.cli.asked import retried
    from trimaran.cli.progress import TrainingProgress, TrialProgress, say
    from trimaran.files.catalogue import write_atomically
    from trimaran.files.recipe_file import load_recipe
    from trimaran.nouns.variant import require_trust
    from trimaran.report.measured_rows import FIELDS, records
    from trimaran.report.tables import render
    from trimaran.report.training import summary
    from trimaran.study.training import run_training
    from trimaran.study.tune.tune import tune as tune_study
    from trimaran.study.workspace import Workspace

    again = retried(retry)
    study = load_recipe(str(recipe))
    require_trust(study.sweep.variants, trust)
    place = Workspace(runs / study.name)
    with TrialProgress(study.sweep.max_trials, at_most=True) as progress:
        found = tune_study(study, place, retry=again, on_progress=progress, on_verdict=progress.verdict, say=say)
    rows = records(found.rows)
    write_atomically(place.table, render(rows, FIELDS, "markdown") + "\n")
    typer.echo(render(rows, FIELDS, form.value))
    row = found.winning_row
    verdict = found.verdict
    certainty = "certain" if verdict.certain else f"not certain: another may win with {verdict.rival_chance:.0%} chance"
    say(
        f"winner: {found.winner}, {row.sec_per_it:.3f} s/it (predicted {row.predicted_sec_per_it:.3f}), "
        f"{len(rows)} layouts measured; {certainty} to {study.sweep.margin:.0%}"
    )
    say(f"table in {place.table}, store in {place.store}")
    if not train:
        return
    say(f"training {study.train.steps} steps with {found.winner}; log in {place.training}")
    data = place.data(study)
    with TrainingProgress(study.train.steps) as shown:
        trained = run_training(
            study, found.cluster, found.winner, data_dir=data, out_dir=place.training, on_step=shown, on_notice=say
        )
    typer.echo(summary(trained, study, found.cluster, found.winner, place.training), err=form is not OutputFormat.table)
