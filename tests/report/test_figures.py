"""Figures by name, from published rows and from a plan."""

import itertools
from pathlib import Path

import pytest

from trimaran.api import plan
from trimaran.files.row_table import packaged_table
from trimaran.nouns.noun import TrimaranError
from trimaran.report.figures import FIGURES, pareto_front, write_figure
from trimaran.report.page.content import Content
from trimaran.report.page.measured import measured_content
from trimaran.report.page.planned import plan_content
from trimaran.report.planned import as_json


@pytest.fixture(scope="module")
def planned() -> Content:
    return plan_content(as_json(plan("gpt2-124m", "dgx-h100", 64, devices=16, top=200)))


def bloom_rows() -> Content:
    rows = packaged_table("seeds").measurements
    return measured_content({"bloom": [r for r in rows if r.hidden == 14336 and r.heads == 64 and r.layers == 72]})


@pytest.mark.parametrize("name", sorted(set(FIGURES) - {"losses"}))
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_figure_is_drawn(name: str, ending: str, planned: Content, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.{ending}"
    write_figure(name, bloom_rows() if name == "predicted" else planned, path)
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if ending == "png" else b"<?xml" in start
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_the_front_holds_what_nothing_beats(planned: Content) -> None:
    front = pareto_front(planned.cases)
    for case in planned.cases:
        beaten = any(f.sec_per_sample <= case.sec_per_sample and f.mem_gib <= case.mem_gib for f in front)  # type: ignore[operator]
        assert beaten
    for a, b in itertools.pairwise(front):
        assert a.mem_gib <= b.mem_gib and a.sec_per_sample > b.sec_per_sample  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "file", "said"),
    [
        ("fronts", "x.png", "front, parts, memory"),
        ("losses", "x.png", "records? their loss|record their loss"),
        ("front", "x.bmp", ".png, .svg, .pdf"),
    ],
)
def test_what_cannot_be_drawn_is_told(name: str, file: str, said: str, planned: Content, tmp_path: Path) -> None:
    with pytest.raises(TrimaranError, match=said):
        write_figure(name, planned, tmp_path / file)


def test_times_of_different_models_are_not_drawn_against_each_other(tmp_path: Path) -> None:
    with pytest.raises(TrimaranError, match="one model on one cluster"):
        write_figure("front", measured_content({"seeds": packaged_table("seeds").measurements}), tmp_path / "x.png")
