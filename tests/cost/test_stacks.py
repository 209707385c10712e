"""What the facts of a stack do to time, memory and layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trimaran.api import plan, usual_stack, workload_of
from trimaran.cost.calibration import prior
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.shapes import kept_bytes
from trimaran.files.catalogue import catalogue_names, load_cluster, load_stack
from trimaran.layout.flops import model_flops
from trimaran.layout.layout import resolve_split
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import violations
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.stack import Stack

H100 = load_cluster("dgx-h100")
CORE = load_stack("megatron-core")
BIG = workload_of("llama3-405b", 2048)


def seconds(label: str, **facts: object) -> dict[str, float]:
    """Parts of the time of one layout of 405B under megatron-core with TP overlapped, but for some facts."""
    case = Case.of(BIG, H100, load_stack("megatron-core-tp-overlap").model_copy(update=facts))
    return estimate(case, parse_layout(label)).time.model_dump()


def test_every_stack_says_for_which_software_it_is() -> None:
    told = {name: load_stack(name).software for name in catalogue_names("stacks")}
    assert all(told.values()) and len(set(told.values())) == len(told)
    assert "2021" in told["megatron"] and "2025" in told["megatron-core"]


def test_405b_on_16384_h100_is_laid_out_as_practice_does() -> None:
    """Llama 3's paper (arXiv 2407.21783, table 4): TP 8, PP 16, CP 1, 400 TFLOPs a device at this batch and length."""
    best = plan("llama3-405b", "dgx-h100", 2048, devices=16384, seq=8192, stack="megatron-core", top=5).best
    assert best.layout.tp == 8 and 8 <= best.layout.pp <= 16 and best.devices == 16384
    alone = plan("llama3-405b", "dgx-h100", 2048, devices=16384, seq=8192, stack="megatron-core", top=1, fix={"cp": 1})
    without, found = (
        model_flops(BIG.model, 8192, 2048, 8) / each.sec_per_it / each.devices / 1e12 for each in (alone.best, best)
    )
    assert 350 < without < 450
    assert without < found < 500, "of two ranks that share a sequence none computes anything again"


@pytest.mark.parametrize(
    ("model", "gbs", "seq", "cluster", "layout"),
    [
        ("llama3.1-405b", 64, 8192, "dgx-b200", "dp2,tp4,pp8,cp2,mbs1,vpp8,interleaved,zero1,sp,bf16"),
        ("llama3.1-405b", 64, 8192, "gb200-nvl72", "dp2,tp4,pp8,cp2,mbs1,vpp8,interleaved,zero1,sp,bf16"),
        ("llama3.1-405b", 512, 8192, "dgx-h100", "dp8,tp8,pp8,cp2,mbs1,vpp8,interleaved,zero1,sp,bf16"),
        ("gpt3-175b", 256, 2048, "dgx-h100", "dp4,tp4,pp8,mbs1,vpp6,interleaved,zero1,sp,bf16"),
        ("llama3-8b", 128, 8192, "dgx-b200", "dp8,mbs2,zero1,bf16"),
        ("llama3-70b", 128, 8192, "dgx-h100", "dp2,tp4,pp4,cp2,mbs1,vpp5,interleaved,zero1,sp,bf16"),
        ("qwen3-235b-a22b", 1024, 4096, "dgx-b200", "dp8,pp8,mbs1,ep8,etp1,vpp12,interleaved,zero1,bf16"),
    ],
)
def test_nemos_recipes_fit_the_devices_that_they_are_for(
    model: str, gbs: int, seq: int, cluster: str, layout: str
) -> None:
    """Layouts of NVIDIA/NeMo at 8cfedd7, scripts/performance/recommended_model_configs; 5% of the memory stay free.

    405B on 128 B200 did not fit, with gradients in fp32, which NeMo has in bf16.
    """
    known, stack = load_cluster(cluster), load_stack("megatron-core-nemo")
    workload = workload_of(model, gbs, seq=seq)
    assert not list(violations(parse_layout(layout), workload, known, stack))
    held = estimate(Case.of(workload, known, stack), parse_layout(layout)).mem_gib
    assert 0.3 * known.device.mem_gib < held < 0.95 * known.device.mem_gib


