"""Mixtures of experts and latent attention: operations, kept tensors, parameters on a rank, exchanges."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from trimaran.cost.case import Case
from trimaran.cost.effects.expert import EXPERT
from trimaran.cost.estimate import estimate, estimate_many
from trimaran.cost.estimates import Estimate
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.layers.exchange import Exchanges, copies
from trimaran.cost.memory.rank_memory import OnEveryStage, RankMemory
from trimaran.cost.memory.stage import end_shapes
from trimaran.cost.network import Group, expert_group
from trimaran.cost.shapes import kept_bytes, part_of
from trimaran.cost.table.predict_table import predict_table, score_groups
from trimaran.files.catalogue import catalogue_names, load_cluster, load_model, load_stack
from trimaran.files.row_table import packaged_table, parse_table
from trimaran.layout.axes import PLACEMENTS, AxisName, groups
from trimaran.layout.flops import megatron_core_flops, model_flops
from trimaran.layout.notation import parse_layout
from trimaran.nouns.dispatcher import DISPATCHERS
from trimaran.nouns.model import Model, padded_vocab
from trimaran.nouns.recompute import recompute_cell
from trimaran.nouns.workload import Workload
from trimaran.operators.layer import layer_operators
from trimaran.operators.mixture import exchange_bytes, share_met
from trimaran.operators.modules import kept_under
from trimaran.operators.operator import Part

QWEN, DEEPSEEK = load_model("qwen3-235b-a22b"), load_model("deepseek-v3")
MIXTURES = [name for name in catalogue_names("models") if load_model(name).experts]
STACK = load_stack("megatron-core")


def case_of(model: Model, gbs: int = 2048, **workload: float) -> Case:
    asked = Workload(model=model, seq_len=4096, global_batch=gbs, **workload)
    return Case.of(asked, load_cluster("dgx-h100"), STACK)


def predicted(case: Case, text: str) -> Estimate:
    return estimate(case, parse_layout(text))


@pytest.mark.parametrize("name", MIXTURES)
def test_megatrons_own_count_is_ours_but_for_the_router_and_half_of_the_scores(name: str) -> None:
    model, s = load_model(name).model_copy(update={"sliding_window": 0, "full_attention_every": 0}), 2048
    latent = model.latent_attention
    layers, further = model.layers + model.mtp_depth, model.mtp_depth
    router = 2.0 * s * model.hidden * model.experts * (layers - model.dense_layers)
    half = layers * model.heads * (model.head_dim + model.value_dim) * float(s) ** 2
    # it counts a product for each of latent attention's two norms, and of a further token's three
    norms = 0.0 if latent is None else 2.0 * s * layers * (latent.query_rank + latent.kv_rank)
    norms += 2.0 * s * further * 3 * model.hidden
    ours = model_flops(model, s, 4.0) / 3.0 / 4.0
    assert megatron_core_flops(model, s, 4.0) / 3.0 / 4.0 == pytest.approx(ours - router - half + norms, rel=1e-12)


@pytest.mark.parametrize("name", MIXTURES)
def test_six_operations_for_each_parameter_that_a_token_meets(name: str) -> None:
    model = load_model(name)
    vocabulary = padded_vocab(model.vocab, 1) * model.hidden
    idle = (model.experts - model.top_k) * model.mlp_parameters(model.moe_ffn_hidden)
    met = model.parameters - model.kinds["experts"] * idle - vocabulary  # the embedding is looked up
    module = model.mixture_layer_parameters - idle + model.joining_parameters + vocabulary
    met += model.mtp_depth * module
    scores = 6.0 * (model.layers + model.mtp_depth) * model.heads * (model.head_dim + model.value_dim) * 64
    short = model.model_copy(update={"sliding_window": 0, "full_attention_every": 0})
    assert model_flops(short, 64, 1.0) / 64 == pytest.approx(6.0 * met + scores, rel=0.001)


def part(model: Model, **sizes: float) -> Part:
    return replace(Part.whole(model, 4096, STACK), **sizes)


def kept(model: Model, word: str = "", **sizes: float) -> float:
    """Bytes that a layer of one sequence keeps, all of it or what recompute leaves."""
    of = part(model, **sizes)
    operators = layer_operators(of)
    if word:
        return float(kept_under(word, operators, STACK, of.hidden_elements * of.element))
    return sum(float(tensor.size) for operator in operators for tensor in (*operator.inputs, *operator.inside))


def test_a_mixture_keeps_what_megatron_core_keeps_of_it() -> None:
    # Tokens as they were dispatched, both halves of the gate with a weight in fp32 a token, and what they make of it;
    # norm, router's input, logits and weights in fp32 and the map of a byte: megatron/core/transformer/moe/experts.py,
    # lines 943 to 1030, moe_utils.py, line 1382, fused_bias_swiglu.py, line 270.
    s, h, f, k, e = 4096.0, QWEN.hidden, QWEN.moe_ffn_hidden, QWEN.top_k, QWEN.experts
    dense = QWEN.model_copy(update={"experts": 0, "top_k": 0, "moe_ffn_hidden": 0})
    attention = kept(dense) - 2.0 * s * (2 * h + 3 * QWEN.ffn_hidden)
    expected = s * k * (2 * h + 2 * 2 * f + 4 + 2 * f) + 2 * s * 2 * h + s * e * (4 + 4 + 1)
    assert kept(QWEN) - attention == pytest.approx(expected)
    # however many ranks its experts are spread over, in balance a rank is sent as many tokens as it sends
    assert kept(QWEN, ep=32.0) == kept(QWEN)
    assert kept(QWEN, load=1.5) - kept(QWEN) == pytest.approx(0.5 * s * k * (2 * h + 6 * f + 4))


@pytest.mark.parametrize(
    ("word", "freed"),
    [
        ("moe_act", lambda s, h, f, k, e: 2 * s * k * f),
        ("layernorm", lambda s, h, f, k, e: 2 * s * h),
        ("moe", lambda s, h, f, k, e: s * k * (2 * h + 6 * f + 4) + s * e * 9),
        ("layernorm+moe", lambda s, h, f, k, e: s * k * (2 * h + 6 * f + 4) + s * e * 9 + 2 * s * h),
    ],
)
def test_modules_free_what_they_make_again(word: str, freed: object) -> None:
    sizes = 4096.0, QWEN.hidden, QWEN.moe_ffn_hidden, QWEN.top_k, QWEN.experts
    assert callable(freed)
    assert kept(QWEN) - kept(QWEN, word) == pytest.approx(freed(*sizes))


def test_the_way_up_of_latent_attention_frees_queries_keys_and_values() -> None:
    latent = DEEPSEEK.latent_attention
    assert latent is not None
    freed = 2.0 * 4096 * DEEPSEEK.heads * (2 * latent.head_dim + latent.value_dim)
    assert kept(DEEPSEEK) - kept(DEEPSEEK, "mla_up_proj") == pytest.approx(freed)


def all_parameters(case: Case, text: str) -> float:
    """Parameters over all ranks, those that several hold counted once."""
    layout = parse_layout(text)
    grid = LayoutGrid.from_layouts([layout], case.workload, case.stack)
    every = OnEveryStage(case, grid)
    ends = [RankMemory(case, grid, shape, every) for shape in end_shapes(case.model, grid)]
    stages = [ends[0], *[ends[1]] * (layout.pp - 2), *([ends[2]] if layout.pp > 1 else [])]
    experts = sum(float(rank.experts[0]) * layout.size("ep") * layout.size("etp") for rank in stages)
    return experts + sum(float(rank.count[0] - rank.experts[0]) * layout.tp for rank in stages)


@pytest.mark.parametrize("text", ["dp64,ep64", "dp64,ep16,etp4", "pp2,dp32,ep8", "pp47,dp4,ep4"])
def test_ranks_hold_all_parameters_between_them(text: str) -> None:
    case = case_of(QWEN)
    assert all_parameters(case, text + ",mbs1,bf16") == pytest.approx(QWEN.parameters, rel=1e-12)


def test_stages_hold_the_dense_layers_that_come_first() -> None:
    case = case_of(DEEPSEEK)
    stages = predicted(case, "dp16,pp61,ep16,etp1,dispatch-deepep,mbs1,zero1,bf16").memory
    weights = [stage.weights * 2**30 / 2 for stage in stages]
    latent = DEEPSEEK.uncut_attention_parameters
    dense = DEEPSEEK.layer_parameters
    mixture = DEEPSEEK.mixture_layer_parameters - DEEPSEEK.expert_parameters * 15 / 16
    assert latent and weights[1:3] == pytest.approx([dense] * 2)
    assert weights[3:60] == pytest.approx([mixture] * 57)
    assert stages[1].activations < stages[3].activations


def test_states_of_experts_are_sharded_over_the_replicas_of_their_own_group() -> None:
    case = case_of(QWEN)
    whole, sharded = (predicted(case, f"dp64,ep16,etp1,mbs1,zero{zero},bf16").memory[0] for zero in (0, 1))
    experts = QWEN.expert_parameters * QWEN.layers / 16
    rest = QWEN.parameters - QWEN.expert_parameters * QWEN.layers
    assert whole.optimizer * 2**30 == pytest.approx(12 * (experts + rest))
    assert sharded.optimizer * 2**30 == pytest.approx(12 * (experts / 4 + rest / 64))


@pytest.mark.parametrize(("experts", "top_k", "parts"), [(8, 2, 4), (8, 3, 2), (6, 2, 3)])
def test_chance_of_an_expert_in_a_part_is_that_of_counting(experts: int, top_k: int, parts: int) -> None:
    model = load_model("mixtral-8x7b").model_copy(update={"experts": experts, "top_k": top_k})
    first = set(range(experts // parts))
    chosen = list(combinations(range(experts), top_k))
    met = sum(bool(first & set(each)) for each in chosen) / len(chosen)
    assert share_met(model, np.array([float(parts)]))[0] == pytest.approx(met)


@pytest.mark.parametrize(("groups", "chosen", "parts"), [(4, 2, 4), (4, 2, 2), (4, 3, 8), (2, 1, 4)])
def test_chance_of_an_expert_of_the_groups_chosen_first_is_that_of_counting(
    groups: int, chosen: int, parts: int
) -> None:
    experts, top_k, of_group = 8, 2, 8 // groups
    model = load_model("mixtral-8x7b").model_copy(update={"expert_groups": groups, "top_groups": chosen})
    first = set(range(experts // parts))
    met = []
    for some in combinations(range(groups), chosen):
        may = [expert for expert in range(experts) if expert // of_group in some]
        met += [bool(first & set(each)) for each in combinations(may, top_k)]
    assert share_met(model, np.array([float(parts)]))[0] == pytest.approx(sum(met) / len(met))


def test_a_router_limited_to_some_nodes_sends_less_between_them() -> None:
    limited = load_model("deepseek-v3")
    free = limited.model_copy(update={"expert_groups": 0, "top_groups": 0})
    ranks = group_of(64, 8)
    (inside, across), (inside_free, across_free) = (
        copies(model, DISPATCHERS["deepep"], ranks) for model in (limited, free)
    )
    assert across[0] < 4.0 * 7 / 8 < across_free[0]
    assert inside[0] < inside_free[0]
    # every copy travels by itself whatever the groups
    assert copies(limited, DISPATCHERS["alltoall"], ranks) == copies(free, DISPATCHERS["alltoall"], ranks)


def group_of(ranks: int, inside: int) -> Group:
    return Group(*(np.array([value]) for value in (float(ranks), float(inside), ranks > inside, 1.0)))


def test_copies_that_merge_cross_once_to_a_node_and_others_once_for_each_expert() -> None:
    ranks = group_of(32, 8)
    inside, across = copies(QWEN, DISPATCHERS["alltoall"], ranks)
    assert (inside[0], across[0]) == (8 * 7 / 32, 8 * 24 / 32)
    inside, across = copies(QWEN, DISPATCHERS["deepep"], ranks)
    nodes = 4 * share_met(QWEN, np.array([4.0]))[0]
    assert across[0] == pytest.approx(nodes * 3 / 4) and across[0] < 3.0
    assert inside[0] == pytest.approx(32 * share_met(QWEN, np.array([32.0]))[0] * 7 / 8)
    # in one node nothing crosses
    assert copies(QWEN, DISPATCHERS["deepep"], group_of(8, 8))[1][0] == 0.0
    # of experts that are cut in two each expert's token goes to both ranks, and to no more nodes
    halves = copies(QWEN, DISPATCHERS["deepep"], group_of(64, 16), 2.0)
    assert halves[0][0] == pytest.approx(64 * share_met(QWEN, np.array([32.0]))[0] * 15 / 16)
    assert halves[1] == across


@pytest.mark.parametrize("placement", PLACEMENTS[:6])
@pytest.mark.parametrize("degrees", ["dp8,tp2,pp4,ep4,etp2", "dp16,tp2,pp2,ep16,etp1", "dp4,tp4,pp8,ep8,etp1"])
def test_ranks_of_experts_sit_where_counting_finds_them(degrees: str, placement: tuple[AxisName, ...]) -> None:
    layout = parse_layout(f"{degrees},mbs1").model_copy(update={"placement": placement})
    grid = LayoutGrid.from_layouts([layout], Workload(model=QWEN, seq_len=4096, global_batch=64), STACK)
    for axis in ("ep", "etp", "edp"):
        (ranks, *_) = groups(layout, axis)
        of_node = sum(rank // 8 == ranks[0] // 8 for rank in ranks)
        found = expert_group(grid, load_cluster("dgx-h100"), axis)
        assert (found.ranks[0], found.inside[0], found.crosses[0]) == (len(ranks), of_node, of_node < len(ranks))


@pytest.mark.parametrize("stack", ["megatron-core", "torchtitan"])
def test_layouts_asked_together_take_what_each_takes_alone(stack: str) -> None:
    random, n = np.random.default_rng(0), 60
    workload = Workload(model=DEEPSEEK, seq_len=4096, global_batch=512)
    case = Case.of(workload, load_cluster("dgx-h100"), load_stack(stack))
    grid = LayoutGrid.build(
        workload, case.stack, precision="bf16", dp=random.choice([8, 16], n), tp=random.choice([1, 2], n),
        cp=random.choice([1, 2], n), pp=random.choice([1, 4, 8], n), vpp=random.choice([1, 2], n),
        ep=random.choice([1, 4, 8], n), etp=random.choice([0, 1], n), dispatcher=random.integers(0, 3, n),
        mbs=random.choice([1, 2], n), zero_stage=random.integers(0, 4, n), shard=random.choice([0, 4], n),
        recompute=random.integers(0, 4, n), placement=random.integers(0, 6, n), sequence_parallel=True,
    )  # fmt: skip
    together = estimate_many(case, grid)
    alone = [estimate_many(case, grid.take(slice(row, row + 1))) for row in range(n)]
    assert together.sec_per_it == pytest.approx([each.sec_per_it[0] for each in alone])
    assert together.mem_gib == pytest.approx([each.mem_gib[0] for each in alone])


def test_a_merging_dispatcher_is_worth_most_between_nodes() -> None:
    case = case_of(QWEN)
    shown = {
        (ep, word): predicted(case, f"dp32,pp8,ep{ep},etp1,dispatch-{word},mbs1,zero1,bf16").time.ep
        for ep in (8, 32)
        for word in ("allgather", "alltoall", "deepep")
    }
    assert shown[32, "deepep"] < 0.6 * shown[32, "alltoall"] < shown[32, "allgather"]
    assert shown[8, "deepep"] < shown[8, "alltoall"]
    assert shown[8, "deepep"] < 0.5 * shown[32, "deepep"]
    assert predicted(case, "dp32,pp8,ep1,etp1,mbs1,zero1,bf16").time.ep == 0.0


def test_imbalance_costs_time_and_memory_up_to_the_capacity() -> None:
    text = "dp32,pp8,ep8,etp1,dispatch-deepep,mbs1,zero1,bf16"
    even, busy, capped = (
        predicted(case_of(QWEN, **load), text)
        for load in ({}, {"expert_imbalance": 1.5}, {"expert_imbalance": 1.5, "capacity_factor": 1.2})
    )
    assert even.sec_per_it < capped.sec_per_it < busy.sec_per_it
    assert even.mem_gib < capped.mem_gib < busy.mem_gib


def test_a_gather_brings_the_tokens_of_all_ranks_once_however_experts_are_cut_and_loaded() -> None:
    """Megatron-Core 0.16.1, MoEAllGatherTokenDispatcher: hidden states over tp_ep_group, not copies of tokens."""
    ways = {"dp": 4, "tp": 2, "ep": [4, 8, 1], "etp": [2, 1, 2], "sequence_parallel": True}

    def sent(word: str, **load: float) -> list[float]:
        case = case_of(QWEN, **load)
        grid = LayoutGrid.build(case.workload, STACK, dispatcher=word, **ways)
        operators = layer_operators(part_of(case, grid))
        return Exchanges(case, grid, np.arange(3)).seconds(operators, "backward").tolist()

    both, spread, cut = sent("allgather")
    assert both == pytest.approx(spread)
    assert cut < 0.25 * sent("alltoall")[2], "a token in place of eight copies"
    assert cut == pytest.approx(sent("deepep")[2], rel=0.5), "to the other of two ranks all tokens go"
    assert sent("allgather", expert_imbalance=1.5) == pytest.approx([both, spread, cut])
    assert sent("alltoall", expert_imbalance=1.5)[1] > 1.4 * sent("alltoall")[1]
    busy = case_of(QWEN, expert_imbalance=1.5)
    held = part_of(busy, LayoutGrid.build(busy.workload, STACK, dispatcher="allgather", **ways)).permuting.arriving
    assert 1.5 * held == pytest.approx([2 * 8, 2 * 8, 2 * 2])


@pytest.mark.parametrize(("word", "copies_held"), [("alltoall", 4.0), ("hybridep", 1.0)])
def test_a_dispatcher_holds_copies_on_both_sides_of_its_exchanges(word: str, copies_held: float) -> None:
    grid = LayoutGrid.build(case_of(QWEN).workload, STACK, dp=8, ep=8, etp=1, dispatcher=word, precision="bf16")
    of = part_of(case_of(QWEN), grid)
    forward, backward = exchange_bytes(of)
    one = 4096 * QWEN.top_k * QWEN.hidden * 2.0
    assert forward[0] == pytest.approx(copies_held * one)
    assert backward[0] == pytest.approx(one + 4096 * QWEN.top_k * QWEN.moe_ffn_hidden * 2.0)
    held = {
        name: predicted(case_of(QWEN), f"dp8,pp8,ep8,etp1,dispatch-{name},mbs1,zero1,bf16") for name in (word, "deepep")
    }
    assert (held[word].mem_gib > held["deepep"].mem_gib) == (word == "alltoall")


@pytest.mark.parametrize("word", ["alltoall", "deepep"])
def test_a_selective_recompute_that_makes_no_exchange_again_keeps_what_came_by_it(word: str) -> None:
    """torchtitan 0.2.2, models/deepseek_v3/infra/parallelize.py: all_to_all_single, DeepEP's dispatch and combine."""
    titan, workload = load_stack("torchtitan-0.2"), Workload(model=DEEPSEEK, seq_len=4096, global_batch=64)
    choices = {"dp": 8, "etp": 1, "dispatcher": word, "precision": "bf16", "recompute": "selective"}
    grid = LayoutGrid.build(workload, titan, ep=[1, 8], **choices)
    alone, spread = kept_bytes(Case.of(workload, load_cluster("dgx-h100"), titan), grid).partly
    # a copy for each of 8 experts there and back, or one for each rank that has any of them, and one back
    copies_kept = 8.0 + 8.0 if word == "alltoall" else 8.0 * share_met(DEEPSEEK, np.array([8.0]))[0] + 1.0
    assert spread - alone == pytest.approx(copies_kept * 4096 * DEEPSEEK.hidden * 2.0)


