"""`trimaran bench`: measure each layout of a recipe's sweep into the store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimaran.cli.options import FormatOption, OutputFormat, RecipeArgument, RetryOption, RunsOption, TrustOption


def bench(
    recipe: RecipeArgument,
    runs: RunsOption = Path("runs"),
    retry: RetryOption = None,
    soak: Annotated[
        int, typer.Option(min=0, help="Steps that each trial makes beyond the recipe's, for memory that runs out late.")
    ] = 0,
    trust: TrustOption = False,
    form: FormatOption = OutputFormat.table,
) -> None:
    """Measure every layout that the recipe's sweep states; finished ones are kept, never repeated.

    Example: trimaran bench recipes/laptop.toml
    """
    from trimaran.bench import launcher_of, run_sweep
    from trimaran.bench.sweep import Prediction
    from trimaran.bench.workspace import Workspace, check_stated_layouts, require_own_trainer, stated_layouts
    from trimaran.cli.progress import TrialProgress, say
    from trimaran.cli.study import retried, some_ran
    from trimaran.cost.estimate import estimate
    from trimaran.files import load_recipe
    from trimaran.measurement import Measurement
    from trimaran.noun import TrimaranError
    from trimaran.report.measured import FIELDS, records
    from trimaran.report.tables import render
    from trimaran.store import Store
    from trimaran.variant import PLAIN, require_trust

    again = retried(retry)
    study = load_recipe(str(recipe))
    require_own_trainer(study)
    study = study.model_copy(update={"sweep": study.sweep.model_copy(update={"steps": study.sweep.steps + soak})})
    require_trust(study.sweep.variants, trust)
    layouts = list(dict.fromkeys(stated_layouts(study)))
    if not layouts:
        raise TrimaranError(
            f"recipe {recipe}: sweep.layouts is empty, so bench has nothing to measure: fill it, or tune"
        )
    place = Workspace(runs / study.name)
    cluster = place.cluster(study)
    clusters = [cluster.on(network) for network in study.sweep.networks] or [cluster]
    for one in clusters:
        check_stated_layouts(study, one)
    data = place.data(study)
    variants = study.sweep.variants or (PLAIN,)
    rows: list[Measurement] = []
    with Store(place.store) as store:
        for one in clusters:
            found = {layout: estimate(study.workload, one, study.stack, layout) for layout in layouts}
            predictions = {
                layout: Prediction(sec_per_it=e.sec_per_it, mem_gib=e.reported_mem_gib) for layout, e in found.items()
            }
            with (
                launcher_of(study.sweep, one, say) as launcher,
                TrialProgress(len(layouts) * len(variants)) as progress,
            ):
                rows += run_sweep(
                    study,
                    one,
                    layouts,
                    store,
                    data_dir=data,
                    work_dir=place.trials,
                    launcher=launcher,
                    predictions=predictions,
                    variants=variants,
                    retry=again,
                    on_progress=progress,
                )
    typer.echo(render(records(rows), FIELDS, form.value))
    some_ran(rows)