def test_a_plan_of_today_assumes_the_software_of_today() -> None:
    assert usual_stack(H100) == usual_stack(load_cluster("dgx-b200")) == "megatron-core"
    assert usual_stack(load_cluster("jean-zay-a100-80gb")) == "trimaran"
    found = plan("llama3-8b", "dgx-h100", 64, devices=8, top=1)
    assert (found.stack, found.software) == ("megatron-core", CORE.software)


@pytest.mark.parametrize(
    ("fact", "without", "part"),
    [
        ("overlap_dp", 0.0, "dp"),
        ("gathers_behind_forward", False, "dp"),
        ("overlaps_sends", (), "pp"),
        ("sums_behind_weights", False, "tp"),
        ("sums_behind_products", False, "tp"),
        ("fused_accumulation", "never", "backward"),
        ("flash_kernel", "flash", "forward"),
    ],
)
def test_what_overlaps_is_worth_its_time(fact: str, without: object, part: str) -> None:
    label = "dp256,tp8,pp8,vpp8,mbs1,zero1,sp,recompute-selective,bf16"
    assert seconds(label)[part] < seconds(label, **{fact: without})[part]


def test_recompute_repeats_the_collectives_that_torchtitan_repeats() -> None:
    """Of two gathers and two scatters a layer `selective` repeats the gathers, `full` all but the last scatter."""
    case = Case.of(workload_of("llama3.1-8b", 96), H100, load_stack("torchtitan"))

    def sums(words: str) -> float:
        return estimate(case, parse_layout(f"dp1,tp8,mbs1,sp,{words},bf16")).time.tp

    layers = {word: sums(f"recompute-{word}") - sums("recompute-none") for word in ("selective", "full")}
    forward = layers["selective"]  # two gathers, half of what the forward's scatters and gathers take
    assert layers["full"] == pytest.approx(1.5 * forward, rel=0.03)  # a gather alone starts once more
    # without recompute: as much backward as forward, and the ends
    assert forward == pytest.approx(0.25 * sums("recompute-none"), rel=0.02)
    plain = [estimate(case, parse_layout(f"dp1,tp8,mbs1,recompute-{word},bf16")).time.tp for word in ("none", "full")]
    assert plain[1] == pytest.approx(1.25 * plain[0], rel=0.02)  # one of two sums forward, of four in all


def test_a_selective_recompute_over_tp_keeps_the_last_product_whole_and_what_scatters_leave() -> None:
    """Live behind a forward of torchtitan 0.2.2's layer, traced as benchmarks/traced/collectives.py does: 134 MiB."""
    workload = workload_of("llama3.1-8b", 96).model_copy(update={"seq_len": 8192})
    stack = load_stack("torchtitan-0.2")
    sizes = {"tp": 8, "mbs": 1, "precision": "bf16", "sequence_parallel": True, "recompute": "selective"}
    kept = kept_bytes(Case.of(workload, H100, stack), LayoutGrid.build(workload, stack, **sizes))
    # MiB of each rank's part of input, queries, values, context, gate; down; parts of two sums
    slices = (8 + 8 + 2 + 8 + 28) + 64 + 2 * 8
    assert float(kept.partly[0]) / 2**20 == pytest.approx(slices)


def test_slices_of_a_sequence_are_copied_where_the_software_lays_them_together() -> None:
    """Each of a layer's sums is a scatter, whose copy is read and written before, and a gather, whose copy is after."""
    workload = workload_of("llama3.1-8b", 96)

    def sums(kind: str, label: str) -> float:
        stack = load_stack("torchtitan").model_copy(update={"concatenates_slices": kind})
        return estimate(Case.of(workload, H100, stack), parse_layout(label)).time.tp

    several, one, whole = "dp1,tp8,mbs12,sp,bf16", "dp1,tp8,mbs1,sp,bf16", "dp1,tp8,mbs12,bf16"
    model, case = workload.model, Case.of(workload, H100, load_stack("torchtitan"))
    bandwidth = H100.device.mem_bandwidth_gb_s * 1e9 * case.calibration.memory
    passes = 96 * workload.seq_len * model.hidden * 2 * 2 / bandwidth  # all sequences' 16 bit, read and written
    copies = (4 * model.layers + 2) * passes  # two sums forward and two backward a layer, and those of both ends
    assert sums("always", several) - sums("never", several) == pytest.approx(2 * copies)
    assert sums("always", one) - sums("never", one) == pytest.approx(2 * copies)
    assert sums("scatters", one) - sums("never", one) == pytest.approx(copies)
    assert sums("batches", one) == sums("never", one) and sums("batches", several) == sums("always", several)
    assert sums("always", whole) == sums("never", whole)  # no slices: a sum is laid where it belongs


