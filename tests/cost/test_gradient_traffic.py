"""Gradients among replicas: what hides behind which pass, and what experts' ranks send each other."""

from __future__ import annotations

import pytest

from trimaran.api import workload_of
from trimaran.cost.case import Case
from trimaran.cost.effects.effect import IterationCost
from trimaran.cost.estimate import estimate
from trimaran.cost.estimates import Estimate
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.memory.stage import end_shapes, expert_parameters, parameters, rank_layer_parameters
from trimaran.cost.stage_work import micro_batch, stage_work
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.device import Device
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.hardware.measured import CollectiveTime
from trimaran.nouns.model import Model
from trimaran.nouns.workload import Workload

H100 = load_cluster("dgx-h100")
QWEN = load_model("qwen3-30b-a3b")


def seconds_shown(model: str, stack: str, text: str, global_batch: int) -> float:
    """What replicas take to agree, of sequences of 4,096 tokens on H100, beside what hides."""
    workload = Workload(model=load_model(model), seq_len=4096, global_batch=global_batch)
    return estimate(Case.of(workload, H100, load_stack(stack)), parse_layout(text + ",bf16")).time.dp


@pytest.mark.parametrize("mbs", [1, 2, 4])
def test_zero_2_waits_no_longer_than_zero_3_which_moves_more(mbs: int) -> None:
    """Each micro-batch's scatter hides behind its own backward."""
    workload, cluster = workload_of("llama3-8b", 512, seq=2048), load_cluster("aws-p4d-24xlarge")
    case = Case.of(workload, cluster, load_stack("torch-fsdp"))
    two, three = (
        estimate(case, parse_layout(f"dp64,mbs{mbs},{sharded},bf16")).time.dp for sharded in ("zero2", "zero3,fsdp")
    )
    assert 0.0 < two < three


def test_parts_that_are_all_replicas_are_no_parts() -> None:
    for stack, text in (("torchtitan", "mbs1,fsdp,ep8"), ("trimaran", "mbs1,zero2,ep8"), ("megatron-core", "mbs1,ep8")):
        plain, parts = (seconds_shown("qwen3-30b-a3b", stack, f"dp64{part},{text}", 256) for part in ("", ",shard64"))
        assert plain == parts


def test_experts_that_no_other_rank_of_the_part_holds_are_summed_by_their_copies_and_not_gathered() -> None:
    """Of 64 ranks in parts of 8 that deal 128 experts out, each holds 16 of a layer whole, as 7 others elsewhere do."""
    experts = QWEN.expert_parameters / 8 * QWEN.layers
    link = H100.inter.bytes_per_s * 1.0
    stack = load_stack("trimaran").model_copy(update={"overlap_dp": 0.0})
    workload = Workload(model=QWEN, seq_len=4096, global_batch=256)
    for sharded in ("zero1", "fsdp"):
        text = f"dp64,shard8,ep8,mbs1,{sharded},bf16"
        found = estimate(Case.of(workload, H100, stack), parse_layout(text)).time.dp
        # 4 bytes of each gradient twice over the node's link, which its 8 ranks share
        of_copies = 2 * 7 / 8 * 4 * experts / (link / 8)
        rest = 3.0 if sharded == "fsdp" else 2.0
        assert of_copies < found < rest * of_copies, sharded


def test_ranks_beyond_the_number_of_key_heads_hold_whole_ones() -> None:
    """Of 8 heads of 128, 16 ranks hold one each, and 4 two each, for keys and for values."""
    model = load_model("llama3-8b")
    layouts = [parse_layout(f"dp1,tp{tp},mbs1,bf16") for tp in (4, 16)]
    grid = LayoutGrid.from_layouts(layouts, workload_of("llama3-8b", 8), load_stack("megatron-core"))
    few, many = rank_layer_parameters(model, grid, "dense")
    rest = model.layer_parameters - 2 * model.hidden * 8 * 128
    assert few == rest / 4 + 2 * model.hidden * 2 * 128
    assert many == rest / 16 + 2 * model.hidden * 128


def case_of(stack: str, global_batch: int, **facts: object) -> Case:
    """Llama-3-70B on H100 under a stack but for some facts."""
    return Case.of(workload_of("llama3-70b", global_batch, seq=8192), H100, load_stack(stack).model_copy(update=facts))


def estimated(stack: str, text: str, global_batch: int, **facts: object) -> Estimate:
    return estimate(case_of(stack, global_batch, **facts), parse_layout(text))


