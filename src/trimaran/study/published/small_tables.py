"""Published tables measured on this machine: every table's layouts, mapped down, as trials of one store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trimaran.bench.launch.contract import NoNetworkError
from trimaran.bench.launchers import launcher_of
from trimaran.bench.sweep import run_sweep
from trimaran.files.catalogue import load_stack
from trimaran.files.row_table import published_table
from trimaran.layout.rules import check_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.columns import FIT_QUALITIES
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.recipe.published import PublishedTable
from trimaran.recipe.recipe import Recipe
from trimaran.recipe.sweep_settings import SweepSettings
from trimaran.store import Store
from trimaran.study.measure_recipe import ShowTrials, predicted
from trimaran.study.published.predicted_tables import chosen_tables
from trimaran.study.published.scale import MOST_RANKS, SmallRow, small_rows
from trimaran.study.workspace import Workspace

STEPS, WARMUP_STEPS = 3, 1
TIMEOUT_S = 300.0
# Characters of a recipe's name that leave room for what is put behind it.
_LONGEST_NAME = 90
# Rows whose layout cannot be known are not repeated; cells that their authors left blank are.
REPEATED = (*FIT_QUALITIES, "suspect", "suspect_mem", "ambiguous", "duplicate", "repeat", "estimate")


@dataclass(frozen=True)
class SmallTable:
    """A published table, and each of its rows with what was measured of it here; None where that cannot run."""

    published: PublishedTable
    rows: list[tuple[SmallRow, Measurement | None]]


def published_rows(table: PublishedTable) -> list[Measurement]:
    """The table's rows whose layout is known, blank cells included. Raises TrimaranError where there is none."""
    rows = published_table(table).measurements
    known = [row for row in rows if row.quality in REPEATED and (row.dp or row.devices)]
    if not known:
        raise TrimaranError(
            f"tables.{table.name}: the layout of none of its {len(rows)} rows is known, so that none can be measured "
            f"here: choose others by tables.where, or another table by --table"
        )
    return known


def measure_small(
    recipe: Recipe, names: Sequence[str], workspace: Workspace, *, show: ShowTrials, say: Callable[[str], None]
) -> list[SmallTable]:
    """The recipe's tables of these names, all of them where none is named, mapped down and measured.

    Rows that map to one small layout are one trial, and finished trials are kept, over all tables of the recipe.
    Why a small layout cannot run on this machine is said. Raises TrimaranError for a name that is no table of the
    recipe, and as `run_sweep` does for whatever keeps all trials from being run or stored.
    """
    tables = [(table, small_rows(published_rows(table))) for table in chosen_tables(recipe, names)]
    sweep = SweepSettings(steps=STEPS, warmup_steps=WARMUP_STEPS, timeout_s=TIMEOUT_S, devices=(MOST_RANKS,))
    name, workload = f"{recipe.name[:_LONGEST_NAME]}-laptop", tables[0][1][0].workload
    base = Recipe(name=name, workload=workload, stack=load_stack("trimaran"), data=recipe.data, sweep=sweep)
    with show(sum(len(rows) for _, rows in tables)) as on_progress:
        machine = workspace.cluster(base)
        data = workspace.data(base)
        # one launcher for all that need no network: what ranks are forked from is made once
        with Store(workspace.store) as store, launcher_of(sweep, machine) as here:

            def measured(small: SmallRow) -> Measurement | None:
                trial = base.model_copy(update={"workload": small.workload})
                try:
                    cluster = _cluster_of(machine, small)
                    check_layout(small.layout, small.workload, cluster, trial.stack)
                except TrimaranError as error:
                    say(f"{small.layout} is left out: {error}")
                    return None
                try:
                    (row,) = run_sweep(
                        trial, cluster, [small.layout], store, data_dir=data, work_dir=workspace.trials,
                        predictions=predicted(trial, cluster, [small.layout]), on_progress=on_progress, say=say,
                        launcher=None if cluster.shaped else here,
                    )  # fmt: skip
                except NoNetworkError as error:
                    say(f"{small.layout} is left out: {error}")
                    return None
                return row

            measured_tables = []
            for table, rows in tables:
                say(f"{table.name}: {len(rows)} rows")
                measured_tables.append(SmallTable(table, [(small, measured(small)) for small in rows]))
    return measured_tables


def _cluster_of(machine: Cluster, small: SmallRow) -> Cluster:
    if small.network is None:
        return machine
    # a node for each rank: what is left of the machine takes no part
    return machine.model_copy(update={"devices_per_node": small.layout.devices}).on(small.network)