def test_what_fsdp_lays_together_passes_through_memory_once_a_micro_batch() -> None:
    """FSDP2 copies 2 bytes out of what it gathers, twice, and reads 2 bytes of a gradient to write 4."""
    workload = workload_of("llama3.1-8b", 16)
    titan = load_stack("torchtitan")
    plain = titan.model_copy(update={"copies_gathered": False, "gradient_passes": 0})
    case = Case.of(workload, H100, titan)
    bandwidth = H100.device.mem_bandwidth_gb_s * 1e9 * case.calibration.memory
    for label, micro_batches in (("dp8,mbs2,fsdp,bf16", 1), ("dp8,mbs1,fsdp,bf16", 2)):
        layout = parse_layout(label)
        copied, views = (estimate(Case.of(workload, H100, each), layout).time.dp for each in (titan, plain))
        assert copied - views == pytest.approx(micro_batches * 14 * workload.model.parameters / bandwidth, rel=1e-3)
    whole = parse_layout("dp8,mbs2,zero0,bf16")
    assert (
        estimate(Case.of(workload, H100, titan), whole).time.dp
        == estimate(Case.of(workload, H100, plain), whole).time.dp
    )


def test_attention_made_again_takes_less_than_a_third_of_it_where_its_forward_is_the_faster_pass() -> None:
    """Both passes together take as long as they did: the calibrated rate is theirs."""
    workload = workload_of("llama3.1-8b", 8).model_copy(update={"seq_len": 131072})

    def took(kernel: str) -> dict[str, float]:
        stack = load_stack("torch-fsdp").model_copy(update={"flash_kernel": kernel})
        case = Case.of(workload, H100, stack, prior(H100, load_stack("torch-fsdp")))
        time = estimate(case, parse_layout("dp8,mbs1,fsdp,recompute-full,bf16")).time
        return {part: getattr(time, part) for part in ("forward", "backward", "recompute")}

    alike, triton = took("cudnn"), took("triton")
    assert triton["forward"] + triton["backward"] == pytest.approx(alike["forward"] + alike["backward"])
    assert 0.68 < triton["recompute"] / alike["recompute"] < 0.85


def test_a_gather_hides_beside_the_product_that_reads_it_and_not_behind_a_cast() -> None:
    """Scales of rows are found after the gather, which then has to be through before its product starts."""
    workload = workload_of("llama3.1-70b", 512)

    def saved(precision: str) -> float:
        label = f"dp1,tp8,mbs16,sp,recompute-full,{precision}"
        stacks = load_stack("torchtitan-compiled"), load_stack("torchtitan-async-tp")
        shown, hidden = (estimate(Case.of(workload, H100, stack), parse_layout(label)).time.tp for stack in stacks)
        return (shown - hidden) / shown

    assert 0.0 < saved("fp8_rowwise") < 0.5 * saved("fp8")


def test_products_cut_into_pieces_hide_less_the_fewer_rows_a_piece_has() -> None:
    """A piece of a product pays for its own last wave: with few tokens that is all that cutting it saves."""
    shown = []
    for seq_len in (512, 8192):
        workload = BIG.model_copy(update={"seq_len": seq_len})
        layout = parse_layout("dp256,tp8,pp8,vpp8,mbs1,zero1,sp,recompute-selective,bf16")
        cut, whole = (
            estimate(Case.of(workload, H100, CORE.model_copy(update={"sums_behind_products": on})), layout).time.tp
            for on in (True, False)
        )
        assert cut <= whole
        shown.append(cut / whole)
    assert shown[0] > 0.95 and 0.3 < shown[1] < 0.8


