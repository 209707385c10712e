"""Published tables mapped down to a small machine keep their order of battle."""

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.files.recipe_file import load_recipe
from trimaran.nouns.noun import TrimaranError
from trimaran.recipe.published import PublishedTable
from trimaran.recipe.recipe import Recipe
from trimaran.report.published_answers import records
from trimaran.study.published import small_tables
from trimaran.study.published.scale import (
    MOST_LAYERS,
    MOST_MBS,
    MOST_RANKS,
    SmallRow,
    best_divisors,
    divided,
    small_rows,
)
from trimaran.study.published.small_tables import measure_small, published_rows
from trimaran.study.stated import unprobed_machine
from trimaran.study.workspace import Workspace

RECIPES = ("fugaku-gpt-1b3", "fugaku-gpt-30b", "bigscience-1b3-v100", "gpt3-xl-p3", "bloom-176b")
DEGREE = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 48, 256])


def recipe(name: str) -> Recipe:
    return load_recipe(f"recipes/{name}.toml")


@settings(deadline=None)
@given(st.lists(st.tuples(DEGREE, DEGREE, DEGREE), min_size=1, max_size=5))
def test_every_row_fits_and_order_along_an_axis_stays(degrees: list[tuple[int, int, int]]) -> None:
    divisors = best_divisors([(min(dp, 16), min(tp, 16), min(pp, 16)) for dp, tp, pp in degrees])
    small = [divided((min(dp, 16), min(tp, 16), min(pp, 16)), divisors) for dp, tp, pp in degrees]
    assert all(math.prod(one) <= MOST_RANKS for one in small)
    for axis in range(3):
        pairs = sorted((large[axis], one[axis]) for large, one in zip(degrees, small, strict=True))
        assert [one for _, one in pairs] == sorted(one for _, one in pairs)


def test_what_fits_is_left_as_it_is() -> None:
    assert best_divisors([(2, 2, 2), (1, 4, 2)]) == (1, 1, 1)


@pytest.mark.parametrize("name", RECIPES)
def test_every_table_of_every_recipe_maps_to_layouts_that_divide(name: str) -> None:
    for table in recipe(name).tables:
        for small in small_rows(published_rows(table)):
            layout, workload = small.layout, small.workload
            model = workload.model
            assert layout.devices <= MOST_RANKS and layout.mbs <= MOST_MBS
            assert layout.pp <= model.layers <= MOST_LAYERS
            assert workload.global_batch % (layout.dp * layout.mbs) == 0
            assert model.heads % layout.tp == 0 and model.hidden % model.heads == 0
            assert layout.recompute == ("none" if small.published.recompute == "unknown" else small.published.recompute)


def test_rows_that_differ_in_the_question_differ_here() -> None:
    """TP 4, TP 2 and TP 1 of BLOOM's last table are three degrees here too, the larger the larger."""
    table = next(table for table in recipe("bloom-176b").tables if table.name == "tp")
    degrees: dict[int, set[int]] = {}
    for small in small_rows(published_rows(table)):
        degrees.setdefault(small.published.tp, set()).add(small.layout.tp)
    assert [len(found) for found in degrees.values()] == [1, 1, 1]
    assert max(degrees[1]) < max(degrees[2]) < max(degrees[4])


def test_a_slow_network_is_slowed_as_the_activations_are() -> None:
    table = next(table for table in recipe("gpt3-xl-p3").tables if table.name == "gpipe-networks")
    for small in small_rows(published_rows(table)):
        assert small.network is not None
        assert small.network.latency_ms == small.published.network_delay_ms
        sent = _sent(small)
        assert small.network.port_gbps == pytest.approx(small.published.network_gbps * sent, rel=0.01)


def _sent(small: SmallRow) -> float:
    row, model = small.published, small.workload.model
    here = small.layout.mbs * small.workload.seq_len * model.hidden
    return here / (row.mbs * row.seq_len * row.hidden)


def test_a_table_of_which_no_layout_is_known_is_refused_in_a_line() -> None:
    of_advice = {"source": "002_8339090b1a866924", "table": "T5"}
    table = PublishedTable(name="advice", question="Which?", compares=("tp",), where=of_advice)
    with pytest.raises(TrimaranError, match="the layout of none of its 5 rows is known"):
        published_rows(table)


def test_a_recipe_of_the_longest_name_is_measured_small_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(self: Workspace, recipe: Recipe) -> None:
        raise TrimaranError(f"the machine is asked for by {recipe.name}")

    monkeypatch.setattr(Workspace, "cluster", asked)
    longest = recipe("fugaku-gpt-1b3").model_copy(update={"name": "n" * 100})
    with pytest.raises(TrimaranError, match="the machine is asked for by nnn"):
        measure_small(
            longest, ["data-parallel"], Workspace(tmp_path), show=lambda trials: nullcontext(print), say=print
        )  # fmt: skip


def test_a_rate_without_a_delay_is_shown_of_a_published_row() -> None:
    """It was left out, and a delay without a rate would have ended the table."""
    (table,) = (each for each in recipe("gpt3-xl-p3").tables if each.name == "megatron-fp32")
    small = small_rows(published_rows(table))[0]
    delayed = replace(
        small, published=small.published.model_copy(update={"network_delay_ms": 1.0, "network_gbps": None})
    )
    assert [each["network"] for each in records([(small, None), (delayed, None)])] == ["25 Gbps", "1 ms"]


def test_small_trials_share_what_their_ranks_are_forked_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial had a launcher of its own, which imported PyTorch anew."""
    launchers: list[object] = []

    def sweep(*about: object, launcher: object, **options: object) -> list[None]:
        launchers.append(launcher)
        return [None]

    monkeypatch.setattr(small_tables, "run_sweep", sweep)
    monkeypatch.setattr(Workspace, "cluster", lambda self, asked: unprobed_machine(asked))
    monkeypatch.setattr(Workspace, "data", lambda self, asked: tmp_path)
    measure_small(
        recipe("fugaku-gpt-1b3"), ["data-parallel"], Workspace(tmp_path), show=lambda trials: nullcontext(print),
        say=print,
    )  # fmt: skip
    assert len(launchers) > 1 and None not in launchers
    assert len({id(launcher) for launcher in launchers}) == 1
