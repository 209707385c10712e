"""The Python API has the command line's words and gives its answers."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import trimaran
from trimaran.api import plan, predict


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


def test_an_editor_completes_the_functions_and_no_package_is_callable() -> None:
    assert {"plan", "predict", "__version__"} <= set(dir(trimaran))
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
