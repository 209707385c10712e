"""A new axis is one entry and the fields that hold its degree: small edits to six files show it everywhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trimaran
from trimaran.api import plan
from trimaran.report.planned import FIELDS, as_json, records
from trimaran.report.tables import render

# An axis `xp` that nothing uses: what a developer writes to have one, by file of src/trimaran.
EDITS: dict[str, tuple[tuple[str, str], ...]] = {
    "layout/axes.py": (
        ('AxisName = Literal["tp", "cp", "pp", "dp"]', 'AxisName = Literal["tp", "cp", "pp", "dp", "xp"]'),
        ("AXES: tuple[Axis, ...] = (", 'AXES: tuple[Axis, ...] = (\n    Axis("xp", "XP"),'),
        ('= ("tp", "cp", "dp", "pp")', '= ("tp", "cp", "xp", "dp", "pp")'),
    ),
    "layout/layout.py": (('    dp: int = field("dp")', '    xp: int = field("xp")\n    dp: int = field("dp")'),),
    "cost/grid.py": (("    dp: Ints\n", "    dp: Ints\n    xp: Ints\n"),),
    "nouns/columns.py": (
        (
            '    Column("dp", ',
            '    Column("xp", "int", default=1, minimum=1, maximum=1e7, says="a new axis"),\n    Column("dp", ',
        ),
    ),
    "nouns/measurement.py": (("    dp: int | None = None\n", "    dp: int | None = None\n    xp: int = 1\n"),),
    "store/schema.py": (
        (
            "VERSION = len(MIGRATIONS)",
            'MIGRATIONS += (("ALTER TABLE measurement ADD COLUMN xp INTEGER NOT NULL DEFAULT 1",),)\n'
            "VERSION = len(MIGRATIONS)",
        ),
    ),
}
MOST_FILES = 8

# What the new house is asked, in a process of its own; the answers are printed as JSON.
ASKED = """
import json, sys, tempfile
from pathlib import Path
import torch
from trimaran.api import plan, workload_of
from trimaran.cost.grid import LayoutGrid
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.files.row_nouns import layout_cells, nouns_of
from trimaran.files.row_table import parse_table, write_table
from trimaran.layout.axes import groups
from trimaran.layout.notation import parse_layout
from trimaran.nouns.measurement import Measurement
from trimaran.report import measured_rows, planned
from trimaran.report.page.measured import measured_content
from trimaran.report.page.planned import plan_content
from trimaran.report.tables import render
from trimaran.store import Store, trial_key
from trimaran.train.comm.mesh import GroupFactory, build_mesh

one, two = parse_layout("xp1"), parse_layout("dp2,xp2,mbs1")
grid = LayoutGrid.from_layouts([one, two], workload_of("gpt2-124m", 64), load_stack("trimaran"))
mesh = build_mesh(one, 0, (0,), GroupFactory(torch.device("cpu")))
found = plan("gpt2-124m", "dgx-h100", 64, devices=8, stack="megatron", top=5)
row = Measurement(layers=12, hidden=768, heads=12, seq_len=1024, vocab=50257, gbs=64, cluster="dgx-h100",
                  stack="megatron", sec_per_it=1.0, mem_gib=1.0, **dict(layout_cells(two)))
with tempfile.TemporaryDirectory() as folder:
    write_table(Path(folder) / "table.csv", [row])
    (read,) = parse_table((Path(folder) / "table.csv").read_text(), "table").measurements
with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "store.sqlite") as store:
    store.add(row)
    (kept,) = store.measurements()
page = measured_content({"table": [row]})
json.dump({
    "labels": [one.label(), two.label()],
    "devices": [one.devices, two.devices, *grid.devices.tolist()],
    "strides": [two.stride("dp"), *grid.stride("dp").tolist()],
    "groups": groups(two, "xp"),
    "mesh": [mesh.along["xp"].size, mesh.along["xp"].ranks],
    "plan": planned.as_json(found),
    "printed": render(planned.records(found), planned.FIELDS, "table"),
    "key": trial_key(workload_of("gpt2-124m", 16), parse_layout("dp2,tp2,pp2,mbs1,zero1,sp,bf16"),
                     load_stack("trimaran"), load_cluster("dgx-a100-80gb"), stage_split=(6, 6), steps=6),
    "read": [read.xp, nouns_of(read).layout.label(), kept.xp],
    "table of runs": render(measured_rows.records([row]), measured_rows.FIELDS, "table"),
    "page": [list(page.columns[0]), page.cases[0].choices["xp"], page.cases[0].devices],
    "page of the plan": [case.choices["xp"] for case in plan_content(planned.as_json(found)).cases],
}, sys.stdout)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    here, there = Path(trimaran.__file__).parent, tmp_path_factory.mktemp("house") / "trimaran"
    shutil.copytree(here, there, ignore=shutil.ignore_patterns("__pycache__"))
    for name, edits in EDITS.items():
        text = (there / name).read_text(encoding="utf-8")
        for old, new in edits:
            assert text.count(old) == 1, f"{name}: {old!r} stands there {text.count(old)} times"
            text = text.replace(old, new)
        (there / name).write_text(text, encoding="utf-8")
    told = subprocess.run(
        [sys.executable, "-c", ASKED], capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "PYTHONPATH": str(there.parent)},
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    answered: dict[str, Any] = json.loads(told.stdout)
    return answered


def test_few_files_are_touched() -> None:
    assert len(EDITS) <= MOST_FILES


def test_the_notation_reads_it_and_leaves_out_a_degree_of_one(answers: dict[str, Any]) -> None:
    assert answers["labels"] == ["dp1,tp1,pp1,mbs1", "xp2,dp2,tp1,pp1,mbs1"]


def test_layout_and_grid_count_its_ranks(answers: dict[str, Any]) -> None:
    assert answers["devices"] == [1, 4, 1, 4]
    assert answers["strides"] == [2, 1, 2]
    assert answers["groups"] == [[0, 1], [2, 3]]


def test_the_mesh_has_its_group(answers: dict[str, Any]) -> None:
    assert answers["mesh"] == [1, [0]]


def test_the_plan_has_it_and_the_figures_of_the_plan_without_it(answers: dict[str, Any]) -> None:
    found = plan("gpt2-124m", "dgx-h100", 64, devices=8, stack="megatron", top=5)
    before, after = json.loads(json.dumps(as_json(found))), answers["plan"]
    for entry in after["layouts"]:
        assert entry.pop("xp") == 1
        entry["placement"].remove("xp")
    # the rule on devices reads the new axis, too
    for refusal in after["refusals"]:
        refusal["fields"] = [name for name in refusal["fields"] if name != "xp"]
    assert after == before
    assert answers["printed"] == render(records(found), FIELDS, "table")


def test_a_table_and_the_store_keep_it(answers: dict[str, Any]) -> None:
    assert answers["read"] == [2, "xp2,dp2,tp1,pp1,mbs1", 2]
    assert "XP" in answers["table of runs"].splitlines()[0].split()


def test_trials_that_were_stored_before_are_still_known(answers: dict[str, Any]) -> None:
    """By the key of tests/store/test_keys.py, which stores of the first version have."""
    assert answers["key"] == "f637fc1844c8dc6f1bd2dacf2a995b00"


def test_the_page_shows_it(answers: dict[str, Any]) -> None:
    assert answers["page"] == [["xp", "XP", "xp", True], 2, 4]
    assert answers["page of the plan"] == [1] * 5
