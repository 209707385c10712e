"""Precisions whose layers multiply in 8 or 4 bit: what runs in them, what is cast, gathered and kept."""

from __future__ import annotations

import numpy as np
import pytest

from trimaran.api import workload_of
from trimaran.cost.calibration import prior
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate, estimate_each
from trimaran.cost.estimates import Estimate
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.shapes import part_of
from trimaran.cost.table.predict_table import predict_table
from trimaran.files.catalogue import catalogue_names, load_cluster, load_stack
from trimaran.files.row_table import parse_table
from trimaran.layout.flops import mfu, tflops_per_device
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import violations
from trimaran.nouns.hardware.device import Device
from trimaran.nouns.precision import PRECISIONS, PrecisionName
from trimaran.nouns.stack import Stack
from trimaran.operators.casts import TURNING, Casts, Operands, cast_bytes, casts_of
from trimaran.operators.ends import head_operator
from trimaran.operators.layer import layer_operators
from trimaran.operators.operator import Operator

NARROW = [name for name, precision in PRECISIONS.items() if precision.narrow is not None]
LLAMA = workload_of("llama3-8b", 64, seq=8192)
HOPPER, BLACKWELL = load_cluster("dgx-h100"), load_cluster("dgx-b200")
TORCHAO = load_stack("torchtitan-compiled").model_copy(update={"precisions": tuple(PRECISIONS)})
ENGINE = Stack(
    name="engine", flash_attention=True, fused_layernorm=True, keeps_casts=True, precisions=tuple(PRECISIONS)
)


def answer(layout: str, stack: Stack, cluster: str = "dgx-h100") -> Estimate:
    known = load_cluster(cluster)
    return estimate(Case(LLAMA, known, stack, prior(known, stack)), parse_layout(layout))


def operators(layout: str, stack: Stack, cluster: str = "dgx-h100") -> dict[str, Operator]:
    known = load_cluster(cluster)
    case = Case(LLAMA, known, stack, prior(known, stack))
    part = part_of(case, LayoutGrid.from_layouts([parse_layout(layout)], LLAMA, stack))
    return {operator.name: operator for operator in (*layer_operators(part), head_operator(part, LLAMA.model.vocab))}


def kept(operator: Operator) -> float:
    return float(np.sum([np.sum(tensor.size) for tensor in operator.inputs]))


def test_layers_gain_what_the_rates_say_less_the_casts_and_nothing_else_gains() -> None:
    wide, narrow = (answer(f"dp8,mbs2,zero3,fsdp,{precision}", TORCHAO) for precision in ("bf16", "fp8"))
    assert narrow.time.head == wide.time.head
    device = HOPPER.device
    gain = device.peak_tflops["fp8"] * device.narrow_share / (device.peak_tflops["bf16"] * device.matmul_share)
    assert 1.0 < wide.time.forward / narrow.time.forward < gain
    free = Case(LLAMA, HOPPER, TORCHAO, prior(HOPPER, TORCHAO).model_copy(update={"memory": 1e6, "attention": 1e6}))
    layouts = [parse_layout(f"dp8,mbs2,zero3,fsdp,{precision}") for precision in ("bf16", "fp8")]
    products = [estimate(free, layout).time.forward for layout in layouts]
    assert products[0] / products[1] == pytest.approx(gain, rel=0.02), "where casts and attention cost nothing"


