"""A published study measured on this machine: every table's layouts, mapped down, as trials of one store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trimaran.bench.sweep import Prediction, Progress, run_sweep
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.files.catalogue import load_stack
from trimaran.files.row_table import study_table
from trimaran.layout.rules import check_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.columns import FIT_QUALITIES
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.recipe.published import StudyTable
from trimaran.recipe.recipe import Recipe
from trimaran.recipe.sweep import SweepSettings
from trimaran.store import Store
from trimaran.study.published.scale import MOST_RANKS, SmallRow, small_rows
from trimaran.study.workspace import Workspace

STEPS, WARMUP_STEPS = 3, 1
TIMEOUT_S = 120.0
# Rows whose layout cannot be known are not repeated; cells that their authors left blank are.
REPEATED = (*FIT_QUALITIES, "suspect", "suspect_mem", "ambiguous", "duplicate", "repeat", "estimate")


def chosen_tables(recipe: Recipe, names: Sequence[str]) -> list[StudyTable]:
    """The study's tables of these names, all of them where none is named. Raises TrimaranError for a wrong name."""
    if not recipe.tables:
        raise TrimaranError(f"recipe {recipe.name} names no published tables: add [[tables]], or leave --scale out")
    known = {table.name: table for table in recipe.tables}
    for name in names:
        if name not in known:
            raise TrimaranError(f"--table {name!r} is not of {recipe.name}: it is one of {', '.join(known)}")
    return [known[name] for name in names] or list(recipe.tables)


def published_rows(table: StudyTable) -> list[Measurement]:
    """The table's rows whose layout is known, blank cells included."""
    return [row for row in study_table(table).measurements if row.quality in REPEATED and (row.dp or row.devices)]


def measure_small(
    recipe: Recipe,
    tables: Sequence[StudyTable],
    workspace: Workspace,
    *,
    on_progress: Callable[[Progress], None],
    say: Callable[[str], None],
) -> dict[str, list[tuple[SmallRow, Measurement | None]]]:
    """Every row of the tables with what was measured of it here; None where the small layout cannot run.

    Why it cannot is said.
    Rows that map to one small layout are one trial, and finished trials are kept, over all tables of the study.
    """
    rows = {table.name: small_rows(published_rows(table)) for table in tables}
    sweep = SweepSettings(steps=STEPS, warmup_steps=WARMUP_STEPS, timeout_s=TIMEOUT_S, devices=(MOST_RANKS,))
    first = next(iter(rows.values()))[0]
    base = Recipe(
        name=f"{recipe.name}-laptop",
        workload=first.workload,
        stack=load_stack("trimaran"),
        data=recipe.data,
        sweep=sweep,
    )
    cluster = workspace.cluster(base)
    data = workspace.data(base)
    out: dict[str, list[tuple[SmallRow, Measurement | None]]] = {}
    with Store(workspace.store) as store:

        def measured(small: SmallRow) -> Measurement | None:
            study = base.model_copy(update={"workload": small.workload})
            try:
                here = _cluster_of(cluster, small)
                check_layout(small.layout, small.workload, here, study.stack)
                found = estimate(Case.of(small.workload, here, study.stack), small.layout)
                prediction = {small.layout: Prediction(found.sec_per_it, found.reported_mem_gib)}
                (row,) = run_sweep(
                    study, here, [small.layout], store, data_dir=data, work_dir=workspace.trials,
                    predictions=prediction, on_progress=on_progress,
                )  # fmt: skip
            except TrimaranError as error:
                say(f"{small.layout} is left out: {error}")
                return None
            return row

        for table in tables:
            say(f"{table.name}: {len(rows[table.name])} rows")
            out[table.name] = [(small, measured(small)) for small in rows[table.name]]
    return out


def _cluster_of(cluster: Cluster, small: SmallRow) -> Cluster:
    if small.network is None:
        return cluster
    # a node for each rank: what is left of the machine takes no part
    return cluster.model_copy(update={"devices_per_node": small.layout.devices}).on(small.network)
