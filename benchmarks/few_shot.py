"""What a few rows of a table teach: the error on its other rows, before and after a fit to 0, 1, 3 and 8 of them.

    python benchmarks/few_shot.py [--draws 10] [--tables NAME ...]

Each line is a table under a start. "elsewhere": nothing of the cluster is known but what other clusters taught of the
software. "earlier", "others": what a fit learns of the table's earlier days or other groups, of which no row is
drawn or scored. Medians over random draws, on the rows not drawn; repeats of one configuration are averaged before.
The error of the unfitted start on the same rows stands in brackets. Of tables of more than 80 rows, 80 stand for all;
a start from other days or groups is a fit to 60 of their rows at most.
Writes benchmarks/results/few_shot.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from trimaran.cost.calibration import Calibration, learned_elsewhere, shipped
from trimaran.cost.fit.fit_rows import fit_observations, observation
from trimaran.cost.fit.learn import averaged
from trimaran.cost.fit.solve import Observation, batches, predict_memory, predict_times
from trimaran.cost.grid import Floats
from trimaran.cost.score import kendall_tau, mape
from trimaran.files.catalogue import write_atomically
from trimaran.files.row_table import packaged_table, packaged_tables, read_table
from trimaran.nouns.columns import FIT_QUALITIES
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError

RESULTS = Path(__file__).parent / "results" / "few_shot.md"
# Tables that are not packaged: read where the folder lies beside the repository.
MODERN = Path(__file__).parent.parent.parent / "shared" / "tables" / "modern"
SHOTS = (1, 3, 8)
# Of a larger table so many rows stand for all, the same in every run.
MOST_ROWS, MOST_KNOWN = 80, 60
FEWEST_SCORED = 4
DEEPSPEED = "megatron-deepspeed"
BIGSCIENCE = ("jean-zay-v100-16gb", "jean-zay-v100-32gb")
FUGAKU = ("fugaku-a64fx", "fugaku-a64fx-2.2ghz")


@dataclass(frozen=True)
class Rows:
    """Rows of one table and stack on clusters of the same machines, those known before apart from those to be drawn."""

    name: str
    table: str
    stack: str
    clusters: tuple[str, ...]
    start: str = "elsewhere"
    known: Callable[[Measurement, int], bool] = lambda row, group: False


def odd_group(row: Measurement, group: int) -> bool:
    """Every second comparable group."""
    return group % 2 == 1


TABLES = (
    Rows("BLOOM prequel, A100", "seeds", DEEPSPEED, ("jean-zay-a100-80gb",)),
    Rows("BLOOM prequel, A100", "seeds", DEEPSPEED, ("jean-zay-a100-80gb",), "earlier days",
         lambda row, group: (row.date or "") < "2022-02-23"),
    Rows("BigScience 1.3B, V100", "seeds", DEEPSPEED, BIGSCIENCE),
    Rows("Fugaku 1.3B and 30B", "seeds", "megatron-cpu", FUGAKU),
    Rows("GPT-3 XL, Megatron, V100", "seeds", "megatron", ("aws-p3-16xlarge",)),
    Rows("vTrain, one node of A100", "vtrain_single_node", DEEPSPEED, ("a100-8x-node",)),
    Rows("vTrain, one node of A100", "vtrain_single_node", DEEPSPEED, ("a100-8x-node",), "other models", odd_group),
    Rows("DLPerf, Megatron, V100", "dlperf_v100", "megatron", ("dlperf-v100",)),
    Rows("DLPerf, OneFlow, V100", "dlperf_v100", "oneflow", ("dlperf-v100",)),
    Rows("llm-foundry, A100-40GB", "llm_foundry_a100_40gb", "torch-fsdp", ("llm-foundry-a100-40gb",)),
    Rows("llm-foundry, A100-40GB", "llm_foundry_a100_40gb", "torch-fsdp", ("llm-foundry-a100-40gb",), "other models",
         odd_group),
    Rows("Fugaku 124M", "fugaku_124m", "megatron-cpu", FUGAKU),
    Rows("Fugaku 124M", "fugaku_124m", "megatron-cpu", FUGAKU, "shipped"),
    Rows("llm-foundry, A100-80GB", "llm_foundry_a100_80gb_h100", "torch-fsdp", ("dgx-a100-80gb",)),
    Rows("llm-foundry, A100-80GB", "llm_foundry_a100_80gb_h100", "torch-fsdp", ("dgx-a100-80gb",), "other models",
         odd_group),
    Rows("llm-foundry, H100", "llm_foundry_a100_80gb_h100", "torch-fsdp", ("dgx-h100",)),
    Rows("llm-foundry, H100", "llm_foundry_a100_80gb_h100", "torch-fsdp", ("dgx-h100",), "other models", odd_group),
    Rows("torchtitan, H100", "torchtitan", "torchtitan", ("dgx-h100",)),
    Rows("torchtitan, A100", "torchtitan", "torchtitan", ("dgx-a100-80gb",)),
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """Distinct observations to draw from, their comparable groups, and what is known before."""

    rows: Rows
    observations: list[Observation]
    groups: list[str]
    start: Calibration


@dataclass(frozen=True)
class Shot:
    """Medians over draws: error and tau after the fit and of the start; and rows inside 1 sigma."""

    error: float | None
    tau: float | None
    start: float | None
    start_tau: float | None
    covered: float | None

    @property
    def worse(self) -> bool:
        """Whether the error is above the start's on the same rows, or tau below it, by more than rounding."""
        error = (self.error or 0.0) > (self.start or 0.0) + 0.0005
        return error or (self.tau is not None and self.tau < (self.start_tau or 0.0) - 0.005)


