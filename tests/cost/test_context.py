"""Context parallelism and hybrid sharding in the cost model: what a rank does, holds and sends."""

from __future__ import annotations

import numpy as np
import pytest

from trimaran.api import workload_of
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate, estimate_each
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.network import group, group_along
from trimaran.cost.shapes import part_of
from trimaran.cost.states import OPTIMIZER, WEIGHTS, shards
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.operators.layer import layer_operators

CLUSTER = load_cluster("dgx-h100").model_copy(update={"nodes": 64})
MEGATRON, TORCHTITAN, DEEPSPEED = (load_stack(name) for name in ("megatron-core", "torchtitan", "deepspeed"))


def case_of(stack: str = "megatron-core", seq: int = 131072, gbs: int = 64, model: str = "llama3-8b") -> Case:
    return Case.of(workload_of(model, gbs, seq=seq), CLUSTER, load_stack(stack))


def grid_of(case: Case, *layouts: str) -> LayoutGrid:
    return LayoutGrid.from_layouts([parse_layout(f"{one},bf16") for one in layouts], case.workload, case.stack)


def layout(text: str) -> Layout:
    return parse_layout(f"{text},bf16")


@pytest.mark.parametrize("kind", ["ring", "all_gather", "ulysses"])
def test_ranks_of_a_sequence_share_out_all_of_a_layers_products_evenly(kind: str) -> None:
    case = case_of()
    whole = _operations(case, "dp1")
    for cp in (2, 4, 8):
        assert _operations(case, f"cp{cp},cp-{kind}") * cp == pytest.approx(whole)


def _operations(case: Case, text: str) -> float:
    operators = layer_operators(part_of(case, grid_of(case, text)))
    return sum(np.asarray(product.operations).item() for operator in operators for product in operator.forward)


def test_a_layout_of_whole_sequences_is_priced_alike_alone_and_beside_one_that_shares_them() -> None:
    case = case_of(seq=8192)
    plain, _ = estimate_each(case, grid_of(case, "dp8,tp4,zero1,sp,mbs1", "dp4,tp4,cp2,zero1,sp,mbs1"))
    assert plain == estimate(case, layout("dp8,tp4,zero1,sp,mbs1"))


def test_what_layers_and_the_head_keep_falls_with_the_ranks_of_a_sequence() -> None:
    case = case_of()
    two, four = (estimate(case, layout(f"dp8,tp2,cp{cp},zero1,sp,cp-ulysses")).memory[0] for cp in (2, 4))
    # less what the layer at work gathers, which does not fall
    assert four.activations == pytest.approx(two.activations / 2, rel=0.02)
    assert four.logits == pytest.approx(two.logits / 2)
    assert four.optimizer == pytest.approx(two.optimizer / 2)
    assert four.weights == two.weights


def test_a_ring_hides_behind_attention_where_the_sequence_is_long_and_not_where_it_is_short() -> None:
    shares = {}
    for seq in (8192, 1_048_576):
        case = case_of(seq=seq, gbs=1)
        found = estimate(case, layout("tp1,cp16,cp-ring"))
        gathered = estimate(case, layout("tp1,cp16,cp-all_gather"))
        shares[seq] = found.time.cp / found.sec_per_it
        assert gathered.time.cp > 0
    assert shares[8192] > 5 * shares[1_048_576]
    # the gradients' last step home is hidden by nothing
    assert shares[1_048_576] > 0


def test_a_ring_goes_on_while_a_device_waits_for_its_host() -> None:
    # of small experts launches take longer than computing: where attention is faster, no layer may take longer
    case = case_of(seq=4096, gbs=128, model="qwen3-30b-a3b")
    device = CLUSTER.device
    peaks = {rate: 1.3 * peak for rate, peak in device.peak_tflops.items()}
    faster = CLUSTER.model_copy(update={"device": device.model_copy(update={"peak_tflops": peaks})})
    for text in ("dp32,tp1,cp4,etp1,dispatch-deepep,mbs4,zero1", "dp32,tp1,cp4,mbs4,zero1,recompute-full"):
        slow, fast = (estimate(case.on(cluster), layout(text)) for cluster in (CLUSTER, faster))
        assert fast.time.cp <= slow.time.cp + 1e-12
        assert fast.sec_per_it < slow.sec_per_it


def test_a_ring_inside_a_node_is_faster_than_one_across_nodes() -> None:
    case = case_of(seq=16384)
    inside, across = (estimate(case, layout(f"{degrees},mbs1")).time.cp for degrees in ("dp8,cp8", "tp8,cp8,sp"))
    assert inside < across / 4  # of an eighth of the keys and values, too


def test_recompute_of_whole_layers_sends_keys_and_values_again() -> None:
    case = case_of(seq=16384)
    once = estimate(case, layout("dp8,cp8,cp-all_gather")).time.cp
    assert estimate(case, layout("dp8,cp8,cp-all_gather,recompute-full")).time.cp == pytest.approx(
        once * 4 / 3, rel=0.05
    )


def test_gathered_keys_and_values_are_held_whole() -> None:
    case = case_of(gbs=8)
    gathered, dealt = (
        estimate(case, layout(f"dp8,pp2,cp8,cp-{kind},zero1,recompute-full")).memory[0].activations
        for kind in ("all_gather", "ulysses")
    )
    keys_values = 131072 * 2 * 8 * 128 * 2 / 2**30
    queries_and_result = 131072 / 8 * 2 * 4096 * 2 / 2**30
    expected = 2 * keys_values - (queries_and_result + keys_values / 8)
    assert gathered - dealt == pytest.approx(expected * case.calibration.activation_scale)