def test_a_host_that_runs_ahead_pays_for_virtual_stages_but_once() -> None:
    """BLOOM's stack waits for each of its sends, Megatron-Core's interleaved schedule for none."""
    few, many = (seconds(f"dp128,tp8,pp8,vpp{vpp},mbs1,zero1,sp,bf16")["overhead"] for vpp in (2, 8))
    assert few == many
    label = "dp128,tp8,pp8,vpp{},mbs1,zero1,sp,bf16"
    few, many = (seconds(label.format(vpp), overlaps_sends=())["overhead"] for vpp in (2, 8))
    assert many - few == pytest.approx(6 * 16 * prior(H100, CORE).micro_batch_ms * 1e-3)


def test_a_gradient_buffer_is_passed_over_whole_and_normed_by_its_shares() -> None:
    """Of Llama-3-8B in fp32 gradients on 8 replicas 4 x 4 bytes a parameter more, and 7/8 of 3 x 4 less."""
    case = Case.of(workload_of("llama3-8b", 64), H100, CORE)
    plain = Case.of(case.workload, H100, CORE.model_copy(update={"gradient_buffer_passes": 0}))
    passed, normed = (estimate(each, parse_layout("dp8,mbs1,zero1,bf16")).time.optimizer for each in (case, plain))
    moved = case.model.parameters * (4 * 4 - 7 / 8 * 3 * 4)
    assert passed - normed == pytest.approx(
        moved / (H100.device.mem_bandwidth_gb_s * 1e9 * prior(H100, CORE).memory), rel=0.01
    )


def test_only_the_schedules_that_overlap_sends_do() -> None:
    one_by_one = "dp256,tp8,pp8,mbs1,zero1,sp,recompute-full,bf16"
    assert seconds(one_by_one) == seconds(one_by_one, overlaps_sends=())


def test_gradients_of_inner_chunks_hide_behind_the_micro_batches_that_pass() -> None:
    even, chunks = (
        "dp128,tp8,pp9,mbs1,zero1,sp,recompute-full,bf16",
        "dp128,tp8,pp9,vpp7,mbs1,zero1,sp,recompute-full,bf16",
    )
    assert seconds(chunks)["dp"] < 0.6 * seconds(even)["dp"]


def test_modules_that_are_made_again_keep_the_first_ones_input_alone() -> None:
    shape = {"tp": 8, "mbs": 1, "precision": "bf16", "sequence_parallel": True}
    kept = kept_bytes(Case.of(BIG, H100, CORE), LayoutGrid.build(BIG, CORE, recompute=["none", "mlp"], **shape))
    tokens, model = 8192, BIG.model
    # the MLP's norm's output, gate, up and their product: 16 bit, over TP
    gone = tokens * (model.hidden + 3 * model.ffn_hidden) * 2 / 8
    np.testing.assert_allclose(kept.layer[1] - kept.partly[1], gone)


def test_the_loss_keeps_as_many_copies_as_its_kernel_makes() -> None:
    grid = LayoutGrid.build(BIG, CORE, tp=8, mbs=1, precision="bf16")
    logits = kept_bytes(Case.of(BIG, H100, CORE), grid).logits / (8192 * 128256 / 8 + 8192 * (-128256 % 1024) / 8)
    np.testing.assert_allclose(logits, 4 + 2)


def test_deepspeed_keeps_fp32_gradients_under_zero_1_alone() -> None:
    workload, stack = workload_of("llama3-8b", 64), load_stack("deepspeed")
    case = Case.of(workload, H100, stack)
    parameters = workload.model.parameters

    def gradients(label: str) -> float:
        return estimate(case, parse_layout(label)).memory[0].gradients * 2**30

    assert gradients("dp8,mbs1,zero1,bf16") == pytest.approx(6 * parameters, rel=0.01)
    assert gradients("dp8,mbs1,zero2,bf16") == pytest.approx(2 * parameters / 8, rel=0.01)
    assert gradients("dp8,mbs1,zero1,fp16") == pytest.approx(2 * parameters, rel=0.01)