def test_weights_of_tokens_keep_what_they_multiply_where_no_kernel_does_so_as_it_activates() -> None:
    tokens = 4096 * QWEN.top_k
    unfused = STACK.model_copy(update={"fused_gelu": False})
    weighing = unfused.model_copy(update={"weighs_results": True})
    fused_kept, unfused_kept, results_kept = (kept(QWEN, stack=stack) for stack in (STACK, unfused, weighing))
    # the gate's result, and that times the other half
    assert unfused_kept - fused_kept == pytest.approx(2 * tokens * QWEN.moe_ffn_hidden * 2.0)
    assert results_kept - unfused_kept == pytest.approx(tokens * (QWEN.hidden - QWEN.moe_ffn_hidden) * 2.0)


def test_padding_costs_copies_of_narrow_operands_alone() -> None:
    padding = STACK.model_copy(update={"pads_experts": True})
    for precision, dispatcher, more in (("fp8", "deepep", True), ("fp8", "hybridep", False), ("bf16", "deepep", False)):
        text = f"dp8,pp8,ep8,etp1,dispatch-{dispatcher},mbs1,zero1,{precision}"
        case = case_of(QWEN)
        plain = predicted(case, text)
        padded = predicted(Case.of(case.workload, case.cluster, padding, case.calibration), text)
        assert (padded.time.forward > plain.time.forward) == more
        assert (padded.mem_gib > plain.mem_gib) == more