def test_zero_shards_over_replicas_and_over_the_ranks_of_their_sequences() -> None:
    case = case_of()
    grid = grid_of(case, "dp4,cp8,zero1", "dp4,cp8", "dp16,shard4,cp2,zero1", "dp1,cp8,fsdp")
    assert shards(grid, OPTIMIZER).tolist() == [32, 1, 8, 8]
    assert shards(grid, WEIGHTS).tolist() == [1, 1, 1, 8]


def test_gradients_are_summed_over_the_ranks_of_a_sequence_too() -> None:
    case = case_of(seq=16384, gbs=8)
    alone, shared = (estimate(case, layout(degrees)).time.dp for degrees in ("dp1,tp8,sp,mbs8", "dp1,tp8,cp4,sp,mbs8"))
    assert alone == 0 < shared


@pytest.mark.parametrize(("stack", "zero"), [("megatron-core", "zero1"), ("torchtitan", "fsdp")])
def test_parts_of_the_replicas_that_share_out_states_hold_more(stack: str, zero: str) -> None:
    case = case_of(stack, seq=8192, gbs=512)
    full, hybrid = (estimate(case, layout(f"{degrees},{zero},mbs1")) for degrees in ("dp512", "dp512,shard8"))
    assert hybrid.memory[0].optimizer == pytest.approx(64 * full.memory[0].optimizer, rel=0.01)
    assert hybrid.mem_gib > full.mem_gib + 8.0


def test_layers_are_gathered_faster_inside_a_node_than_over_all_nodes() -> None:
    # so few tokens that gathers do not hide
    case = case_of("torchtitan", seq=1024, gbs=512)
    full, hybrid = (estimate(case, layout(f"{degrees},fsdp,mbs1")) for degrees in ("dp512", "dp512,shard8"))
    assert hybrid.time.dp < full.time.dp
    # two gathers and a scatter of a layer over all nodes' links in one case, a sum of eighths in the other
    assert hybrid.time.dp > 0.1 * full.time.dp


def test_copies_sum_an_eighth_of_the_gradients_between_nodes() -> None:
    case = case_of(gbs=64)
    grid = grid_of(case, "dp64,shard8,zero1", "dp64,shard64,zero1", "dp64,zero1")
    between = group_along(grid, CLUSTER, "replicate")
    assert between.ranks.tolist() == [8, 1, 1]
    assert between.crosses.tolist() == [True, False, False]
    inside = group_along(grid, CLUSTER, "cp", "shard")
    assert inside.crosses.tolist() == [False, True, True]
    hybrid, stated, usual = (estimate(case, grid.layout(i)) for i in range(3))
    assert stated.time == usual.time
    assert hybrid.time != usual.time


def test_a_group_along_one_axis_is_the_group_of_that_axis() -> None:
    case = case_of()
    grid = grid_of(case, "dp4,tp2,pp2", "dp16,tp8", "dp2,place-dp-tp-pp,tp8", "dp3,cp2,tp4,place-tp-pp-dp,pp2")
    for axis in ("dp", "tp", "pp", "cp"):
        one, other = group(grid.size(axis), grid.stride(axis), grid.devices, CLUSTER), group_along(grid, CLUSTER, axis)
        for name in ("ranks", "inside", "crosses", "rivals"):
            assert np.array_equal(getattr(one, name), getattr(other, name))


def test_stacks_that_repeat_keys_and_values_send_all_heads() -> None:
    sizes = {}
    for stack in (MEGATRON, TORCHTITAN, DEEPSPEED):
        case = case_of(stack.name)
        kind = "ulysses" if stack is DEEPSPEED else "ring"
        operators = layer_operators(part_of(case, grid_of(case, f"cp32,cp-{kind}")))
        sent = [c for operator in operators for c in operator.collectives if c.axis == "cp" and c.phase == "forward"]
        sizes[stack.name] = sum(float(np.asarray(c.size).sum()) for c in sent)
    tokens = 131072 / 32
    assert sizes["megatron-core"] == tokens * 2 * 1024 * 2
    assert sizes["torchtitan"] == tokens * 2 * 4096 * 2
    # queries and the result, and each of 8 heads of keys and values to 4 of 32 ranks
    assert sizes["deepspeed"] == tokens * (2 * 4096 + 2 * 1024 * 4) * 2


@pytest.mark.parametrize(("stack", "exchanges"), [("megatron-core", 4), ("trimaran", 2)])
def test_heads_are_dealt_out_by_one_exchange_for_each_tensor_unless_they_are_turned_at_once(
    stack: str, exchanges: int
) -> None:
    """Queries, keys, values and the result, each way of 8 micro-batches: what begins slowly begins that often."""
    case = case_of(stack, seq=8192, gbs=8)
    slow = case.calibration.model_copy(update={"collective_us": case.calibration.collective_us + 1e4})
    fast_s, slow_s = (
        estimate(each, layout("dp1,tp1,cp8,mbs1,cp-ulysses")).time.cp for each in (case, case.calibrated(slow))
    )
    assert slow_s - fast_s == pytest.approx(8 * 2 * exchanges * 1e-2 * case.model.layers, rel=0.02)


def test_pytorch_adds_up_results_of_every_ranks_keys_whether_they_are_gathered_or_passed_on() -> None:
    case = case_of("torchtitan")
    moved = {}
    for kind in ("ring", "all_gather", "ulysses"):
        operators = layer_operators(part_of(case, grid_of(case, f"cp8,cp-{kind}")))
        moved[kind] = sum(float(np.asarray(each.moved_forward).sum()) for each in operators)
    assert moved["ring"] == moved["all_gather"] > moved["ulysses"]
