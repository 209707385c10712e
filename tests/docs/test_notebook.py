"""The notebook in the docs runs from its first cell to its last, and each code cell shows something."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import types
from pathlib import Path
from typing import Any

import pytest

from trimaran.planner.plan import Plan

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"


def run(source: str, names: dict[str, Any]) -> tuple[str, object]:
    """What a cell prints, and the value of its last line, as a notebook's kernel has it."""
    tree = ast.parse(source)
    shown = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        value = (
            eval(compile(ast.Expression(shown.value), "cell", "eval"), names) if isinstance(shown, ast.Expr) else None
        )
    return printed.getvalue(), value


def test_every_cell_runs_in_order_and_shows_what_the_text_before_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text())
    cells = notebook["cells"]
    assert notebook["nbformat"] == 4 and len({cell["id"] for cell in cells}) == len(cells)
    # what a run shows depends on the cost model of the day, so none is kept
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    names = types.ModuleType("__main__").__dict__
    shown = [run("".join(cell["source"]), names) for cell in cells if cell["cell_type"] == "code"]
    assert len(shown) == 6 and all(printed or value is not None for printed, value in shown)
    plan, best, frame, held, predictions, mistake = shown
    assert isinstance(plan[1], Plan) and "bloom-176b" in plan[1]._repr_html_()
    assert "dp8,tp4,pp12" in best[0]
    assert "12" in str(frame[1]) and "GiB" in held[0] and "rows" in predictions[0]
    assert mistake[0].count("\n") == 1 and "8 devices" in mistake[0]
