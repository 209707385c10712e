"""`trimaran train`: train a recipe's model with a layout."""

from __future__ import annotations

import atexit
import io
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimaran.cli.options import RecipeArgument, RunsOption, TrustOption

if TYPE_CHECKING:
    from trimaran.layout.layout import Layout
    from trimaran.recipe.recipe import Recipe
    from trimaran.study.workspace import Workspace

# torchrun ends all ranks when one has left: the others wait until rank 0 has said why it refuses.
SPEAKS_WITHIN_S = 5.0


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
    runs: RunsOption = Path("runs"),
    trust: TrustOption = False,
) -> None:
    """Train all steps of a recipe; log, losses and result are left under RUNS/NAME/train, checkpoints beside it.

    SIGTERM and SIGUSR1 end it with status 75 after a checkpoint. Under torchrun or srun its processes are the ranks.

    Example: trimaran train recipes/laptop.toml --layout dp2,mbs4
    """
    from trimaran.bench.launch.joined import joined
    from trimaran.cli.progress import TrainingProgress, say
    from trimaran.files.recipe_file import load_recipe
    from trimaran.layout.notation import parse_layout
    from trimaran.layout.rules import check_layout
    from trimaran.nouns.noun import TrimaranError
    from trimaran.nouns.variant import require_trust
    from trimaran.report.training import summary
    from trimaran.study.training import run_training
    from trimaran.study.workspace import Workspace, require_own_trainer

    among = joined(os.environ)
    if among and among.rank:
        sys.stderr = io.StringIO()  # rank 0 says the same
        atexit.register(time.sleep, SPEAKS_WITHIN_S)
    study = load_recipe(str(recipe))
    require_trust(study.sweep.variants, trust)
    require_own_trainer(study)
    place = Workspace(runs / study.name)
    chosen = parse_layout(layout, dict(study.sweep.fixed)) if layout else _fastest(study, place, recipe)
    if among and among.world_size != chosen.devices:
        raise TrimaranError(f"layout {chosen} needs {chosen.devices} ranks, but {among.world_size} were started")
    if among and among.rank:
        among.follow()
    cluster = place.cluster(study, [chosen])
    check_layout(chosen, study.workload, cluster, study.stack)
    data = place.data(study)
    say(f"training {study.train.steps} steps with {chosen}; log in {place.training}")
    with TrainingProgress(study.train.steps) as progress:
        row = run_training(
            study, cluster, chosen, data_dir=data, out_dir=place.training,
            resume=resume, among=among, trace_steps=trace, on_step=progress, on_notice=say,
        )  # fmt: skip
    typer.echo(summary(row, study, cluster, chosen, place.training))


def _fastest(study: Recipe, place: Workspace, recipe: Path) -> Layout:
    """The fastest layout that was measured for this recipe's workload. Raises TrimaranError when there is none.

    The store may hold rows of the same recipe from before its model or batch was changed.
    """
    from trimaran.files.row_nouns import measured_workload
    from trimaran.layout.notation import parse_layout
    from trimaran.nouns.noun import TrimaranError
    from trimaran.store import Store

    rows = []
    if place.store.exists():
        with Store(place.store) as store:
            rows = [
                row
                for row in store.measurements(recipe=study.name)
                if row.status == "ok"
                and row.sec_per_it
                and (row.variant or "") == study.variant.text()
                and measured_workload(row, study.workload)
            ]
    if not rows:
        raise TrimaranError(
            f"no layout of {study.name} was measured yet: give --layout, or `trimaran tune {recipe}` first"
        )
    fastest = min(rows, key=lambda row: row.sec_per_it or 0.0)
    return parse_layout(fastest.layout_label or "")