def problem_of(rows: Rows, modern: Path) -> Problem | None:
    """The table's rows that ran and can be answered, or None where the table is not at hand."""
    path = modern / f"{rows.table}.csv"
    if rows.table not in packaged_tables() and not path.is_file():
        return None
    table = packaged_table(rows.table) if rows.table in packaged_tables() else read_table(path)
    order: dict[str, int] = {}
    drawn: list[tuple[Observation, str]] = []
    known: list[tuple[Observation, str]] = []
    for row in table.measurements:
        chosen = row.stack == rows.stack and row.cluster in rows.clusters
        if not chosen or row.quality not in FIT_QUALITIES or row.status != "ok":
            continue
        try:
            observed, _ = observation(row)
        except TrimaranError:
            continue
        group = row.comparable_group or row.table or ""
        before = rows.known(row, order.setdefault(group, len(order)))
        (known if before else drawn).append((observed, group))
    case = drawn[0][0].case
    if known:
        known = [known[i] for i in some(len(known), MOST_KNOWN)]
        elsewhere = learned_elsewhere(case.cluster, case.stack, rows.clusters)
        start = fit_observations([o for o, _ in known], [group for _, group in known], start=elsewhere).calibration
    elif rows.start == "shipped":
        start = shipped(case.cluster.name, case.stack.name) or case.calibration
    else:
        start = learned_elsewhere(case.cluster, case.stack, rows.clusters)
    distinct, groups = averaged([o for o, _ in drawn], [group for _, group in drawn])
    kept = some(len(distinct), MOST_ROWS)
    return Problem(rows, [distinct[i] for i in kept], [groups[i] for i in kept], start)


def some(count: int, most: int) -> list[int]:
    """Indices of the rows that stand for all."""
    return sorted(map(int, np.random.default_rng(0).permutation(count)[:most]))


def predicted(seen: Sequence[Observation], what: str, calibration: Calibration) -> Floats:
    """Seconds or GiB of each, under the state of its day where that is known."""
    out = np.empty(len(seen))
    for day in {observed.day for observed in seen}:
        index = [i for i, observed in enumerate(seen) if observed.day == day]
        predict = predict_times if what == "sec_per_it" else predict_memory
        out[index] = predict(batches([seen[i] for i in index]), len(index), calibration.on_day(day))
    return out


def grouped_tau(seen: Sequence[Observation], groups: Sequence[str], what: str, values: Floats) -> float | None:
    """Mean of the groups' Kendall taus, weighed by their pairs; time is ranked per sequence."""
    total = weight = 0.0
    for group in set(groups):
        index = [i for i, name in enumerate(groups) if name == group]
        work = np.array([seen[i].case.workload.global_batch if what == "sec_per_it" else 1.0 for i in index])
        measured = np.array([getattr(seen[i], what) for i in index])
        tau = kendall_tau((values[index] / work).tolist(), (measured / work).tolist()) if len(index) > 1 else None
        if tau is not None:
            pairs = len(index) * (len(index) - 1) / 2
            total, weight = total + tau * pairs, weight + pairs
    return total / weight if weight else None