def test_deepspeed_has_no_zero_2_in_a_pipeline() -> None:
    workload, stack = workload_of("llama3-8b", 64), load_stack("deepspeed")
    broken = [v.sentence for v in violations(parse_layout("dp4,pp2,mbs1,zero2,bf16"), workload, H100, stack)]
    assert broken == [
        "ZeRO stage 2 with PP 2: in a pipeline deepspeed has ZeRO stages 0, 1: choose one of them or PP 1"
    ]
    assert not list(violations(parse_layout("dp4,pp2,mbs1,zero1,bf16"), workload, H100, stack))


def test_recompute_of_a_share_of_layers_counts_each_stage_where_the_software_does() -> None:
    label = "dp128,tp8,pp16,vpp4,mbs1,zero1,sp,recompute-full4,bf16"
    assert [v.rule for v in violations(parse_layout(label), BIG, H100, CORE)] == ["recompute_every"]
    assert not list(violations(parse_layout(label.replace("full4", "full")), BIG, H100, CORE))


@pytest.mark.parametrize(
    ("layers", "stages", "split"),
    [(32, 4, (8, 9, 8, 7)), (126, 8, (15, 16, 16, 16, 16, 16, 16, 15)), (4, 4, (1, 1, 1, 1))],
)
def test_torchtitan_counts_embedding_and_head_as_layers(layers: int, stages: int, split: tuple[int, ...]) -> None:
    model = BIG.model.model_copy(update={"layers": layers})
    workload = BIG.model_copy(update={"model": model})
    assert resolve_split(parse_layout(f"pp{stages},bf16"), workload, load_stack("torchtitan")) == split


def test_what_a_stack_extends_is_said_once() -> None:
    base, compiled = load_stack("torchtitan").model_dump(), load_stack("torchtitan-compiled").model_dump()
    differ = {name for name, value in base.items() if compiled[name] != value}
    assert differ == {
        "name", "software", "op_us", "rms_norm", "lean_activation", "selective_keeps", "precisions", "schedules",
        "overlaps_sends", "expert_overlaps", "noted", "compiled",
    }  # fmt: skip


def test_a_calculator_that_is_misspelt_in_a_stacks_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('extends = "megatron-core"\nflops_formula = "megatron-core"\n')
    with pytest.raises(TrimaranError, match=r"flops_formula: .*'megatron_core'"):
        load_stack(str(tmp_path / "mine.toml"))


def test_a_stack_of_ones_own_is_planned_for() -> None:
    mine = Stack(**(CORE.model_dump() | {"name": "mine", "overlap_dp": 0.0}))
    ours, theirs = (plan(BIG.model, H100, 2048, devices=16384, seq=8192, stack=s, top=1).best for s in (mine, CORE))
    assert ours.sec_per_it > theirs.sec_per_it


def test_where_megatron_s_softmax_does_not_take_the_shape_its_probabilities_stay_in_fp32() -> None:
    """Of 14 heads and one sequence of 16 bit 2 bytes a score more than of two sequences, which are 28 in one batch."""
    workload = workload_of("bloom-176b", 2048)
    case = Case.of(workload, load_cluster("jean-zay-a100-80gb"), load_stack("megatron-deepspeed"))

    def kept(mbs: int, precision: str) -> float:
        return float(
            kept_bytes(case, LayoutGrid.build(workload, case.stack, tp=8, mbs=mbs, precision=precision)).layer[0]
        )

    scores = 14 * 2048.0**2
    assert kept(1, "fp16") - 0.5 * kept(2, "fp16") == pytest.approx(2.0 * scores)
    assert kept(1, "fp32") == pytest.approx(0.5 * kept(2, "fp32"))


def test_a_rank_whose_weights_no_other_has_gathers_nothing_beside_its_products() -> None:
    workload, stack = workload_of("llama3-8b", 8, seq=2048), load_stack("torchtitan")
    quiet = Case.of(workload, H100, stack.model_copy(update={"gathers_beside_products": False}))
    case = Case.of(workload, H100, stack)
    alone, beside = ([estimate(each, parse_layout(text)).time.backward for each in (case, quiet)] for text in
                     ("tp8,sp,mbs1,bf16", "dp8,fsdp,mbs1,bf16"))  # fmt: skip
    assert alone[0] == pytest.approx(alone[1])
    assert 1.1 * beside[1] < beside[0] < 1.189 * beside[1]
