"""Rules asked once per combination of what they read answer as if asked for every layout."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.api import workload_of
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.layout.axes import PLACEMENTS
from trimaran.layout.choices import CHOICE
from trimaran.layout.layout import Layout
from trimaran.layout.rules import RULES
from trimaran.nouns.noun import TrimaranError
from trimaran.planner.planner import plan
from trimaran.planner.search.search import Search
from trimaran.planner.search.sieve import cross, distinct, join

WORKLOAD = workload_of("gpt2-124m", 48, ramp_up=(16, 16, 1000))
CLUSTER = load_cluster("jean-zay-v100-16gb")
STACKS = [load_stack(name) for name in ("trimaran", "megatron", "megatron-deepspeed", "gpipe", "torch-fsdp")]

degree = st.integers(1, 16)


def word(choice: str) -> st.SearchStrategy[str]:
    return st.sampled_from(CHOICE[choice].words)


layouts = st.builds(
    Layout, dp=degree, tp=degree, pp=degree, vpp=st.integers(1, 4), mbs=degree, zero_stage=st.integers(0, 3),
    dp_kind=word("dp_kind"), sequence_parallel=st.booleans(), recompute=word("recompute"),
    precision=st.sampled_from(["fp32", "fp16", "bf16"]), schedule=word("schedule"),
    placement=st.sampled_from(PLACEMENTS),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(layouts, layouts, st.sampled_from(STACKS))
def test_a_rule_is_decided_by_the_fields_that_it_says_it_reads(one: Layout, other: Layout, stack: object) -> None:
    for rule in RULES:
        read = {name for term in rule.reads for name in term.split("*")}
        mixed = other.model_copy(update={name: getattr(one, name) for name in read})
        broken = [rule.broken(layout, WORKLOAD, CLUSTER, stack) is None for layout in (one, mixed)]  # type: ignore[arg-type]
        assert broken[0] == broken[1], rule.name


@settings(max_examples=150, deadline=None)
@given(layouts, st.sampled_from(STACKS))
def test_where_a_rule_reads_a_product_only_the_product_counts(layout: Layout, stack: object) -> None:
    for rule in RULES:
        for first, *rest in (term.split("*") for term in rule.reads if "*" in term):
            product = int(np.prod([getattr(layout, name) for name in (first, *rest)]))
            gathered = layout.model_copy(update={first: product, **dict.fromkeys(rest, 1)})
            answers = [rule.broken(each, WORKLOAD, CLUSTER, stack) is None for each in (layout, gathered)]  # type: ignore[arg-type]
            assert answers[0] == answers[1], rule.name


def test_cross_and_join_are_those_of_databases() -> None:
    left, right = {"a": np.array([1, 2])}, {"b": np.array([5, 6, 7])}
    rows = cross(left, right)
    assert list(zip(rows["a"], rows["b"], strict=True)) == [(a, b) for a in (1, 2) for b in (5, 6, 7)]
    pairs = join({"k": np.array([3, 1, 9])}, {"k": np.array([1, 3, 1]), "v": np.array([10, 30, 11])}, "k")
    assert sorted(zip(pairs["k"].tolist(), pairs["v"].tolist(), strict=True)) == [(1, 10), (1, 11), (3, 30)]


def test_distinct_names_one_member_of_each_combination() -> None:
    first, inverse = distinct([np.array([1, 1, 2, 1]), np.array([0, 5, 0, 0])])
    assert len(first) == 3
    assert inverse[0] == inverse[3]


@pytest.mark.parametrize(
    ("fixed", "says"),
    [
        ({"zero_stage": 3}, "ZeRO stage 3 is not one of megatron-core's 0, 1"),
        ({"ep": 7}, "experts 256 are not a multiple of EP 7"),
        ({"precision": "fp8_rowwise"}, "precision fp8_rowwise is not one of megatron-core's"),
        ({"tp": 3}, "heads 128 is not a multiple of TP 3"),
        ({"dp_kind": "fully_sharded"}, "data-parallel kind fully_sharded with ZeRO stage 0"),
    ],
)
def test_what_is_fixed_and_never_valid_is_refused_before_the_search(
    fixed: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search of all that is refused in the end goes through millions, and what did not fit meanwhile is no reason."""
    monkeypatch.setattr(Search, "search", lambda self: pytest.fail("the search has begun"))
    workload = workload_of("deepseek-v3", 2048).model_copy(update={"seq_len": 4096})
    with pytest.raises(TrimaranError, match=f"no layout is valid: {re.escape(says)}"):
        plan(workload, load_cluster("dgx-h100"), load_stack("megatron-core"), fixed=fixed)


def test_what_is_fixed_and_valid_somewhere_is_searched() -> None:
    workload = workload_of("llama3-8b", 256)
    for fixed in ({"tp": 8, "pp": 4}, {"zero_stage": 1}, {"precision": ("fp8", "bf16")}, {"schedule": "interleaved"}):
        found = plan(workload, load_cluster("dgx-h100"), load_stack("megatron-core"), devices=64, fixed=fixed, top=1)
        assert found.best.layout
