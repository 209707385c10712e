"""Every table of the five published documents: predicted at full size, measured on this machine mapped down.

Writes recipes/README.md. Finished trials are kept under runs/, so that a run that was stopped goes on.

    make recipes
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trimaran.bench.trial.machine import hardware
from trimaran.cli.live_progress import TrialProgress, say
from trimaran.cost.table.predict_table import predict_table, score_groups
from trimaran.files.catalogue import write_atomically
from trimaran.files.recipe_file import load_recipe
from trimaran.files.row_table import published_table
from trimaran.recipe.recipe import Recipe
from trimaran.report.published_answers import answer
from trimaran.report.tables import Field, render
from trimaran.study.published.small_tables import SmallTable, measure_small
from trimaran.study.workspace import Workspace

ROOT = Path(__file__).parents[1]
RECIPES = ("fugaku-gpt-1b3", "fugaku-gpt-30b", "bigscience-1b3-v100", "gpt3-xl-p3", "bloom-176b")
FIELDS = (
    Field("table", "Table", left=True),
    Field("rows", "Rows"),
    Field("timed", "Timed"),
    Field("mape", "Sec/it MAPE", ".1%"),
    Field("tau", "Rank tau", ".2f"),
    Field("regret", "Top-1 regret", ".1%"),
    Field("here", "Measured here"),
    Field("answer", "Answer", left=True),
)
HEADER = """# The five documents as recipes

Every table of runs in the five published documents is a `[[tables]]` of one of these recipes (BigScience's two
ramp-up schedules are no runs). Each runs in three ways:

```sh
trimaran predict recipes/bloom-176b.toml
trimaran bench recipes/bloom-176b.toml --scale laptop --table tp
trimaran bench recipes/bloom-176b.toml
```

The first predicts every row at full size beside what was published. The second maps the layouts down to this machine
by the rule that `src/trimaran/study/published/scale.py` states, measures them for real, cells that the authors left
blank included, and answers the table's question from the data. The third is the recipe's own sweep, for a cluster of
its size.

Beside them stand recipes of this machine's own: `laptop.toml`, the main job; `laptop-long.toml`, a Llama on 8,192
tokens, whose sequences ranks share in three ways, a few minutes with `trimaran tune`; `laptop-moe.toml`, a mixture of
8 experts, dealt out (EP) and cut (ETP), as long; `network-laptop.toml` and `network-ps-laptop.toml`, which put nodes
behind slow links; `slow-network-laptop.toml`, replicas behind one that send each other fewer bytes, or less often.

What follows is written by `make recipes`. MAPE, tau and regret are of the shipped calibrations, which were made from
these tables; what holds for rows that a fit has not seen stands in `benchmarks/results/fidelity.md`.
"""


def measured(recipe: Recipe, runs: Path) -> list[SmallTable]:
    """Every table of a recipe, measured mapped down; finished trials are kept."""
    return measure_small(recipe, (), Workspace(runs / f"{recipe.name}-laptop"), show=TrialProgress, say=say)


def section(recipe: Recipe, measured_tables: list[SmallTable] | None) -> str:
    """One recipe's section of the page; `measured_tables` is None where they are not measured yet."""
    records = []
    for number, table in enumerate(recipe.tables):
        rows = published_table(table)
        scores = score_groups(predict_table(rows))
        score = scores[-1].time if scores else None
        small = [] if measured_tables is None else measured_tables[number].rows
        records.append(
            {
                "table": table.name,
                "rows": len(rows.rows),
                "timed": score.rows if score else 0,
                "mape": score.mape if score else None,
                "tau": score.tau if score else None,
                "regret": score.regret if score else None,
                "here": f"{sum(row is not None and row.status == 'ok' for _, row in small)} of {len(rows.rows)}",
                "answer": "not measured yet" if measured_tables is None else answer(table, small),
            }
        )
    return f"## {recipe.name}\n\n{render(records, FIELDS, 'markdown')}\n"


def main() -> None:
    """Run all recipes; the page is written after each."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--runs", type=Path, default=ROOT / "runs")
    runs = arguments.parse_args().runs
    recipes = [load_recipe(str(ROOT / "recipes" / f"{name}.toml")) for name in RECIPES]
    found: dict[str, list[SmallTable]] = {}
    for recipe in recipes:
        found[recipe.name] = measured(recipe, runs)
        told = f"Measured on {hardware()}.\n"
        sections = [section(known, found.get(known.name)) for known in recipes]
        write_atomically(ROOT / "recipes" / "README.md", "\n".join([HEADER, told, *sections]))


if __name__ == "__main__":
    main()