def shots(problem: Problem, what: str, draws: int) -> Iterator[tuple[int, Shot]]:
    """Medians over draws of 0, 1, 3 and 8 rows that have a time or a memory."""
    having = [i for i, observed in enumerate(problem.observations) if getattr(observed, what)]
    everything = [problem.observations[i] for i in having]
    groups = [problem.groups[i] for i in having]
    unfitted = predicted(everything, what, problem.start)
    error_field = "time_error" if what == "sec_per_it" else "mem_error"
    alone: dict[str, None] = {"mem_gib": None} if what == "sec_per_it" else {"sec_per_it": None}
    for count in (0, *SHOTS):
        if len(having) - count < FEWEST_SCORED:
            return
        found: list[list[float | None]] = []
        for draw in range(draws if count else 1):
            order = np.random.default_rng([draw, count]).permutation(len(having)).tolist()
            chosen, rest = [replace(everything[i], **alone) for i in order[:count]], order[count:]
            others, names = [everything[i] for i in rest], [groups[i] for i in rest]
            measured = np.array([getattr(observed, what) for observed in others])
            fitted = problem.start
            if count:
                fitted = fit_observations(chosen, [o.layout.label() for o in chosen], start=problem.start).calibration
            after = predicted(others, what, fitted)
            cells: list[float | None] = []
            for value in (after, unfitted[rest]):
                cells += [mape(value.tolist(), measured.tolist()), grouped_tau(others, names, what, value)]
            cells.append(float(np.mean(np.abs(np.log(after / measured)) <= getattr(fitted, error_field))))
            found.append(cells)
        yield count, Shot(*(_median(column) for column in zip(*found, strict=True)))


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def means(shot: Sequence[Shot], name: str) -> float:
    """Mean over the tables of one of the medians."""
    return float(np.mean([value for each in shot if (value := getattr(each, name)) is not None]))


def section(title: str, what: str, problems: Sequence[Problem], draws: int) -> Iterator[str]:
    """The page's table of time or of memory, line by line."""
    heads = [f"{n} rows: fit (start)" if n > 1 else "1 row: fit (start)" for n in SHOTS]
    yield f"## {title}\n"
    yield f"| table | start | rows | unfitted | {' | '.join(heads)} | tau: unfitted, 1, 3, 8 (start) | inside 1 sigma |"
    yield f"| --- | --- | --: | --: | {'--: | ' * len(SHOTS)} --- | --- |"
    medians: list[dict[int, Shot]] = []
    for problem in problems:
        count = sum(1 for observed in problem.observations if getattr(observed, what))
        if count < FEWEST_SCORED + 1:
            continue
        found = dict(shots(problem, what, draws))
        medians.append(found)
        cells = [f"**{percent(found[n].error)}** ({percent(found[n].start)})" if n in found else "-" for n in SHOTS]
        taus = ", ".join(
            "-" if shot.tau is None else f"{shot.tau:.2f}" + (f" ({shot.start_tau:.2f})" if n else "")
            for n, shot in found.items()
        )
        inside = ", ".join(f"{shot.covered:.0%}" for shot in found.values())
        yield (
            f"| {problem.rows.name} | {problem.rows.start} | {count} | {percent(found[0].error)} | {' | '.join(cells)} "
            f"| {taus} | {inside} |"
        )
    for n in SHOTS:
        each = [found[n] for found in medians if n in found]
        yield (
            f"\n{n} row{'s' * (n > 1)}: mean of the tables {means(each, 'error'):.1%}, of their starts "
            f"{means(each, 'start'):.1%}; median of the tables "
            f"{np.median([shot.error or 0.0 for shot in each]):.1%}; tau {means(each, 'tau'):.2f}, of the starts "
            f"{means(each, 'start_tau'):.2f}; worse than the start in "
            f"{sum(shot.worse for shot in each)} of {len(each)}; inside 1 sigma {means(each, 'covered'):.0%}."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10, help="random draws of each number of rows")
    parser.add_argument("--modern", type=Path, default=MODERN, help="folder of the tables that are not packaged")
    parser.add_argument("--tables", nargs="*", default=[], help="only tables whose name holds one of these; no page")
    asked = parser.parse_args()
    wanted = [rows for rows in TABLES if not asked.tables or any(word in rows.name for word in asked.tables)]
    problems = []
    for rows in wanted:
        print(f"reading {rows.name}, {rows.start}", file=sys.stderr, flush=True)
        problems += [problem] if (problem := problem_of(rows, asked.modern)) is not None else []
    lines = ["# Few-shot: what a few rows of a table teach of its others\n", *(__doc__ or "").split("\n\n")[2:3], ""]
    for title, what in (("Time", "sec_per_it"), ("Memory", "mem_gib")):
        for line in section(title, what, problems, asked.draws):
            print(line, flush=True)
            lines.append(line)
        lines.append("")
    if not asked.tables:
        write_atomically(RESULTS, "\n".join(lines))


if __name__ == "__main__":
    main()
