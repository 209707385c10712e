"""Modules of a layer that run as CUDA graphs are launched once, whatever they are made of."""

from __future__ import annotations

import numpy as np
import pytest

from trimaran.api import workload_of
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.shapes import part_at
from trimaran.files.catalogue import catalogue_names, load_cluster, load_model, load_stack
from trimaran.layout.notation import parse_layout
from trimaran.nouns.workload import Workload
from trimaran.operators.graphs import GRAPH_LAUNCHES, launched
from trimaran.operators.layer import layer_operators

H100 = load_cluster("dgx-h100")
CORE = load_stack("megatron-core")


def test_what_graphs_replay_the_host_does_not_launch() -> None:
    """A layer so small that its host is what takes time: graphs leave nearly what a host would that took none."""
    small, layout = workload_of("gpt2-124m", 8, seq=128), parse_layout("dp8,mbs1,zero1,bf16")

    def compute(**facts: object) -> float:
        time = estimate(Case.of(small, H100, CORE.model_copy(update=facts)), layout).time
        return time.forward + time.backward

    plain, whole, attention = compute(), compute(graphed=("attn", "mlp")), compute(graphed=("attn",))
    assert compute(op_us=1e-6) <= whole < attention < 0.8 * plain
    assert whole == compute(graphed=("attn", "mlp", "moe_router"))


def test_a_host_that_is_ahead_of_its_device_gains_nothing_by_graphs() -> None:
    large, layout = workload_of("llama3-405b", 64), parse_layout("dp8,tp8,mbs1,zero1,sp,bf16")
    plain, graphs = (
        estimate(Case.of(large, H100, stack), layout).sec_per_it for stack in (CORE, load_stack("megatron-core-graphs"))
    )
    assert graphs == plain


@pytest.mark.parametrize("name", catalogue_names("models"))
def test_modules_cover_all_of_a_layer(name: str) -> None:
    """Attention and MLP, or attention and experts, leave a layer of any model no launch of its own."""
    stack = CORE.model_copy(update={"graphed": ("attn", "mlp", "moe")})
    case = Case.of(Workload(model=load_model(name), seq_len=256, global_batch=8), H100, stack)
    one, bf16 = np.ones(1, dtype=np.int64), np.full(1, 2, dtype=np.int64)
    part = part_at(case, 256, one, one, bf16, sequence_parallel=False)
    for kind in case.model.kinds:
        assert np.max(launched(layer_operators(part, kind), stack)) == GRAPH_LAUNCHES, kind