def test_casts_move_the_bytes_that_the_software_reads_and_writes() -> None:
    """Transformer Engine makes both orders in one kernel; torchao scans, casts, and turns in the backward."""
    tokens, n, k = 4096.0, 1024.0, 512.0
    operands = Operands(n * k, tokens * k, tokens * n, tokens * k, tokens * n)
    delayed = ENGINE.model_copy(update={"fp8_scaling": "delayed"})
    forward, backward = cast_bytes(casts_of(PRECISIONS["fp8"], delayed, HOPPER.device), delayed, operands, eager=False)
    assert (forward, backward) == ((tokens * k + n * k) * (2 + 1 + 1), tokens * n * (2 + 1 + 1))
    current = casts_of(PRECISIONS["fp8"], TORCHAO, HOPPER.device)
    forward, backward = cast_bytes(current, TORCHAO, operands, eager=False)
    assert forward == tokens * k * (2 + 2 + 1), "what is gathered in 8 bit was cast before"
    assert backward == tokens * n * (2 + 2 + 1 + 1) + tokens * k * (2 + 1) + n * k * (1 + 1)
    by_row = casts_of(PRECISIONS["fp8_rowwise"], TORCHAO, HOPPER.device)
    forward, backward = cast_bytes(by_row, TORCHAO, operands, eager=False)
    assert forward == (tokens * k + n * k) * (2 + 1)
    # columns are looked over, then cast and written turned; both gradients that come out are scaled where they lie
    columns = 2 + TURNING * (2 + 1)
    assert backward == pytest.approx(tokens * n * (2 + 1 + columns) + (tokens * k + n * k) * (columns + 2 + 2))


def test_a_scale_a_row_gains_half_of_what_one_a_tensor_gains() -> None:
    """Tokens a second of Llama-3-8B on 8 H100 as torchtitan's commit 7a04053 states them: 5,760, 6,412 and 7,186."""
    case = Case.of(workload_of("llama3-8b", 8, seq=8192), HOPPER, load_stack("torchtitan-compiled"))
    layouts = (f"dp8,mbs1,fsdp,recompute-selective,{precision}" for precision in ("bf16", "fp8_rowwise", "fp8"))
    wide, by_row, by_tensor = (estimate(case, parse_layout(layout)).sec_per_it for layout in layouts)
    assert wide / by_row == pytest.approx(6412 / 5760, rel=0.05)
    assert wide / by_tensor == pytest.approx(7186 / 5760, rel=0.05)


@pytest.mark.parametrize(
    ("precision", "scaling", "device", "cast"),
    [
        ("fp8", "delayed", HOPPER.device, Casts(1.0, 2.0, 2.0)),
        ("fp8", "delayed", BLACKWELL.device, Casts(1.0, 2.0, 1.0)),
        ("fp8", "current", BLACKWELL.device, Casts(1.0, 4.0, 1.0)),
        ("fp8", "blockwise", BLACKWELL.device, Casts(1.0 + 4.0 / 128.0, 2.0, 2.0)),
        ("fp8_rowwise", "current", BLACKWELL.device, Casts(1.0, 2.0, 2.0, sliced=0.0)),
        ("mxfp8", "current", BLACKWELL.device, Casts(1.0 + 1.0 / 32.0, 2.0, 2.0)),
        ("nvfp4", "current", BLACKWELL.device, Casts(0.5 + 1.0 / 16.0, 4.0, 2.0)),
        ("bf16", "current", BLACKWELL.device, Casts()),
    ],
)
def test_scales_and_orders_follow_format_recipe_and_device(
    precision: PrecisionName, scaling: str, device: Device, cast: Casts
) -> None:
    stack = ENGINE.model_copy(update={"fp8_scaling": scaling})
    assert casts_of(PRECISIONS[precision], stack, device) == cast


def test_linear_inputs_stay_as_cast_where_the_stack_keeps_them_so() -> None:
    wide, narrow = (operators(f"dp8,mbs1,{precision}", ENGINE) for precision in ("bf16", "fp8"))
    for name in ("qkv", "up", "down"):
        assert kept(narrow[name]) == 0.5 * kept(wide[name]), name
    # attention's own backward reads the context in 16 bit, the projection's as cast
    assert kept(narrow["projection"]) == 1.5 * kept(wide["projection"])
    assert kept(narrow["head"]) == kept(wide["head"])
    high = [operators(f"dp8,mbs1,{precision}", TORCHAO)["up"] for precision in ("bf16", "fp8")]
    assert kept(high[0]) == kept(high[1])


