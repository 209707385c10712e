"""A ranking leaves out what says nothing beside what stays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimaran.api import workload_of
from trimaran.cost.case import Case
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.layout.layout import Layout, resolve_split
from trimaran.planner.planner import plan, searched
from trimaran.planner.search import search
from trimaran.planner.search.ranking import telling
from trimaran.planner.search.settings import settings_from


class Row(NamedTuple):
    seconds: float
    gib: float
    uneven: int
    vpp: int
    recompute: int
    mbs: int


ROWS = st.lists(
    st.builds(
        Row, st.floats(1.0, 1.1), st.floats(1.0, 1.1), st.integers(0, 3), st.integers(1, 4), st.integers(0, 2),
        st.integers(1, 2),
    ),
    max_size=40,
)  # fmt: skip


def told(rows: list[Row]) -> list[int]:
    """Which rows stay, best first."""
    columns = {name: np.array([getattr(row, name) for row in rows], dtype=np.int64) for name in Row._fields[3:]}
    seconds, memory = np.array([row.seconds for row in rows]), np.array([row.gib for row in rows])
    uneven = np.array([row.uneven for row in rows], dtype=np.int64)
    order = np.argsort(seconds, kind="stable")
    return telling(order, seconds, memory, uneven, columns).tolist()


@given(ROWS)
def test_what_is_left_out_has_a_better_or_an_equal_that_stays(rows: list[Row]) -> None:
    kept = told(rows)
    assert sorted(kept, key=lambda index: rows[index].seconds) == kept
    for row in (row for index, row in enumerate(rows) if index not in kept):
        alike = [other for other in rows if other is not row and other.mbs == row.mbs]
        assert any(
            (other.vpp == row.vpp and other.seconds <= row.seconds and other.gib <= row.gib * 1.01)
            or (other.recompute == row.recompute and other.seconds / row.seconds <= 1.01)
            or (
                (other.recompute, other.vpp < row.vpp) == (row.recompute, True)
                and other.seconds <= row.seconds
                and other.gib <= row.gib * 1.01
            )
            for other in alike
        )
        assert any(rows[one].mbs == row.mbs and rows[one].seconds <= row.seconds * 1.01 for one in kept)


@given(ROWS)
def test_what_stays_differs_from_the_others_in_what_it_brings(rows: list[Row]) -> None:
    kept = [rows[index] for index in told(rows)]
    for place, row in enumerate(kept):
        for slower in kept[place + 1 :]:
            if (row.vpp, row.mbs) == (slower.vpp, slower.mbs):
                assert slower.gib * 1.01 < row.gib or slower.seconds == row.seconds


def test_of_equal_numbers_of_virtual_stages_the_evenest_stays() -> None:
    even, uneven = Row(1.009, 1.0, 0, 5, 0, 1), Row(1.0, 1.0, 2, 7, 0, 1)
    slower, other = Row(1.02, 1.0, 0, 2, 0, 1), Row(1.0, 1.0, 0, 4, 0, 2)
    assert told([uneven, even, slower, other]) == [3, 1, 2]
    assert told([uneven, even, slower._replace(vpp=8), other]) == [3, 1]
    assert told([uneven, even, slower._replace(vpp=8, gib=0.98), other]) == [3, 1, 2]
    assert told([uneven, even._replace(vpp=7, recompute=1), slower]) == [0, 2]


@pytest.mark.parametrize(
    ("model", "devices", "batch"), [("llama3-70b", 256, 512), ("llama3-405b", 16_384, 2048), ("qwen3-8b", 64, 256)]
)
def test_a_plan_of_megatron_core_shows_unlike_layouts_and_stages_as_the_software_makes_them(
    model: str, devices: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty numbers of virtual stages of one layout of 70B stood before any other, of odd splits at that."""
    workload = workload_of(model, batch, seq=8192)
    cluster, stack = load_cluster("dgx-h100"), load_stack("megatron-core")
    found = plan(workload, cluster, stack, devices=devices)
    assert len(found.entries) == 20
    best = found.best.layout
    assert best.stage_split == ()
    assert len(set(resolve_split(best, workload, stack)[1:-1])) <= 1

    def kind(layout: Layout) -> Layout:
        return layout.model_copy(update={"vpp": 1, "schedule": "none", "stage_split": (), "placement": ()})

    alike = [
        (one.sec_per_it, other.sec_per_it)
        for one in found.entries
        for other in found.entries
        if one.rank < other.rank and kind(one.layout) == kind(other.layout)
    ]
    assert not [pair for pair in alike if pair[1] < pair[0]]
    assert len({str(kind(entry.layout)) for entry in found.entries}) >= 8
    with monkeypatch.context() as everything:
        everything.setattr(search, "telling", lambda order, *_: order)
        _, ranking = searched(Case.of(workload, cluster, stack), settings_from(devices=devices))
    assert found.best.sec_per_it <= 1.01 * ranking.sec_per_it.min()
