"""Figures by name, from published rows and from a plan."""

import itertools
from pathlib import Path

import pytest

from trimaran.api import plan
from trimaran.files.row_table import packaged_table
from trimaran.nouns.noun import TrimaranError
from trimaran.report.figures import FIGURES, SIZE_INCHES, new_figure, pareto_front, write_figure
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


@pytest.mark.parametrize("name", ["parts", "memory"])
def test_each_part_has_a_colour_and_its_name_beside_the_bars(name: str, planned: Content) -> None:
    figure, (axes,) = new_figure(SIZE_INCHES)
    assert FIGURES[name](axes, planned)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert not axes.get_legend() and not legend.get_window_extent().overlaps(axes.get_window_extent())
    colors = [patch.get_facecolor() for patch in legend.get_patches()]
    assert len(colors) == len(set(colors)) > 4


def test_bars_whose_names_would_be_cut_are_named_by_what_differs(planned: Content) -> None:
    long = "dp2,tp2,cp32,cp-ulysses,pp16,ep{},dispatch-deepep,recompute-layernorm"
    cases = tuple(case.model_copy(update={"layout": long.format(n)}) for n, case in enumerate(planned.cases[:4]))
    _, (axes,) = new_figure(SIZE_INCHES)
    assert FIGURES["parts"](axes, planned.model_copy(update={"cases": cases}))
    assert {label.get_text() for label in axes.get_yticklabels()} == {f"ep{n}" for n in range(4)}


def test_bars_that_differ_far_behind_are_named_on_two_lines(planned: Content) -> None:
    words = ("none", "layernorm", "selective", "full")
    layouts = [
        f"dp{4 + n % 2},shard{2 + n % 2},tp{4 + n % 2},pp{25 + n % 2},recompute-{word}" for n, word in enumerate(words)
    ]
    cases = tuple(
        case.model_copy(update={"layout": layout}) for case, layout in zip(planned.cases[:4], layouts, strict=True)
    )
    _, (axes,) = new_figure(SIZE_INCHES)
    assert FIGURES["parts"](axes, planned.model_copy(update={"cases": cases}))
    named = [label.get_text() for label in axes.get_yticklabels()]
    assert len(set(named)) == 4 and all(word in name for word, name in zip(words, named, strict=True))


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


@pytest.mark.proof
def test_times_of_different_models_are_not_drawn_against_each_other(tmp_path: Path) -> None:
    with pytest.raises(TrimaranError, match="one model on one cluster"):
        write_figure("front", measured_content({"seeds": packaged_table("seeds").measurements}), tmp_path / "x.png")
