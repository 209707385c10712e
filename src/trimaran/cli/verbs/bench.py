"""`trimaran bench`: measure each layout of a recipe's sweep into the store."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimaran.cli.options import FormatOption, OutputFormat, RecipeArgument, RetryOption, RunsOption, TrustOption
from trimaran.cost.case import Case

if TYPE_CHECKING:
    from trimaran.report.tables import Format


class Scale(StrEnum):
    """Sizes that a published study can be mapped down to."""

    laptop = "laptop"


def bench(
    recipe: RecipeArgument,
    runs: RunsOption = Path("runs"),
    retry: RetryOption = None,
    soak: Annotated[
        int, typer.Option(min=0, help="Steps that each trial makes beyond the recipe's, for memory that runs out late.")
    ] = 0,
    trust: TrustOption = False,
    scale: Annotated[
        Scale | None, typer.Option(help="laptop: the study's published tables, mapped down to this machine.")
    ] = None,
    table: Annotated[
        list[str] | None, typer.Option(help="With --scale: only this table of the study. May be repeated.")
    ] = None,
    form: FormatOption = OutputFormat.table,
) -> None:
    """Measure every layout that the recipe's sweep states; finished ones are kept, never repeated.

    Example: trimaran bench recipes/laptop.toml

    Example: trimaran bench recipes/bloom-176b.toml --scale laptop --table tp
    """
    if scale is not None:
        _small(recipe, table or [], runs, form)
        return
    from trimaran.bench.launch.network.launcher import require_shaping
    from trimaran.bench.registry import launcher_of
    from trimaran.bench.sweep import Prediction, run_sweep
    from trimaran.cli.asked import retried, some_ran
    from trimaran.cli.progress import TrialProgress, say
    from trimaran.cost.estimate import estimate
    from trimaran.files.recipe_file import load_recipe
    from trimaran.nouns.measurement import Measurement
    from trimaran.nouns.noun import TrimaranError
    from trimaran.nouns.variant import PLAIN, require_trust
    from trimaran.report.measured_rows import FIELDS, records
    from trimaran.report.tables import render
    from trimaran.store import Store
    from trimaran.study.workspace import Workspace, check_stated_layouts, require_own_trainer, stated_layouts

    again = retried(retry)
    study = load_recipe(str(recipe))
    require_own_trainer(study)
    study = study.model_copy(update={"sweep": study.sweep.model_copy(update={"steps": study.sweep.steps + soak})})
    require_trust(study.sweep.variants, trust)
    require_shaping(study.sweep.networks)
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
            found = {layout: estimate(Case.of(study.workload, one, study.stack), layout) for layout in layouts}
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


def _small(recipe: Path, names: list[str], runs: Path, form: OutputFormat) -> None:
    """Measure the study's tables mapped down, and answer each one's question."""
    import json

    from trimaran.cli.progress import TrialProgress, say
    from trimaran.files.recipe_file import load_recipe
    from trimaran.report.studied import FIELDS, answer, records
    from trimaran.report.tables import render
    from trimaran.study.published.measure import chosen_tables, measure_small, published_rows
    from trimaran.study.workspace import Workspace

    printed: Format = form.value
    study = load_recipe(str(recipe))
    tables = chosen_tables(study, names)
    with TrialProgress(sum(len(published_rows(table)) for table in tables)) as progress:
        place = Workspace(runs / f"{study.name}-laptop")
        found = measure_small(study, tables, place, on_progress=progress, say=say)
    if form is OutputFormat.json:
        told = [
            {"table": table.name, "answer": answer(table, found[table.name]), "rows": records(found[table.name])}
            for table in tables
        ]
        typer.echo(json.dumps(told, indent=2, allow_nan=False))
        return
    for table in tables:
        title = f"### {table.name}" if form is OutputFormat.markdown else table.name
        typer.echo(f"\n{title}\n\n{render(records(found[table.name]), FIELDS, printed)}\n")
        typer.echo(answer(table, found[table.name]))
