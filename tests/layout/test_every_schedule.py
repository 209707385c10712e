"""A schedule is one word, which whatever goes by schedules knows: none of them counts as another or as nothing."""

from __future__ import annotations

from typing import get_args

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.estimate import time_many
from trimaran.cost.grid import LayoutGrid
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.layout.schedule import NEEDS
from trimaran.nouns.stack import FOLDED, Schedule
from trimaran.nouns.workload import Workload
from trimaran.planner.search.search import LEANEST

WORDS = get_args(Schedule)


def test_every_schedule_says_what_it_needs_and_how_lean_it_is() -> None:
    assert tuple(NEEDS) == WORDS
    assert sorted(LEANEST) == sorted(WORDS)
    assert {word for word, needs in NEEDS.items() if needs.chunks > 1} == set(FOLDED)


def test_a_pipeline_takes_longer_than_its_work_under_every_schedule() -> None:
    """One whose bubble has no formula would take no more than the work, and be the best of all plans."""
    stack = load_stack("trimaran")
    case = Case.of(
        Workload(model=load_model("llama3-8b"), seq_len=2048, global_batch=64), load_cluster("dgx-h100"), stack
    )
    words = [word for word in WORDS if word != "none"]
    chunks = [NEEDS[word].chunks or 2 for word in words]
    layouts = LayoutGrid.build(case.workload, stack, pp=4, schedule=words, vpp=chunks, precision="bf16")
    few = layouts.with_global_batch(np.full(len(words), 8))
    per_sequence = time_many(case, layouts) / 64.0
    assert (time_many(case, few) / 8.0 > 1.02 * per_sequence).all()
