"""Errors of one table under all that may be known of its cluster, side by side: a section of the page of fidelity.

Nothing measured; what other clusters taught of the software; 1, 3 and 8 rows of the table; all of its other groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from few_shot import MODERN, SHOTS, TABLES, Problem, percent, predicted, problem_of, shots
from trimaran.cost.calibration import prior
from trimaran.cost.fit.solve import leave_out
from trimaran.cost.score import mape

# Medians of so many random draws of rows.
DRAWS = 5


def lines(modern: Path = MODERN, draws: int = DRAWS) -> Iterator[str]:
    """The section's table, line by line: time, then memory, of every table at hand."""
    shown = " | ".join(f"{n} row{'s' * (n > 1)} of it" for n in SHOTS)
    yield "\n## Uncalibrated, few-shot and calibrated\n"
    yield f"Mean relative errors; few-shot are medians of {draws} draws on the rows not drawn, calibrated leaves out"
    yield "one comparable group after the other. Tables are those of `few_shot.py`, at most 80 rows of each.\n"
    yield f"| table | of | rows | uncalibrated | as elsewhere | {shown} | calibrated |"
    yield f"| --- | --- | --: | --: | --: | {'--: | ' * len(SHOTS)}--: |"
    for rows in TABLES:
        problem = problem_of(rows, modern) if rows.start == "elsewhere" else None
        for name, what in (("time", "sec_per_it"), ("memory", "mem_gib")):
            if problem is not None and sum(1 for seen in problem.observations if getattr(seen, what)) > min(SHOTS) + 4:
                yield _line(problem, name, what, draws)


def _line(problem: Problem, name: str, what: str, draws: int) -> str:
    having = [i for i, seen in enumerate(problem.observations) if getattr(seen, what)]
    seen, groups = [problem.observations[i] for i in having], [problem.groups[i] for i in having]
    measured = [float(getattr(each, what)) for each in seen]
    case = seen[0].case
    bare = predicted(seen, what, prior(case.cluster, case.stack))
    found = dict(shots(problem, what, draws))
    calibrated = np.empty(len(seen))
    for group, calibration in leave_out(seen, groups).items() if len(set(groups)) > 1 else ():
        inside = [i for i, each in enumerate(groups) if each == group]
        calibrated[inside] = predicted([seen[i] for i in inside], what, calibration)
    cells = [
        percent(mape(bare.tolist(), measured)),
        *(percent(found[n].error if n in found else None) for n in (0, *SHOTS)),
        percent(mape(calibrated.tolist(), measured) if len(set(groups)) > 1 else None),
    ]
    return f"| {problem.rows.name} | {name} | {len(seen)} | {' | '.join(cells)} |"


if __name__ == "__main__":
    for line in lines():
        print(line, flush=True)