def test_a_device_waits_longest_for_a_host_that_learns_of_tokens_after_they_came() -> None:
    case = case_of(QWEN)
    slow = case.calibrated(case.calibration.model_copy(update={"op_us": 2 * case.calibration.op_us}))
    grown = {}
    for word in ("alltoall", "deepep"):
        text = f"dp8,ep8,etp1,dispatch-{word},mbs4,zero1,bf16"
        grown[word] = predicted(slow, text).time.ep - predicted(case, text).time.ep
    assert grown["deepep"] > grown["alltoall"] > 0.0


def test_grouped_products_are_slower_with_few_tokens_an_expert() -> None:
    case = case_of(QWEN)
    text = "dp8,tp4,pp8,etp1,dispatch-deepep,mbs{},sp,zero1,bf16"
    few, many = (predicted(case, text.format(1) + f",ep{ep}").time for ep in (1, 32))
    assert few.forward > 1.1 * many.forward
    # the same tokens in half as many micro-batches
    assert predicted(case, text.format(2) + ",ep1").time.forward < few.forward


def test_a_first_stage_of_dense_layers_is_faster_than_one_of_experts() -> None:
    text = "dp16,pp61,ep16,etp1,dispatch-deepep,mbs1,zero1,bf16"
    none = DEEPSEEK.model_copy(update={"dense_layers": 0})
    assert predicted(case_of(DEEPSEEK), text).sec_per_it <= predicted(case_of(none), text).sec_per_it
    few = DEEPSEEK.model_copy(update={"dense_layers": 30})
    alone = "dp16,ep16,etp1,dispatch-deepep,mbs1,zero1,bf16"
    of_both = [predicted(case_of(model), alone).time for model in (none, few)]
    assert of_both[1].ep == pytest.approx(of_both[0].ep * 32 / 62)  # one predicts a further token