@pytest.mark.parametrize("stack", ["torchtitan", "torchtitan-0.2-compiled"])
def test_a_pipeline_of_fsdp_holds_weights_and_gradients_whole_and_moves_them_once(stack: str) -> None:
    text = "dp8,tp4,pp4,mbs1,fsdp,sp,recompute-full,bf16"
    few, many = (estimated(stack, text, batch) for batch in (64, 256))
    sharded = estimated(stack, text, 64, pipelines_keep_whole=False)
    # a rank of the first stage has 20 of 80 layers, a quarter of each, in 2 bytes and gradients in 4
    whole = load_model("llama3-70b").layer_parameters * 20 / 4
    grown = few.memory[0].weights + few.memory[0].gradients - sharded.memory[0].weights - sharded.memory[0].gradients
    assert grown == pytest.approx(whole * (2 + 4 * 7 / 8) / 2**30, rel=0.2)
    # of 4 times the micro-batches only what passes through memory grows: 10 bytes a parameter
    bandwidth = H100.device.mem_bandwidth_gb_s * 1e9 * case_of(stack, 64).calibration.memory
    assert many.time.dp - few.time.dp == pytest.approx(24 * whole * 10 / bandwidth, rel=0.1)
    assert estimated(stack, text, 256, pipelines_keep_whole=False).time.dp > 2 * many.time.dp
    alone = "dp32,tp4,mbs1,fsdp,sp,recompute-full,bf16"
    assert estimated(stack, alone, 64) == estimated(stack, alone, 64, pipelines_keep_whole=False)


def test_deepspeed_sums_gradients_whole_under_zero_1_and_2_and_lays_them_into_buckets() -> None:
    def dp_s(text: str, **facts: object) -> float:
        return estimated("deepspeed", text + ",recompute-full,bf16", 64, **facts).time.dp

    apart = {"all_reduced_zero_stages": (), "bucket_passes": 0}
    scattered, summed = dp_s("dp64,mbs1,zero1", **apart), dp_s("dp64,mbs1,zero1", bucket_passes=0)
    assert summed == pytest.approx(1.5 * scattered, rel=0.1), "a sum and a gather are three of scatter and gather's two"
    passed = 12 * load_model("llama3-70b").parameters / (H100.device.mem_bandwidth_gb_s * 1e9)
    assert 0.9 * passed < dp_s("dp64,mbs1,zero1") - summed < 1.5 * passed
    assert dp_s("dp64,mbs1,fsdp", **apart) == dp_s("dp64,mbs1,fsdp")


def test_deepspeeds_zero_3_gathers_ahead_and_keeps_what_it_wants_again() -> None:
    def found(model: str, **facts: object) -> Estimate:
        case = Case.of(workload_of(model, 64, seq=2048), H100, load_stack("deepspeed").model_copy(update=facts))
        return estimate(case, parse_layout("dp64,mbs1,fsdp,bf16"))

    two_layers = {"live_parameters": 0, "reuse_parameters": 0}
    more = found("llama3-8b").memory[0].weights - found("llama3-8b", **two_layers).memory[0].weights
    assert more == pytest.approx((1e9 - 2 * load_model("llama3-8b").layer_parameters) * 2 / 2**30, rel=0.05)
    assert found("llama3-8b").time.dp <= found("llama3-8b", **two_layers).time.dp


@pytest.mark.parametrize(("text", "ahead"), [("dp8,mbs1", True), ("dp4,pp2,mbs1", False), ("dp4,pp2,vpp4,mbs1", True)])
def test_weights_of_later_stages_arrive_behind_a_forward_with_virtual_stages_alone(text: str, ahead: bool) -> None:
    text = f"{text},zero1,bf16"
    hidden = estimated("megatron-core", text, 64).time.dp
    shown = estimated("megatron-core", text, 64, gathers_behind_forward=False).time.dp
    nothing = estimated("megatron-core", text, 64, overlapped_zero_stages=(0,)).time.dp
    assert shown < nothing
    assert hidden < 0.5 * shown if ahead else hidden == shown


CPU_MODEL = Model(layers=4, hidden=256, heads=4, vocab=1024, max_positions=64)


def on_cores(text: str, cores: int, micro_batches: int = 1, *, clears: bool = True) -> tuple[float, Case]:
    """What replicas of four slots take to agree, beside nothing, where sums of 2 and 4 ranks were probed."""
    cpu = Device(kind="cpu", cores=1, peak_tflops={"fp32": 0.2}, mem_gib=16, mem_bandwidth_gb_s=20)
    fast = Link(bandwidth_gbps=1e6, latency_us=0.0)
    probed = tuple(
        CollectiveTime(op="all_reduce", ranks=ranks, bytes=size, time_us=size * us)
        for ranks, us in ((2, 1e-3), (4, 2e-3))
        for size in (2**10, 2**30)
    )
    cluster = Cluster(
        device=cpu, nodes=1, devices_per_node=4, cores_per_node=cores, intra=fast, inter=fast, collectives=probed
    )
    layout = parse_layout(text)
    workload = Workload(model=CPU_MODEL, seq_len=64, global_batch=layout.dp * layout.mbs * micro_batches)
    case = Case.of(workload, cluster, load_stack("trimaran").model_copy(update={"clears_unit_gradients": clears}))
    return estimate(case, layout).time.dp, case


