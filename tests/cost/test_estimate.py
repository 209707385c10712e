"""What an estimate promises whatever the layout: its parts, its order, and one answer for one and for many."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trimaran import cost
from trimaran.api import workload_of
from trimaran.cost.calibration import prior
from trimaran.cost.case import Case
from trimaran.cost.effects.optimizer import step_time
from trimaran.cost.effects.time_effects import PARTS, TIME_PARTS
from trimaran.cost.estimate import estimate, estimate_many
from trimaran.cost.estimates import MemoryParts, TimeParts
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.kernels import rates
from trimaran.cost.memory import parts as memory_parts
from trimaran.cost.memory.parts import MEMORY_PARTS
from trimaran.cost.network import Network, group
from trimaran.cost.shapes import kept_bytes
from trimaran.files.catalogue import catalogue_names, load_cluster, load_model, load_stack
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.device import Device
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.model import Model, padded_vocab
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload
from trimaran.operators.counts import head_forward_operations, layer_forward_operations

STACKS = [load_stack(name) for name in catalogue_names("stacks")]


def gpu_cluster(inter_gbps: float = 200.0, intra_gbps: float = 2400.0, latency_us: float = 5.0) -> Cluster:
    device = Device(
        name="gpu", kind="gpu", peak_tflops={"fp32": 20, "fp16": 300, "bf16": 300}, mem_gib=80,
        mem_bandwidth_gb_s=2000, context_gib=1.0, multiprocessors=108,
    )  # fmt: skip
    return Cluster(
        device=device, nodes=64, devices_per_node=8,
        intra=Link(bandwidth_gbps=intra_gbps, latency_us=latency_us),
        inter=Link(bandwidth_gbps=inter_gbps, latency_us=latency_us),
    )  # fmt: skip


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    heads = draw(st.sampled_from([8, 16, 24]))
    model = Model(
        layers=draw(st.integers(4, 48)), hidden=heads * draw(st.sampled_from([64, 72, 128])), heads=heads,
        vocab=draw(st.integers(1000, 250_000)), tied_embedding=draw(st.booleans()),
        head=draw(st.sampled_from(["vocabulary", "classifier"])), mlp=draw(st.sampled_from(["gelu", "swiglu"])),
    )  # fmt: skip
    return Workload(model=model, seq_len=draw(st.sampled_from([256, 1024, 2048])), global_batch=256)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    pp = draw(st.sampled_from([1, 2, 4]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    zero = draw(st.integers(0, 3))
    return Layout(
        dp=draw(st.sampled_from([1, 2, 8])), tp=tp, pp=pp, vpp=1 if vpp * pp > 4 else vpp,
        mbs=draw(st.sampled_from([1, 2, 4, 8])), zero_stage=zero,
        dp_kind="fully_sharded" if zero == 3 else "all_reduce",
        sequence_parallel=tp > 1 and draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        recompute_every=draw(st.sampled_from([1, 2])),
        precision=draw(st.sampled_from(["fp32", "fp16", "bf16", "bf16_pure"])),
        schedule="none" if pp == 1 else draw(st.sampled_from(["gpipe", "1f1b"])) if vpp * pp > 4 or vpp == 1
        else "interleaved",
        placement=draw(st.sampled_from([("tp", "dp", "pp"), ("dp", "tp", "pp"), ("tp", "pp", "dp")])),
    )  # fmt: skip


stacks = st.sampled_from(STACKS)


@settings(max_examples=150, deadline=None)
@given(workloads(), layouts(), stacks)
def test_named_parts_are_never_negative_and_add_up(workload: Workload, layout: Layout, stack: Stack) -> None:
    found = estimate(Case.of(workload, gpu_cluster(), stack), layout)
    parts = [getattr(found.time, name) for name in TIME_PARTS]
    assert min(parts) >= -1e-12
    assert sum(parts) == pytest.approx(found.sec_per_it, rel=1e-9)
    assert len(found.memory) == layout.pp
    assert min(getattr(stage, name) for stage in found.memory for name in MEMORY_PARTS) >= 0
    assert max(stage.total for stage in found.memory) == pytest.approx(found.mem_gib, rel=0.02)


@settings(max_examples=60, deadline=None)
@given(workloads(), st.lists(layouts(), min_size=2, max_size=8), stacks)
def test_one_layout_and_a_grid_get_the_same_answer(workload: Workload, many: list[Layout], stack: Stack) -> None:
    cluster = gpu_cluster()
    together = estimate_many(Case.of(workload, cluster, stack), LayoutGrid.from_layouts(many, workload, stack))
    for index, layout in enumerate(many):
        alone = estimate(Case.of(workload, cluster, stack), layout)
        assert alone.sec_per_it == pytest.approx(together.sec_per_it[index], rel=1e-12)
        assert alone.mem_gib == pytest.approx(together.mem_gib[index], rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(workloads(), layouts(), stacks)
def test_memory_never_falls_when_the_micro_batch_grows(workload: Workload, layout: Layout, stack: Stack) -> None:
    assume(layout.schedule != "gpipe")  # it keeps the whole batch, however that is cut
    growing = [layout.model_copy(update={"mbs": mbs}) for mbs in (1, 2, 4, 8)]
    memory = [estimate(Case.of(workload, gpu_cluster(), stack), one).mem_gib for one in growing]
    assert memory == sorted(memory)


@settings(max_examples=100, deadline=None)
@given(workloads(), layouts(), stacks)
def test_a_faster_link_never_slows(workload: Workload, layout: Layout, stack: Stack) -> None:
    clusters = [gpu_cluster(100, 1000, 20), gpu_cluster(200, 1000, 20), gpu_cluster(200, 3000, 5)]
    seconds = [estimate(Case.of(workload, cluster, stack), layout).sec_per_it for cluster in clusters]
    assert seconds[1] <= seconds[0] * (1 + 1e-9)
    assert seconds[2] <= seconds[1] * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(workloads(), layouts(), stacks)
def test_a_device_that_computes_faster_never_slows(workload: Workload, layout: Layout, stack: Stack) -> None:
    found = [estimate(Case.of(workload, times_as_fast(times), stack), layout) for times in (1, 1.1, 2, 10)]
    # Where the host paces a step, more of it counts as recompute on a faster device, and behind that no sums hide.
    shifted = [one.time.recompute if one.time.dp else 0.0 for one in found]
    more = [max(after - before, 0.0) for before, after in pairwise(shifted)]
    seconds = [one.sec_per_it for one in found]
    pairs = zip(pairwise(seconds), more, strict=True)
    assert all(faster <= slower * (1 + 1e-9) + recomputed for (slower, faster), recomputed in pairs)


def times_as_fast(times: float) -> Cluster:
    cluster = gpu_cluster()
    peaks = {rate: tflops * times for rate, tflops in cluster.device.peak_tflops.items()}
    return cluster.model_copy(update={"device": cluster.device.model_copy(update={"peak_tflops": peaks})})


# Each paced by its host: gradients summed beside the products that make them, and experts made again.
@pytest.mark.parametrize(
    ("stack", "model", "text"),
    [
        ("megatron-core", "gpt3-125m", "dp1,tp4,sp,bf16"),
        ("megatron-core", "qwen3-30b-a3b", "dp8,ep8,recompute-moe_act,bf16"),
        ("torch-fsdp", "qwen3-30b-a3b", "dp8,fsdp,recompute-full,bf16"),
    ],
)
def test_a_device_that_waits_for_its_host_is_no_slower_the_faster_it_computes(
    stack: str, model: str, text: str
) -> None:
    workload = Workload(model=load_model(model), seq_len=128, global_batch=64)
    cases = [Case.of(workload, times_as_fast(times), load_stack(stack)) for times in (1, 1.1, 2, 10)]
    seconds = [estimate(case, parse_layout(text)).sec_per_it for case in cases]
    assert all(faster <= slower * (1 + 1e-9) for slower, faster in pairwise(seconds))


@pytest.mark.parametrize("stack", ["megatron-cpu", "megatron-deepspeed", "trimaran"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory_never_grows_as_the_vocabulary_shrinks(stack: str, recompute: str) -> None:
    """Logits are gone when a layer is made again, so that memory is what the larger of the two needs."""
    memory = []
    for vocab in (200_000, 128_000, 64_000, 32_000, 1000):
        model = Model(layers=4, hidden=256, heads=4, vocab=vocab, max_positions=32768)
        case = Case.of(Workload(model=model, seq_len=32768, global_batch=8), gpu_cluster(), load_stack(stack))
        memory.append(estimate(case, Layout(dp=2, mbs=4, recompute=recompute)).mem_gib)
    assert all(smaller <= larger for larger, smaller in pairwise(memory))


@pytest.mark.proof
@settings(max_examples=50, deadline=None)
@given(workloads(), layouts(), stacks)
def test_a_faster_link_between_nodes_never_slows_whatever_its_rate(
    workload: Workload, layout: Layout, stack: Stack
) -> None:
    spread = {"devices_per_node": 1, "nodes": 512}
    clusters = [gpu_cluster(gbps).model_copy(update=spread) for gbps in (10, 45, 50, 51, 60, 80, 100)]
    seconds = [estimate(Case.of(workload, cluster, stack), layout).sec_per_it for cluster in clusters]
    assert all(faster <= slower * (1 + 1e-9) for slower, faster in pairwise(seconds))


@settings(max_examples=50, deadline=None)
@given(workloads(), layouts(), stacks)
def test_one_stage_has_no_bubble_and_no_sends(workload: Workload, layout: Layout, stack: Stack) -> None:
    alone = layout.model_copy(update={"pp": 1, "vpp": 1, "schedule": "none"})
    found = estimate(Case.of(workload, gpu_cluster(), stack), alone)
    assert found.time.bubble == 0
    assert found.time.pp == 0


@pytest.mark.parametrize("cluster", ["aws-p3-16xlarge", "dgx-a100-80gb", "dgx-h100"])
def test_a_vocabulary_off_the_tensor_cores_alignment_is_no_slower_in_16_bit_than_in_fp32(cluster: str) -> None:
    model = load_model("gpt2-355m").model_copy(update={"vocab": 50257})
    case = Case.of(Workload(model=model, seq_len=1024, global_batch=32), load_cluster(cluster), load_stack("deepspeed"))
    narrow, wide = (estimate(case, parse_layout(f"dp8,mbs4,{precision}")).time.head for precision in ("fp16", "fp32"))
    assert narrow < wide


def test_a_grid_gives_back_the_layouts_it_was_built_from() -> None:
    workload = Workload(model=Model(layers=12, hidden=512, heads=8, vocab=1000), seq_len=256, global_batch=64)
    stack = load_stack("trimaran")
    grid = LayoutGrid.build(
        workload, stack, dp=[1, 2], tp=[2, 1], pp=[2, 4], mbs=[1, 4], recompute=["none", "full"], precision="bf16"
    )
    first = grid.layout(0)
    assert first == Layout(dp=1, tp=2, pp=2, mbs=1, precision="bf16")
    assert str(grid.layout(1)) == "dp2,tp1,pp4,mbs4,recompute-full,bf16"
    assert np.array_equal(grid.micro_batches, [64, 8])


def test_the_step_moves_each_byte_of_a_precision_once() -> None:
    # Adam: both moments and the stepped weights are read and written, the gradient is read, a master's copy written.
    workload = Workload(model=load_model("gpt3-1b3"), seq_len=1024, global_batch=8)
    case = Case.of(workload, load_cluster("dgx-a100-80gb"), load_stack("torch-fsdp"))
    grid = LayoutGrid.build(workload, case.stack, mbs=8, precision=["fp32", "fp16", "bf16", "bf16_pure"])
    rate = rates(case, grid.precision, grid.devices)
    step_bytes = step_time(case, grid, np.ones(4), rate) * rate.bandwidth
    gradient = np.array([4.0, 2.0, 4.0, 2.0])  # in bf16 this stack reduces in fp32
    states = np.array([4 * 4 + 2 * 4, 4 * 4 + 2 * 4 + 2, 4 * 4 + 2 * 4 + 2, 4 * 2 + 2 * 2])
    np.testing.assert_allclose(step_bytes, states + gradient + 3 * gradient)


def test_every_part_of_time_and_memory_is_an_entry_of_its_table() -> None:
    assert tuple(TimeParts.model_fields) == TIME_PARTS
    assert tuple(name for name in MemoryParts.model_fields if name not in ("stage", "layers")) == MEMORY_PARTS
    assert all(part.says for part in (*PARTS, *memory_parts.PARTS))


@pytest.mark.parametrize("name", [name for name in catalogue_names("models") if load_model(name).main_kind == "dense"])
def test_operators_do_the_operations_of_the_papers(name: str) -> None:
    # Narayanan et al., arXiv 2104.04473, appendix: 2 s (weights of the layer) + 4 s^2 a_dim; and 2 s h V.
    model, s = load_model(name), 1024
    widths = 2 * model.attention_hidden + 2 * model.kv_hidden + model.mlp_matrices * model.ffn_hidden
    matrices = model.hidden * widths
    assert layer_forward_operations(model, s) == 2 * s * matrices + 4 * s * s * model.attention_hidden
    logits = 2 * s * model.hidden * padded_vocab(model.vocab, 1) if model.head == "vocabulary" else 0
    assert head_forward_operations(model, s) == logits


def test_a_layer_keeps_what_the_paper_says() -> None:
    # Korthikanti et al., arXiv 2205.05198, eq. (1): s b h (34 + 5 a s / h) bytes, and 34 s b h without the core's.
    model = load_model("gpt3-175b")
    s, b, h, a = 2048, 2, model.hidden, model.heads
    workload = Workload(model=model, seq_len=s, global_batch=8)
    case = Case.of(workload, load_cluster("dgx-a100-80gb"), load_stack("megatron"))
    kept = kept_bytes(case, LayoutGrid.build(workload, case.stack, mbs=b, precision="fp16", recompute="selective"))
    np.testing.assert_allclose(kept.layer, s * b * h * (34 + 5 * a * s / h))
    np.testing.assert_allclose(kept.partly, 34 * s * b * h)


def sharded_time(devices: int, cluster: Cluster, mbs: int = 4) -> float:
    workload = Workload(model=load_model("llama2-7b"), seq_len=4096, global_batch=devices * mbs)
    layout = Layout(dp=devices, mbs=mbs, zero_stage=3, dp_kind="fully_sharded", precision="bf16")
    return estimate(Case.of(workload, cluster, load_stack("torch-fsdp")), layout).time.dp


def test_gathers_of_layers_hide_behind_compute_until_rings_are_long() -> None:
    cluster = load_cluster("dgx-a100-80gb")
    few, many = sharded_time(64, cluster), sharded_time(4096, cluster)
    compute = estimate(
        Case.of(
            Workload(model=load_model("llama2-7b"), seq_len=4096, global_batch=4), cluster, load_stack("torch-fsdp")
        ),
        Layout(mbs=4, precision="bf16"),
    ).sec_per_it
    assert few < 0.1 * compute
    # 66 collectives of a ring of 4096 ranks, whose first byte alone takes 512 hops between nodes and 3,584 inside
    hops = (512 * cluster.inter.latency_us + 3583 * cluster.intra.latency_us) * 1e-6
    assert many - few > 4 * hops
    # with little work in a micro-batch most of them show
    assert sharded_time(4096, cluster, mbs=1) > sharded_time(4096, cluster) - 1e-9 > few


def test_an_all_reduce_of_many_nodes_takes_a_tree_and_a_gather_a_ring() -> None:
    cluster = gpu_cluster(latency_us=5.0)
    devices = np.array([1024])
    ranks = group(devices, np.array([1]), devices, cluster)
    network = Network(cluster, prior(cluster, STACKS[0]))
    start = network.calibration.collective_us * 1e-6
    nothing = np.zeros(1)
    assert network.all_gather(nothing, ranks)[0] == pytest.approx(start + 1023 * 5e-6)
    assert network.all_reduce(nothing, ranks)[0] == pytest.approx(start + 2 * (7 + 7) * 5e-6)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Workload, Layout]:
    """Pipelines of one stage a rank, of any layers, of models with dense layers before those of experts."""
    schedule, pp = draw(st.sampled_from(["gpipe", "1f1b", "zero_bubble"])), draw(st.integers(3, 9))
    split = tuple(draw(st.lists(st.integers(1, 6), min_size=pp, max_size=pp)))
    mixed = {
        "experts": 4,
        "top_k": 1,
        "moe_ffn_hidden": 2048,
        "dense_layers": draw(st.integers(0, min(9, sum(split) - 1))),
    }
    model = Model(layers=sum(split), hidden=512, heads=8, vocab=1000, **draw(st.sampled_from([mixed, {}])))
    layout = Layout(
        pp=pp, stage_split=split, schedule=schedule, precision="bf16",
        recompute=draw(st.sampled_from(["none", "layernorm", "full"])),
    )  # fmt: skip
    return Workload(model=model, seq_len=1024, global_batch=draw(st.integers(1, 40))), layout


@pytest.mark.proof
@settings(max_examples=150, deadline=None)
@given(pipelines(), stacks)
def test_a_search_finds_the_fullest_rank_whichever_it_is(asked: tuple[Workload, Layout], stack: Stack) -> None:
    workload, layout = asked
    case = Case.of(workload, gpu_cluster(), stack)
    found = estimate_many(case, LayoutGrid.from_layouts([layout], workload, stack)).mem_gib[0]
    assert found == pytest.approx(max(rank.total for rank in estimate(case, layout).memory), rel=1e-9)


@pytest.mark.parametrize(
    ("model", "cluster", "stack", "text"),
    [
        ("mixtral-8x7b", "dgx-h100", "megatron-core", "dp1,tp1,cp8,cp-ulysses,pp9,etp1,mbs1,zero1,bf16"),
        ("bloom-176b", "gb200-nvl72", "deepspeed", "dp21,tp1,pp19,mbs1,zero1,bf16"),
        ("bloom-176b", "jean-zay-a100-80gb", "megatron-deepspeed", "dp8,tp4,pp12,mbs2,zero1,bf16,split7-6x10-3"),
        ("deepseek-v3", "dgx-h100", "torchtitan", "dp37,tp2,pp13,vpp2,mbs3,fsdp,bf16,zbv,split3x10-2x15-1"),
        ("llama3-70b", "dgx-h100", "torchtitan", "dp1,pp8,vpp2,mbs1,bf16,dualpipev"),
    ],
)
def test_memory_is_that_of_the_fullest_rank_whichever_has_most_layers(
    model: str, cluster: str, stack: str, text: str
) -> None:
    """A rank that has a layer more than those before it has fewer micro-batches in flight."""
    case = Case.of(workload_of(model, 777, seq=2048), load_cluster(cluster), load_stack(stack))
    layout = parse_layout(text)
    found = estimate(case, layout)
    assert found.mem_gib == max(rank.total for rank in found.memory)
    searched = estimate_many(case, LayoutGrid.from_layouts([layout], case.workload, case.stack)).mem_gib[0]
    assert searched == pytest.approx(found.mem_gib, rel=1e-9)


def test_the_example_of_the_cost_model_runs_as_it_is_written() -> None:
    lines = [line.removeprefix("    ") for line in (cost.__doc__ or "").splitlines() if line.startswith("    ")]
    found: dict[str, Any] = {
        "workload": workload_of("bloom-176b", 2048), "cluster": load_cluster("jean-zay-a100-80gb"),
        "stack": load_stack("megatron-deepspeed"), "layout": parse_layout("dp8,tp4,pp12,mbs2,fp16"),
    }  # fmt: skip
    exec("\n".join(lines), found)
    assert found["best"] in (found["layout"], found["layout"].model_copy(update={"dp": 4, "tp": 8}))
    assert found["timeline"] and found["calibration"].origin == "fit" and found["lessons"]
