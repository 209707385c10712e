"""The Python API has the command line's words and gives its answers."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import pytest

import trimaran
from trimaran.api import plan, predict, workload_of
from trimaran.cost.calibration import prior, save_calibration
from trimaran.cost.table.predict_table import PredictedRow, Predictions
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.files.frames import FrameLibrary
from trimaran.files.row_table import Row
from trimaran.layout.flops import iteration_flops


def test_trimaran_plan_is_the_planner_before_and_after_its_room_is_imported() -> None:
    code = (
        "import trimaran, sys; assert 'numpy' not in sys.modules\n"
        "asked = dict(gbs=64, devices=8, stack='megatron', top=3, fix={'tp': 2})\n"
        "first = trimaran.plan('gpt3-1b3', 'jean-zay-v100-32gb', **asked)\n"
        "import trimaran.planner.search.search\n"
        "assert trimaran.plan('gpt3-1b3', 'jean-zay-v100-32gb', **asked) == first\n"
        "assert {entry.layout.tp for entry in first.entries} == {2}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_dir_shows_the_functions_and_none_of_what_makes_them() -> None:
    public = [name for name in dir(trimaran) if not name.startswith("_")]
    assert public == ["TrimaranError", "plan", "predict"]
    assert all(callable(getattr(trimaran, name)) for name in public)


def test_an_editor_completes_arguments_and_words_without_running_anything() -> None:
    """What type checkers follow names what is loaded lazily, and every argument has its type, choices their words."""
    tree = ast.parse(Path(trimaran.__file__).read_text())
    static = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imported = {alias.name for node in static for line in node.body if isinstance(line, ast.ImportFrom)
                for alias in line.names}  # fmt: skip
    assert imported == set(trimaran.__all__) - {"__version__"}
    for function in (trimaran.plan, trimaran.predict):
        types = inspect.get_annotations(function, eval_str=True)
        assert set(types) == {*inspect.signature(function).parameters, "return"}
    words = inspect.get_annotations(trimaran.plan, eval_str=True)
    assert get_args(words["objective"]) == ("time", "cost", "devices")
    assert get_args(words["optimizer"]) == ("adam", "sgd")
    assert (Path(trimaran.__file__).parent / "py.typed").exists()


def test_files_are_named_by_strings_and_by_paths_alike(tmp_path: Path) -> None:
    catalogue = Path(trimaran.__file__).parent / "catalog"
    model, cluster = catalogue / "models" / "gpt3-1b3.toml", catalogue / "clusters" / "dgx-h100.toml"
    stack, calibration = catalogue / "stacks" / "megatron-core.toml", tmp_path / "calibration.toml"
    save_calibration(prior(load_cluster("dgx-h100"), load_stack("megatron-core")), calibration)
    by_path = plan(model, cluster, 64, devices=8, top=3, stack=stack, calibration=calibration)
    assert by_path == plan(
        str(model), str(cluster), 64, devices=8, top=3, stack=str(stack), calibration=str(calibration)
    )
    table = tmp_path / "rows.csv"
    table.write_text("layers,hidden,heads,seq_len,vocab,dp,mbs,gbs\n24,2048,16,2048,50257,8,1,64\n")
    ((row,), (same_row,)) = (
        predict(kind(table), cluster="dgx-h100", stack="megatron-core", calibration=kind(calibration))
        for kind in (Path, str)
    )
    assert row.estimate and row.estimate == same_row.estimate


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_results_are_frames_of_pandas_and_polars(library: FrameLibrary) -> None:
    found = plan("gpt3-1b3", "dgx-h100", 64, devices=8, top=3)
    frame = found.to_frame(library)
    assert type(frame).__module__.startswith(library) and len(frame) == 3
    assert list(frame["sec_per_it"]) == [entry.sec_per_it for entry in found.entries]
    assert list(frame["layout"]) == [str(entry.layout) for entry in found.entries]
    assert list(frame["tp"]) == [entry.layout.tp for entry in found.entries]
    # some columns of this table are blank for its first two hundred rows
    rows = predict("seeds")
    frame = rows.to_frame(library)
    assert len(frame) == len(rows) and {"sec_per_it", "predicted_sec_per_it", "predicted_error"} <= set(frame.columns)
    answered = [row.estimate.sec_per_it for row in rows if row.estimate]
    assert frame["predicted_sec_per_it"].sum() == pytest.approx(sum(answered))
    assert type(found.to_frame()).__module__.startswith("pandas")


def test_without_either_library_one_line_says_which_to_install() -> None:
    code = (
        "import sys; sys.modules['pandas'] = None; sys.modules['polars'] = None\n"
        "import trimaran\n"
        "found = trimaran.plan('gpt3-1b3', 'dgx-h100', 64, devices=8, top=1)\n"
        "for library in (None, 'polars', 'numpy'):\n"
        "    try: found.to_frame(library)\n"
        "    except trimaran.TrimaranError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == [
        "to_frame needs pandas or polars, which are not installed: pip install pandas",
        "to_frame needs polars, which is not installed: pip install polars",
        "to_frame library 'numpy' is not known: it is one of pandas, polars",
    ]


def test_results_show_themselves_in_one_line_and_as_a_table() -> None:
    found = plan("gpt3-1b3", "dgx-h100", 64, devices=8, top=3)
    rows = predict("fugaku_124m")
    for result, name in ((found, "gpt3-1b3 on dgx-h100"), (found.best, str(found.best.layout)), (rows, "56 rows"),
                         (rows[0], "row 1: ")):  # fmt: skip
        assert name in repr(result) and "\n" not in repr(result) and len(repr(result)) < 200
        assert str(result) == repr(result)
    for html, count in ((found._repr_html_(), 3), (rows._repr_html_(), len(rows))):
        table = ElementTree.fromstring(html)
        assert len(table.findall("tr")) == count + 1
        assert {len(row) for row in table.findall("tr")} == {len(table.findall("tr")[0])}
    hostile = rows[0].row.measurement
    assert hostile is not None
    row = Row(1, {}, hostile.model_copy(update={"cluster": "<script>alert(1)</script>"}), None)
    html = Predictions([PredictedRow(row, None, None, "<b>no</b>")])._repr_html_()
    assert "<script>" not in html and "<b>" not in html


def test_no_package_is_callable() -> None:
    rooms = [
        importlib.import_module(f"trimaran.{room.name}")
        for room in pkgutil.iter_modules(trimaran.__path__)
        if room.name != "__main__"
    ]
    assert not [room.__name__ for room in rooms if callable(room)]
    assert callable(trimaran.plan)


def test_predict_answers_or_refuses_every_row_of_a_packaged_table() -> None:
    rows = predict("fugaku_124m")
    assert rows == trimaran.predict("fugaku_124m")
    assert all((row.estimate is None) == (row.error is not None) for row in rows)
    assert sum(row.estimate is not None for row in rows) > len(rows) / 2


def test_nouns_serve_where_names_do() -> None:
    from trimaran.files.catalogue import load_cluster, load_model, load_stack

    named = plan("gpt3-1b3", "dgx-h100", 128, devices=16, stack="trimaran", top=2)
    given = plan(load_model("gpt3-1b3"), load_cluster("dgx-h100"), 128, devices=16, stack=load_stack("trimaran"), top=2)
    assert named == given


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": None}, "model is None: give a Model, a name or a file's path"),
        ({"cluster": 3}, "cluster is 3: give a Cluster,"),
        ({"stack": ["trimaran"]}, "stack is ['trimaran']: give a Stack,"),
        ({"calibration": {}}, "calibration is {}: give a Calibration,"),
        ({"fix": "tp=8"}, "fix is 'tp=8': give choices by name, as {'tp': 8}"),
        ({"fix": {"tp": None}}, "fixed.tp: a whole number, true or false, a text, a list is expected (it is None)"),
        ({"ramp_up": 5}, "ramp_up is 5: give three numbers, start, increment and samples"),
    ],
)
def test_an_argument_of_another_type_is_told_by_its_name(given: dict[str, Any], said: str) -> None:
    """Some ended in Python's own errors, which name what the code does with them."""
    asked: dict[str, Any] = {"model": "gpt3-1b3", "cluster": "dgx-h100", "gbs": 64, "devices": 8, "top": 1, **given}
    with pytest.raises(trimaran.TrimaranError, match=re.escape(said)):
        plan(**asked)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"table": 5}, "table is 5: give a Table, a name or a file's path"),
        ({"calibration": 5}, "calibration is 5: give a Calibration,"),
        ({"cluster": "dgx-h10"}, "did you mean 'dgx-h100'?"),
        ({"stack": "trimaram"}, "did you mean 'trimaran'?"),
    ],
)
def test_so_is_one_of_a_table_and_a_name_that_no_row_asks_for(given: dict[str, Any], said: str) -> None:
    asked: dict[str, Any] = {"table": "dlperf_v100", **given}
    with pytest.raises(trimaran.TrimaranError, match=re.escape(said)):
        predict(**asked)


def test_a_plan_says_what_the_softwares_own_log_will_print() -> None:
    """Megatron-Core counts half of the scores: at 131,072 tokens that is a third less than what a plan counts."""
    of_core, of_titan = (
        plan("llama3.1-8b", "dgx-h100", 16, seq=131072, devices=32, stack=stack)
        for stack in ("megatron-core", "torchtitan")
    )
    (told,) = (note for note in of_core.notes if "a log of megatron-core will say" in note)
    best = of_core.best
    printed = float(told.split(" will say ")[1].split()[0])
    operations = printed * 1e12 * best.devices * best.sec_per_it
    workload = workload_of("llama3.1-8b", best.global_batch, seq=131072)
    assert operations == pytest.approx(iteration_flops(workload, best.layout.tp, "megatron_core"), rel=1e-3)
    assert printed < 0.75 * best.tflops and not any("a log of" in note for note in of_titan.notes)