def test_stages_of_embedding_and_head_alone_are_two_more_than_layers() -> None:
    found = predicted(case_of(QWEN), "dp8,pp32,vpp3,ep8,etp1,mbs1,zero1,bf16")
    assert found.stage_split == (0, *[1] * 94, 0)


def test_a_rank_of_the_embedding_alone_has_no_layer_at_work() -> None:
    model = QWEN.model_copy(update={"layers": 6})
    found = predicted(case_of(model), "dp8,pp8,ep8,etp1,mbs1,zero1,recompute-full,bf16,split0-1-1-1-1-1-1-0")
    assert found.memory[0].activations == found.memory[-1].activations == 0.0
    assert found.memory[1].activations > 0.0


ROW = (
    "model,cluster,stack,seq_len,gbs,dp,tp,pp,vpp,mbs,ep,etp,dispatcher,recompute,precision,zero_stage,tflops,"
    "tokens_per_s_per_gpu,sec_per_it\n"
    'Qwen3-235B-A22B,dgx-h100,megatron-core,4096,2048,16,2,8,4,1.0,32,1.0,DeepEP,"norm, act",bf16,1,{},{},{}\n'
)


def test_a_row_may_state_its_speed_in_tflops_or_in_tokens() -> None:
    seconds = []
    for stated in (("245", "", ""), ("", str(2048 * 4096 / 19.8 / 256), ""), ("", "", "19.8")):
        (row,) = predict_table(parse_table(ROW.format(*stated), "t"), priors_only=True)
        assert row.error is None and row.row.measurement is not None and row.tflops is not None
        assert (row.row.measurement.dispatcher, row.row.measurement.recompute) == ("deepep", "layernorm+moe_act")
        assert row.seconds is not None
        seconds.append(row.seconds)
        (total,) = score_groups([row])
        assert total.time is not None and total.time.mape < 0.15
    # Megatron's own calculator turns the published TFLOPs into the published time, 19.7 s
    assert seconds == pytest.approx([19.8, 19.8, 19.8], rel=0.005)


