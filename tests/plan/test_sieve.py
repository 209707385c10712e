"""Rules asked once per combination of what they read answer as if asked for every layout."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.api import workload_of
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.layout.axes import PLACEMENTS
from trimaran.layout.choices import CHOICE
from trimaran.layout.layout import Layout
from trimaran.layout.rules import RULES
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