def test_weights_as_cast_are_beside_those_of_16_bit_or_in_their_place() -> None:
    layers = LLAMA.model.layers * LLAMA.model.layer_parameters / 2**30
    weights = answer("dp8,mbs1,zero1,bf16", ENGINE, "dgx-b200").memory[0].weights
    beside = answer("dp8,mbs1,zero1,mxfp8", ENGINE, "dgx-b200").memory[0].weights
    assert beside - weights == pytest.approx(2 * (1 + 1 / 32) * layers)
    alone = ENGINE.model_copy(update={"gathers_casts": True})
    assert answer("dp8,mbs1,zero1,fp8", alone, "dgx-b200").memory[0].weights - weights == pytest.approx(-layers)


def test_weights_as_cast_that_stand_in_place_of_others_are_sharded_as_these_are() -> None:
    """Of all layers' a byte a weight was taken off, as if one device had them: 70B under FSDP held -27 GiB."""
    alone = ENGINE.model_copy(update={"gathers_casts": True})
    layers = LLAMA.model.layers * LLAMA.model.layer_parameters / 2**30
    wide, narrow = (
        answer(f"dp64,mbs1,fsdp,{precision}", alone, "dgx-b200").memory[0].weights for precision in ("bf16", "fp8")
    )
    two_gathered = 2 * LLAMA.model.layer_parameters / 2**30
    assert wide - narrow == pytest.approx(layers / 64 + two_gathered)
    moved = alone.model_copy(update={"offloads": ("weights",), "zero_stages": (3,)})
    hosted = answer("dp64,mbs1,fsdp,fp8,offload-weights", moved, "dgx-b200").memory[0]
    assert hosted.weights > 0.0


def test_sharded_weights_are_gathered_in_8_bit() -> None:
    hidden = TORCHAO.model_copy(update={"overlap_dp": 0.0})
    plain = hidden.model_copy(update={"gathers_casts": False})
    in_16, in_8 = (answer("dp64,mbs1,zero3,fsdp,fp8", stack).time.dp for stack in (plain, hidden))
    # two gathers of 2 bytes and one reduce-scatter of 4: 8 bytes, of which 2 fall away; hops take as long as before
    assert 6 / 8 < in_8 / in_16 < 6 / 8 + 0.05
    # nothing gathers weights in 4 bit
    assert casts_of(PRECISIONS["nvfp4"], hidden, BLACKWELL.device).gathered == 0.0


def test_sequence_parallelism_gathers_what_is_cast_and_reduces_in_16_bit() -> None:
    wide, narrow = (operators(f"dp8,tp8,mbs2,sp,{precision}", TORCHAO)["down"] for precision in ("bf16", "fp8"))
    ratio = np.asarray(narrow.collectives[0].size) / np.asarray(wide.collectives[0].size)
    assert ratio == pytest.approx(0.75)
    by_row = operators("dp8,tp8,mbs2,sp,fp8_rowwise", TORCHAO)
    assert by_row["down"].collectives[0].size == wide.collectives[0].size
    # what is gathered in 16 bit every rank casts whole
    tokens, h, f = 2 * 8192.0, LLAMA.model.hidden, LLAMA.model.ffn_hidden
    cast = (tokens * h + 2 * h * f / 8) * (2 + 1)
    assert float(np.asarray(by_row["up"].moved_forward).item()) == pytest.approx(cast)


@pytest.mark.parametrize("precision", NARROW)
def test_only_devices_and_stacks_that_have_a_precision_are_asked_for_it(precision: PrecisionName) -> None:
    layout = Layout(dp=8, precision=precision)
    for name in catalogue_names("stacks"):
        stack = load_stack(name)
        rules = {violation.rule for violation in violations(layout, LLAMA, BLACKWELL, stack)}
        assert "stack" in rules or precision in stack.precisions
    has = {name for name in catalogue_names("clusters") if load_cluster(name).device.peak(precision) is not None}
    assert ("dgx-h100" in has) == (precision in ("fp8", "fp8_rowwise"))
    assert ("mi355x-8x-node" in has) == (precision != "nvfp4")
    assert {"dgx-b200", "dgx-b300", "gb200-nvl72", "gb300-nvl72"} <= has
    assert "dgx-a100-80gb" not in has