@pytest.mark.parametrize(
    ("cell", "word"),
    [("selective: layernorm moe", "layernorm+moe"), ("norm, act, shared_expert", "layernorm+moe_act+shared_experts")],
)
def test_modules_are_read_as_tables_write_them(cell: str, word: str) -> None:
    assert recompute_cell(cell) == word
    with pytest.raises(ValueError, match="expected none, selective, full"):
        recompute_cell(cell + " everything")


def test_rows_of_mixtures_that_ship_are_predicted_unfitted() -> None:
    rows = [row for row in predict_table(packaged_table("moe_qwen3_megatron"), priors_only=True) if row.estimate]
    off = {
        (row.row.cells["table"], row.row.cells["row"]): row.estimate.sec_per_it / row.seconds - 1.0
        for row in rows
        if row.estimate is not None and row.seconds is not None
    }
    forced = [
        off[key]
        for key in (
            ("H100 cross-node/intra-node EP", "1"), ("H100 long context", "1"), ("GB200", "1"), ("GB200", "2"),
            ("GB300", "4"),
        )
    ]  # fmt: skip
    assert max(map(abs, forced)) < 0.12
    # sharded over nodes: what is gathered for each layer takes about as long as it computes
    assert abs(off["H100 cross-node/intra-node EP", "3"]) < 0.12
    total = score_groups(rows)[-1].time
    assert total is not None and total.tau is not None
    assert total.mape < 0.12 and total.tau > 0.8


def test_the_sentence_about_exchanges_names_what_gathers_tokens_beside_ep() -> None:
    case = Case.of(
        Workload(model=load_model("mixtral-8x7b"), seq_len=4096, global_batch=64), load_cluster("dgx-h100"),
        load_stack("megatron-core"),
    )  # fmt: skip
    (part,) = EXPERT.parts
    both, alone, sliced = (
        part.cause(parse_layout(f"dp8,tp4,{experts},mbs1,zero1,sp,bf16"), case, 1)
        for experts in ("ep2,etp4", "ep8,etp1", "ep1,etp4")
    )
    assert "EP 2 sends" in both and "ETP 4 gathers" in both
    assert "EP 8 sends" in alone and "ETP" not in alone
    assert sliced.startswith("ETP 4 gathers")
