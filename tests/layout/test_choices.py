"""Choices: every field of a layout has a row, and everything that lists a layout's fields has every row."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimaran.api import plan, workload_of
from trimaran.cost.grid import LayoutGrid
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.layout.choice import Choice
from trimaran.layout.choices import CHOICE, CHOICES, IN_GRID, IN_TABLES
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.nouns.columns import BY_NAME, parse_cell
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.stack import FOLDED
from trimaran.planner.search.ranking import DISTINCT
from trimaran.planner.search.space import FIXABLE, space_of
from trimaran.report import measured_rows, planned
from trimaran.report.page.planned import plan_content
from trimaran.study.tune.surrogate import features

WORKLOAD, STACK = workload_of("gpt2-124m", 64), load_stack("trimaran")
# Experts can be laid out in a mixture alone.
MIXTURE = workload_of("mixtral-8x7b", 64)
# Told by the layout's notation alone, which tables and pages show too.
WITHOUT_COLUMN = {
    "sequence_parallel", "recompute_every", "fragments", "outer_delay", "stage_split", "replica_batches", "placement",
    "placed",
}  # fmt: skip
WITHOUT_HEADING = {"recompute_every", "stage_split", "replica_batches", "placement", "placed"}
every_choice = pytest.mark.parametrize("choice", CHOICES, ids=[choice.name for choice in CHOICES])


def others(choice: Choice) -> list[Any]:
    """Values beside the default; fully sharded is ZeRO 3 by another name, and a schedule needs a pipeline."""
    if choice.words:
        return [word for word in choice.words if word not in (choice.default, "fully_sharded")]
    return [2, 3] if choice.bounds else [(7, 5)]


def values(choice: Choice) -> st.SearchStrategy[Any]:
    if choice.words:
        return st.sampled_from(choice.words)
    if choice.bounds:
        return st.integers(choice.bounds[0], choice.bounds[1] or 2**40)
    return st.lists(st.integers(1, 100_000), max_size=40).map(tuple)


layouts = st.fixed_dictionaries({choice.name: values(choice) for choice in CHOICES}).filter(
    # fully sharded is said to mean ZeRO 3: a rule refuses them apart
    lambda chosen: (chosen["dp_kind"] == "fully_sharded") == (chosen["zero_stage"] == 3)
).map(
    # a folded schedule is said to mean two chunks a rank: a rule refuses another number
    lambda chosen: Layout.model_validate(chosen | ({"vpp": 2} if chosen["schedule"] in FOLDED else {}))
)  # fmt: skip


def test_every_field_of_a_layout_has_one_row_in_its_order() -> None:
    assert [choice.name for choice in CHOICES] == list(Layout.model_fields)


@every_choice
def test_a_layout_declares_each_choice_with_the_words_and_default_of_its_row(choice: Choice) -> None:
    field = Layout.model_fields[choice.name]
    assert field.default == choice.default
    stated = get_args(field.annotation)
    if choice.words and isinstance(choice.default, str):
        taken = (getattr(Layout.model_validate({choice.name: word}), choice.name) for word in choice.words)
        assert stated == choice.words or (not stated and tuple(taken) == choice.words)


@pytest.mark.parametrize(
    # a grid is ranked on nodes that are alike; where ranks stand is found for a layout apart
    "choice",
    [choice for choice in CHOICES if choice.name not in ("placed", "replica_batches")],
    ids=lambda choice: choice.name,
)
def test_a_grid_holds_every_choice_and_gives_it_back(choice: Choice) -> None:
    assert choice.name in {field.name for field in fields(LayoutGrid)} or choice.name == "stage_split"
    members = [Layout.model_validate({choice.name: value}) for value in others(choice)]
    grid = LayoutGrid.from_layouts(members, WORKLOAD, STACK)
    assert [grid.layout(index) for index in range(len(grid))] == members
    assert [grid.take([index]).layout(0) for index in range(len(grid))] == members


@pytest.mark.parametrize("choice", IN_GRID, ids=[choice.name for choice in IN_GRID])
def test_a_grid_is_built_from_words_and_from_their_indexes_alike(choice: Choice) -> None:
    for value in others(choice):
        built = LayoutGrid.build(WORKLOAD, STACK, **{choice.name: choice.index(value)})
        assert getattr(built.layout(0), choice.name) == value
        assert built.chose(choice.name, value).all() if choice.words else True
        if isinstance(value, str):
            again = LayoutGrid.build(WORKLOAD, STACK, **{choice.name: [value]})
            assert np.array_equal(getattr(again, choice.name), getattr(built, choice.name))


@pytest.mark.parametrize("choice", IN_GRID, ids=[choice.name for choice in IN_GRID])
def test_words_and_their_indexes_are_two_names_of_one_thing(choice: Choice) -> None:
    known = choice.words or tuple(others(choice))
    assert [choice.value(np.int64(choice.index(value))) for value in known] == list(known)


@every_choice
def test_the_notation_says_every_choice(choice: Choice) -> None:
    for value in others(choice):
        layout = Layout.model_validate({choice.name: value})
        assert layout.label() != Layout().label()
        assert parse_layout(layout.label()) == layout


@given(layouts)
def test_the_notation_reads_back_any_layout(layout: Layout) -> None:
    assert parse_layout(layout.label()) == layout


@every_choice
def test_a_search_proposes_every_choice_or_makes_it_from_others(choice: Choice) -> None:
    space = space_of(WORKLOAD, load_cluster("dgx-h100"), STACK, 8, {})
    assert (
        (choice.name in space.values)
        == (choice.proposes is not None)
        == (choice.name not in ("vpp", "stage_split", "replica_batches", "placed"))
    )
    if choice.name in space.values and choice.name != "precision":
        assert choice.index(choice.default) in space[choice.name]


@every_choice
def test_a_choice_can_be_held_at_a_value_but_a_list_of_stages_or_devices(choice: Choice) -> None:
    assert (choice.name in FIXABLE) == (choice.name not in ("stage_split", "replica_batches", "placed"))
    if choice.name not in FIXABLE:
        return
    for value in others(choice):
        text = "-".join(value) if isinstance(value, tuple) else value
        for name in filter(None, (choice.name, choice.short)):
            space = space_of(MIXTURE, load_cluster("dgx-h100"), STACK, 8, {name: text})
            assert space[choice.name] == (choice.index(value),)
            assert space.fixed == {choice.name}


@every_choice
def test_layouts_of_one_place_in_a_ranking_differ_alone_in_what_waits_on_links(choice: Choice) -> None:
    apart = ("stage_split", "replica_batches", "placement", "shard", "cp_kind", "placed")
    assert (choice.name in DISTINCT) == (choice.name not in apart)


@every_choice
def test_every_choice_has_a_column_or_is_told_by_the_label(choice: Choice) -> None:
    assert (choice in IN_TABLES) == (choice.name not in WITHOUT_COLUMN)
    if choice.column is None:
        return
    assert choice.column is BY_NAME[choice.name]
    assert choice.name in Measurement.model_fields
    if choice.words:
        assert all(parse_cell(choice.column, word) == word for word in choice.words)


@every_choice
def test_the_surrogate_sees_every_choice(choice: Choice) -> None:
    for value in others(choice):
        layout = Layout.model_validate({choice.name: value})
        if choice.name == "schedule" and value in ("1f1b", "interleaved"):
            continue  # a pipeline shows in PP, interleaving in VPP
        plain, other = features([Layout(), layout])
        assert np.abs(plain - other).max() > 0


def test_to_the_surrogate_any_two_precisions_are_one_switch_apart() -> None:
    points = features([Layout.model_validate({"precision": word}) for word in CHOICE["precision"].words])
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    assert np.allclose(distances, 1.0 - np.eye(len(points)))


@every_choice
def test_printed_tables_have_every_choice_that_has_a_heading(choice: Choice) -> None:
    assert (choice.heading is None) == (choice.name in WITHOUT_HEADING)
    if choice.heading is None:
        return
    titles = {field.title for field in planned.FIELDS}
    assert choice.heading.title in titles
    if choice.heading.blank != "row":
        assert choice.heading.title in {field.title for field in measured_rows.FIELDS}


@pytest.fixture(scope="module")
def content() -> Any:
    return plan_content(planned.as_json(plan("gpt2-124m", "dgx-h100", 64, devices=8, stack="megatron", top=3)))


@every_choice
def test_the_page_has_every_choice_that_tables_of_runs_have(choice: Choice, content: Any) -> None:
    keys = [key for key, *_ in content.columns]
    shown = choice.heading is not None and choice.heading.blank != "row"
    assert (choice.name in keys) == shown
    assert all((choice.name in case.choices) == shown for case in content.cases)


@pytest.mark.parametrize("word", ["offload", "offload=1", "ofload-optimizer"])
def test_a_word_that_says_too_little_is_not_said_to_come_later(word: str) -> None:
    """What lies in the host's memory was once to come, and has words of its own since."""
    with pytest.raises(TrimaranError, match="is not understood; write as dp8"):
        parse_layout(f"dp8,{word}")
    assert parse_layout("dp8,zero1,offload-optimizer").offload == "optimizer"