def test_two_pairs_on_two_cores_take_turns_at_their_sums_and_four_ranks_that_were_probed_do_not() -> None:
    for text, turns in (("dp2,tp2,mbs1", 2.0), ("dp4,mbs1", 1.0), ("dp2,mbs1", 1.0)):
        two, four = (on_cores(text, cores)[0] for cores in (2, 4))
        assert two == pytest.approx(turns * four, rel=1e-4), text  # but for what it takes to begin


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("sharded", ["zero1", "zero2", "zero3,fsdp"])
def test_gradients_of_units_are_cleared_and_added_up_each_micro_batch(sharded: str, micro_batches: int) -> None:
    """4 bytes of each are set to zero, and 12 of a rank's half pass as they are added to their sum."""
    text = f"dp2,mbs1,{sharded}"
    apart, case = on_cores(text, 4, micro_batches)
    together, _ = on_cores(text, 4, micro_batches, clears=False)
    passed = 0 if sharded == "zero1" else micro_batches * (4 + 12 / 2) * CPU_MODEL.parameters
    assert apart - together == pytest.approx(passed / 20e9 / case.calibration.memory, rel=2e-2)


def test_a_parameter_server_takes_in_the_gradients_of_experts_too() -> None:
    """Those of no copy of an expert are nobody's to take in."""
    model = load_model("deepseek-v2-lite")
    wide = model.model_copy(update={"moe_ffn_hidden": 2 * model.moe_ffn_hidden})
    cluster, stack = load_cluster("aws-p4d-24xlarge"), load_stack("trimaran")

    def traffic_s(of: Model, text: str) -> float:
        case = Case.of(Workload(model=of, seq_len=4096, global_batch=64), cluster, stack)
        return estimate(case, parse_layout(f"{text},mbs1,bf16,ps")).time.dp

    assert traffic_s(wide, "dp16,ep8") > 1.5 * traffic_s(model, "dp16,ep8")
    assert traffic_s(wide, "dp16,ep16") < 1.4 * traffic_s(model, "dp16,ep16")  # shared experts alone


@pytest.mark.parametrize(("text", "sharers"), [("dp64,mbs1,fsdp,ep8", 8), ("dp64,mbs1,fsdp,ep1", 64)])
def test_a_rank_adds_up_its_part_of_experts_gradients_as_their_own_replicas_share_them_out(
    text: str, sharers: int
) -> None:
    """Of 64 ranks that deal experts out among 8, 8 share out the gradients of each; 64 those of all else."""
    backward = []
    for micro_batches in (1, 2):
        workload = Workload(model=QWEN, seq_len=4096, global_batch=64 * micro_batches)
        case = Case.of(workload, H100, load_stack("torchtitan"))
        grid = LayoutGrid.from_layouts([parse_layout(f"{text},bf16")], workload, case.stack)
        backward.append(micro_batch(case, grid).layer.backward[0])
    others = rank_layer_parameters(QWEN, grid, "experts")[0] / 64
    experts = QWEN.expert_parameters / grid.ep[0] / sharers
    # a new gradient in 16 bit is read, its sum in fp32 read and written
    stream = H100.device.mem_bandwidth_gb_s * 1e9 * case.calibration.memory
    assert backward[1] - backward[0] == pytest.approx((others + experts) * (2 + 2 * 4) / stream, rel=1e-6)


def test_what_replicas_sum_is_of_one_rank_dense_and_of_experts() -> None:
    """DeepSeek-V3's first stage of 16 holds most: its embedding and three dense layers, and experts of one layer."""
    model = load_model("deepseek-v3").model_copy(update={"mtp_depth": 0})
    stack = load_stack("megatron-core")
    workload = Workload(model=model, seq_len=4096, global_batch=1024)
    text = "dp64,tp1,pp16,ep64,etp1,mbs1,zero1,bf16"
    grid = LayoutGrid.from_layouts([parse_layout(text)], workload, stack)
    iteration = IterationCost(Case.of(workload, H100, stack), grid)
    first, between, _ = end_shapes(model, grid)
    held, experts = iteration.parameters[0], iteration.expert_parameters
    assert experts is not None
    assert held == parameters(model, stack, grid, first)[0]
    assert experts[0] == expert_parameters(model, grid, first)[0] < expert_parameters(model, grid, between)[0]


def test_gradients_of_a_large_vocabulary_are_added_up_each_micro_batch() -> None:
    """Head and embedding of Llama-3-8B: a new gradient in 16 bit is read and its fp32 sum read and written, of both.

    That of the embedding is made whole besides, in the first micro-batch too.
    """
    ends = []
    for micro_batches in (1, 2):
        case = Case.of(workload_of("llama3-8b", micro_batches, seq=2048), H100, load_stack("torchtitan"))
        grid = LayoutGrid.from_layouts([parse_layout("dp1,mbs1,bf16")], case.workload, case.stack)
        work = stage_work(case, grid)
        ends.append(work.ends[0])
    stream = H100.device.mem_bandwidth_gb_s * 1e9 * case.calibration.memory
    assert ends[1] - ends[0] == pytest.approx(2 * 128256 * 4096 * (2 + 2 * 4) / stream, rel=1e-6)