def test_the_narrower_the_faster_on_a_device_that_has_all() -> None:
    seconds = [
        answer(f"dp8,mbs2,zero1,{name}", ENGINE, "gb300-nvl72").sec_per_it for name in ("bf16", "mxfp8", "nvfp4")
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_rows_of_fp8_are_answered_as_their_stack_runs_them() -> None:
    table = parse_table(
        "cluster,stack,model,dp,tp,mbs,gbs,seq_len,zero_stage,dp_kind,recompute,precision,sec_per_it,status\n"
        "dgx-h100,torchtitan,llama3-8b,8,8,12,96,8192,3,fully_sharded,selective,fp8,2.4,ok\n"
        "dgx-h100,megatron,llama3-8b,8,8,12,96,8192,0,all_reduce,full,fp8,2.4,ok\n"
        "dgx-h100,torchtitan,llama3-8b,8,8,12,96,8192,3,fully_sharded,selective,fp8-rowwise,2.4,ok\n",
        "rows",
    )
    first, second, third = predict_table(table)
    assert first.error is None and first.estimate is not None
    said = parse_layout("dp8,tp8,mbs12,zero3,fsdp,sp,recompute-selective,fp8")
    stack = load_stack("torchtitan-compiled")
    workload = workload_of("llama3-8b", 96, seq=8192)
    assert first.estimate.sec_per_it == estimate(Case.of(workload, HOPPER, stack), said).sec_per_it
    assert second.error is None and "precision fp8 is not one of megatron's" in second.notes[0]
    assert third.estimate is not None and third.estimate.sec_per_it > first.estimate.sec_per_it


def test_a_row_that_counts_hosts_has_the_fast_link_of_its_rack() -> None:
    head = "cluster,stack,model,dp,tp,mbs,gbs,seq_len,precision,devices_per_node,sec_per_it,status\n"
    seconds = {}
    for devices_per_node in (4, 8, 72):
        row = f"gb200-nvl72,trimaran,llama3-8b,2,8,1,64,8192,bf16,{devices_per_node},1,ok\n"
        (answered,) = predict_table(parse_table(head + row, "rows"))
        assert answered.estimate is not None, answered.error
        seconds[devices_per_node] = answered.estimate.sec_per_it
    assert seconds[4] == seconds[72] != seconds[8]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_mfu_is_tflops_over_the_peak_of_the_precision(precision: PrecisionName) -> None:
    peak = HOPPER.device.peak(precision)
    assert peak is not None
    share = mfu(LLAMA, 1, 8, 3.0, peak)
    assert share == pytest.approx(tflops_per_device(LLAMA, 1, 8, 3.0, "model_flops") / peak)
    assert peak == {"bf16": 989.4, "fp8": 1978.9}[precision]


def test_many_precisions_in_one_grid_are_each_as_alone() -> None:
    layouts = [parse_layout(f"dp8,mbs{mbs},zero1,{name}") for mbs in (1, 2) for name in ("fp32", "bf16", *NARROW)]
    case = Case(LLAMA, BLACKWELL, ENGINE, prior(BLACKWELL, ENGINE))
    together = estimate_each(case, LayoutGrid.from_layouts(layouts, LLAMA, ENGINE))
    assert together == [estimate(case, layout) for layout in layouts]


def test_a_loss_over_shares_of_the_vocabulary_holds_one_copy_more_under_dtensor() -> None:
    vocab = float(LLAMA.model.vocab)
    for tp, copies in ((1, 3.0), (8, 4.0)):
        (logits,) = operators(f"dp8,tp{tp},mbs2,sp,bf16", TORCHAO)["head"].inside
        assert float(np.asarray(logits.size).item()) == pytest.approx(2 * 8192 * vocab / tp * 4.0 * copies, rel=0.01)
