"""`explain` says where a layout stands and why, beside the best."""

from __future__ import annotations

import pytest

from table_text import table_text
from trimaran.api import plan, workload_of
from trimaran.cost.case import Case
from trimaran.cost.effects.time_effects import PARTS
from trimaran.cost.table.predict_table import predict_table
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.files.row_nouns import run_cells
from trimaran.files.row_table import parse_table
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import violations
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.workload import Workload
from trimaran.planner.explain.advice import advise
from trimaran.planner.explain.bottleneck import memory_sentence
from trimaran.planner.explain.kernel_notes import kernel_notes
from trimaran.planner.planner import first_of_equals, plan_with
from trimaran.planner.search.settings import settings_from
from trimaran.planner.why import complete, explain

WORKLOAD = workload_of("bloom-prequel-181b", 2048)
CLUSTER = load_cluster("jean-zay-a100-80gb")
STACK = load_stack("megatron-deepspeed")
SETTINGS = settings_from(devices=384, top=30)


def test_the_best_explains_itself_as_rank_1() -> None:
    best = plan_with(Case.of(WORKLOAD, CLUSTER, STACK), SETTINGS).best
    told = explain(str(best.layout), Case.of(WORKLOAD, CLUSTER, STACK), SETTINGS)
    assert (told.verdict, told.rank) == ("ranked", 1)
    assert told.estimate is not None
    assert told.estimate.sec_per_it == pytest.approx(best.sec_per_it, rel=1e-7)
    assert told.estimate.memory == best.estimate.memory


@pytest.mark.parametrize(("second", "is_it"), [(0.995, True), (0.97, False), (1.0, False), (1.01, False)])
def test_the_fastest_of_the_firsts_equals_is_less_faster_than_a_run_differs(second: float, is_it: bool) -> None:
    """The second takes so many times as long as the first, on as many devices or on twice as many."""
    found = plan_with(Case.of(WORKLOAD, CLUSTER, STACK), SETTINGS.model_copy(update={"top": 2}))
    first, other = found.entries
    estimate = other.estimate.model_copy(update={"sec_per_it": second * first.sec_per_it})
    alike = {"global_batch": first.global_batch, "devices": first.devices}
    beside = other.model_copy(update={"estimate": estimate, **alike})
    assert found.model_copy(update={"entries": (first, beside)}).fastest_equal is (beside if is_it else first)
    apart = beside.model_copy(update={"devices": 2 * first.devices})
    assert found.model_copy(update={"entries": (first, apart)}).fastest_equal is first


@pytest.mark.parametrize(("model", "devices", "batch"), [("deepseek-v3", 1024, 2048), ("llama3-8b", 64, 256)])
def test_a_plan_whose_first_is_the_plainest_of_its_equals_says_so(model: str, devices: int, batch: int) -> None:
    found = plan(model, "dgx-h100", batch, devices=devices, seq=4096, stack="megatron-core", top=5)
    faster = found.fastest_equal
    said = [note for note in found.notes if "faster than the best" in note]
    is_told = faster.sec_per_it < 0.9995 * found.best.sec_per_it
    assert [note.split(" is predicted")[0] for note in said] == [str(faster.layout)] * is_told
    assert faster.sec_per_it == min(entry.sec_per_it for entry in found.entries)


@pytest.mark.parametrize(("second", "says"), [(0.995, "0.5% faster"), (0.9996, ""), (1.0, "")])
def test_a_plan_says_nothing_of_a_layout_that_is_faster_by_less_than_is_printed(second: float, says: str) -> None:
    found = plan_with(Case.of(WORKLOAD, CLUSTER, STACK), SETTINGS.model_copy(update={"top": 2}))
    first, other = found.entries
    estimate = other.estimate.model_copy(update={"sec_per_it": second * first.sec_per_it})
    alike = {"estimate": estimate, "global_batch": first.global_batch, "devices": first.devices}
    told = first_of_equals(found.model_copy(update={"entries": (first, other.model_copy(update=alike))}))
    assert [says in sentence for sentence in told] == [True] * bool(says)


@pytest.mark.parametrize("stages", ["vpp2,mbs1,zero1,sp,bf16,split11-10x6-9", "vpp3,mbs1,zero1,sp,bf16,split7x9-6-6-5"])
def test_a_row_of_a_table_and_a_layout_asked_about_have_one_prediction_where_stages_are_uneven(stages: str) -> None:
    layout = parse_layout(f"dp8,tp4,cp2,pp4,{stages}")
    workload = Workload(model=load_model("llama3-70b"), seq_len=8192, global_batch=512)
    row = Measurement.model_validate({"cluster": "dgx-h100", "stack": "megatron-core", **run_cells(workload, layout)})
    (answered,) = predict_table(parse_table(table_text([row]), "t"))
    case = Case.of(workload, load_cluster("dgx-h100"), load_stack("megatron-core"))
    told = explain(str(layout), case, settings_from(devices=256)).estimate
    assert answered.estimate is not None and told is not None
    assert answered.estimate.sec_per_it == pytest.approx(told.sec_per_it, rel=1e-9)


@pytest.mark.parametrize("label", ["dp5,tp1,pp9,vpp2,mbs4,fp16,zbv", "dp5,tp1,pp2,vpp2,mbs1,fp16,zbv"])
def test_a_row_of_a_table_and_a_layout_asked_about_have_one_prediction_where_the_pipeline_is_folded(label: str) -> None:
    workload = Workload(model=load_model("gpt3-6b7"), seq_len=77, global_batch=100)
    cluster, stack = load_cluster("dgx-b200"), load_stack("torch-pipe")
    stated = run_cells(workload, parse_layout(label))
    row = Measurement.model_validate({"cluster": "dgx-b200", "stack": "torch-pipe", **stated})
    (answered,) = predict_table(parse_table(table_text([row]), "t"))
    told = explain(label, Case.of(workload, cluster, stack), settings_from(devices=48)).estimate
    assert answered.estimate is not None and told is not None
    assert answered.estimate.sec_per_it == pytest.approx(told.sec_per_it, rel=1e-9)


def test_what_is_left_open_is_chosen_as_the_search_would() -> None:
    told = explain("tp4,pp12", Case.of(WORKLOAD, CLUSTER, STACK), SETTINGS)
    fixed = SETTINGS.model_copy(update={"fixed": {"tp": 4, "pp": 12}, "top": 1})
    assert told.layout == plan_with(Case.of(WORKLOAD, CLUSTER, STACK), fixed).best.layout


def test_differences_by_part_add_up_to_the_gap() -> None:
    told = explain("dp8,tp4,pp12,mbs2,recompute-full", Case.of(WORKLOAD, CLUSTER, STACK), SETTINGS)
    assert told.estimate is not None
    parts = told.estimate.time.model_dump().values()
    others = told.best_estimate.time.model_dump().values()
    gap = sum(a - b for a, b in zip(parts, others, strict=True))
    assert gap == pytest.approx(told.estimate.sec_per_it - told.best_estimate.sec_per_it)
    assert "recompute" in told.reasons[0]


def test_every_broken_rule_is_told() -> None:
    told = explain("dp6,tp5,pp48,mbs1", Case.of(WORKLOAD, CLUSTER, STACK), SETTINGS)
    assert told.verdict == "refused" and told.estimate is None
    assert set(told.reasons) == {v.sentence for v in violations(told.layout, WORKLOAD, CLUSTER, STACK)}
    assert any("48 stages" in reason for reason in told.reasons)


def test_more_devices_than_allowed_is_a_refusal() -> None:
    told = explain("dp8,tp8,pp6,mbs1", Case.of(WORKLOAD, CLUSTER, STACK), settings_from(devices=300))
    assert told.verdict == "refused"
    assert "384 devices, but at most 300" in told.reasons[0]


def test_a_layout_that_does_not_fit_names_stage_part_and_limit() -> None:
    told = explain("dp8,tp4,pp12,mbs8,recompute-none", Case.of(WORKLOAD, CLUSTER, STACK), SETTINGS)
    assert told.verdict == "does not fit"
    assert "activations" in told.reasons[0] and "GiB" in told.reasons[0]
    assert told.layout.schedule == "1f1b"


@pytest.mark.parametrize(
    ("too_much", "needs", "lower_by"),
    [(2.0, "102.0 GiB", "2.0 GiB"), (0.08, "100.1 GiB", "0.1 GiB"), (0.04, "100.04 GiB", "0.04 GiB"),
     (0.0004, "100.0004 GiB", "0.0004 GiB")],
)  # fmt: skip
def test_memory_beyond_the_limit_is_told_by_numbers_that_differ(too_much: float, needs: str, lower_by: str) -> None:
    best = plan_with(Case.of(WORKLOAD, CLUSTER, STACK), SETTINGS.model_copy(update={"top": 1})).best.estimate
    told = memory_sentence(best.model_copy(update={"mem_gib": 100.0 + too_much}), 100.0, 0.05)
    assert f"needs {needs}, " in told and told.endswith(f"lower it by {lower_by}")
    fits = memory_sentence(best.model_copy(update={"mem_gib": 100.0 - too_much}), 100.0, 0.05)
    assert fits.endswith("of 100.0 GiB (margin 5% left free)")


def test_advice_moves_14400_wide_with_150_wide_heads_and_leaves_good_shapes_alone() -> None:
    """Document 004: h=14400 with 96 heads ran at 94 TFLOPs, 13824 with 64 heads at 120."""
    shape = WORKLOAD.model
    layout = explain("dp8,tp4,pp12,mbs2", Case.of(WORKLOAD, CLUSTER, STACK), SETTINGS).layout
    odd = shape.model_copy(update={"hidden": 14400, "heads": 96, "kv_heads": 96, "head_dim": 150, "ffn_hidden": 57600})
    found = advise(layout, Case.of(WORKLOAD.model_copy(update={"model": odd}), CLUSTER, STACK))
    assert found is not None
    assert found.gain > 0.1 and (found.hidden // found.heads) % 8 == 0
    assert "hidden 14400 with 96 heads of 150" in found.sentence


def notes(heads: int, mbs: int, *, precision: str = "fp16", **shape: int) -> str:
    model = WORKLOAD.model.model_copy(update={"heads": heads, "kv_heads": heads, **shape})
    workload = WORKLOAD.model_copy(update={"model": model})
    layout = parse_layout(f"dp8,tp4,pp12,mbs{mbs},zero1,recompute-full,{precision}")
    return "\n".join(kernel_notes(layout, workload, CLUSTER, STACK))


def test_108_heads_lose_the_fused_softmax_unless_the_micro_batch_makes_up_for_it() -> None:
    """Document 004: 108 heads break Megatron's rule that heads / TP x micro-batch is a multiple of 4."""
    assert "heads 108 / TP 4 x micro-batch 2 = 54 is not a multiple of 4" in notes(108, 2)
    assert "fused softmax" not in notes(108, 4)
    assert "fused softmax" not in notes(64, 1)
    assert "precision is fp32" in notes(64, 1, precision="fp32")


def test_odd_head_sizes_and_half_empty_waves_are_named() -> None:
    assert "head size 150 is not a multiple of 8" in notes(96, 2, hidden=14400, head_dim=150)
    assert "on 108 multiprocessors" in notes(64, 1, hidden=3584, ffn_hidden=14336, head_dim=56)


def test_a_rank_of_context_parallelism_multiplies_its_share_of_the_sequences() -> None:
    workload = Workload(model=load_model("gpt2-124m"), seq_len=1024, global_batch=64)
    cluster, stack = load_cluster("dgx-h100"), load_stack("megatron-core")
    for cp, tokens in ((1, 1024), (2, 512)):
        layout = parse_layout(f"dp4,tp1,cp{cp},pp1,mbs1,zero1,bf16")
        assert f"qkv: {tokens} x 2304 is " in "\n".join(kernel_notes(layout, workload, cluster, stack))


def test_asked_for_bloom_the_plan_names_the_layout_that_it_was_trained_with() -> None:
    asked = {"gbs": 2048, "devices": 384, "stack": "megatron-deepspeed", "top": 3}
    layout = plan("bloom-176b", "jean-zay-a100-80gb", **asked).best.layout
    assert (layout.dp, layout.tp, layout.pp, layout.mbs) == (8, 4, 12, 2)
    assert (layout.zero_stage, layout.recompute, layout.precision) == (1, "full", "bf16")


def test_what_ranks_tell_each_other_is_said_where_they_share_differently() -> None:
    case = Case.of(workload_of("llama3-8b", 8, seq=8192), load_cluster("dgx-h100"), load_stack("megatron-core"))
    more_tp = explain("tp8", case, settings_from(devices=8))
    assert more_tp.layout.tp == 8 != more_tp.best.tp
    assert " tp +" in more_tp.reasons[0]
    shared = explain("tp2,cp2", case, settings_from(devices=8))
    assert shared.layout.cp == 2 != shared.best.cp
    assert " cp +" in shared.reasons[0]


@pytest.mark.parametrize(
    "text",
    [
        # without CP, though sequences are long enough for a search to try it
        "dp16,tp1,pp1,mbs1,zero1,bf16",
        # a split of four stages, which is none of four stages with chunks
        "dp4,tp2,pp4,ep8,etp1,dispatch-deepep,mbs1,zero1,sp,bf16,split13-12-12-11",
    ],
)
def test_a_layout_as_a_plan_prints_it_is_that_layout_and_nothing_is_chosen_for_it(text: str) -> None:
    workload = Workload(model=load_model("qwen3-30b-a3b"), seq_len=8192, global_batch=64)
    case = Case.of(workload, load_cluster("dgx-h100"), load_stack("megatron-core"))
    assert str(complete(text, case, settings_from(devices=64))) == text


def test_zero_3_alone_is_fully_sharded_and_what_no_plan_would_print_is_completed() -> None:
    workload = Workload(model=load_model("llama3.1-8b"), seq_len=8192, global_batch=64)
    case = Case.of(workload, load_cluster("dgx-h100"), load_stack("torchtitan"))
    whole = complete("dp8,tp1,pp1,mbs1,zero3,bf16", case, settings_from(devices=8))
    assert str(whole) == "dp8,tp1,pp1,mbs1,zero3,fsdp,bf16"
    # experts want slices of sequences under TP, which the text does not state
    mixture = Case.of(
        workload.model_copy(update={"model": load_model("qwen3-30b-a3b")}), load_cluster("dgx-h100"),
        load_stack("megatron-core"),
    )  # fmt: skip
    assert complete("dp8,tp2,pp1,ep8,mbs1,zero1,bf16", mixture, settings_from(devices=16)).sequence_parallel


def test_a_layout_that_no_search_tries_has_no_rank_and_says_why() -> None:
    case = Case.of(workload_of("llama3-8b", 1), load_cluster("gb200-nvl72"), load_stack("deepspeed"))
    settings = settings_from(devices=72, top=1)
    (idle,) = plan_with(case, settings).notes
    assert idle.endswith(" are idle; no layout that is searched uses all of them")
    text = "dp1,tp1,cp8,cp-ulysses,pp9,mbs1,zero1,bf16"
    why = explain(text, case, settings)
    assert why.estimate is not None and why.estimate.sec_per_it < why.best_estimate.sec_per_it
    assert why.verdict == "not searched" and why.rank is None
    assert why.reasons[0] == (
        "not searched: CP 8 leaves a rank 1024 tokens of a sequence, and a search 4096; --fix cp=8 searches CP 8"
    )
    assert explain(text, case, settings_from(devices=72, top=1, fixed={"cp": 8})).rank is not None
    held = explain("dp1,tp1,cp2,cp-ulysses,pp12,mbs1,zero1,bf16", case, settings_from(devices=72, fixed={"cp": 8}))
    assert held.reasons[0] == "not searched: CP is held at 8, and is 2 here"


@pytest.mark.proof
def test_what_a_search_leaves_alone_until_it_is_held_has_no_rank_beside_what_it_ranks() -> None:
    workload = workload_of("qwen3-235b-a22b", 1024, seq=4096)
    case = Case.of(workload, load_cluster("gb200-nvl72"), load_stack("megatron-core"))
    text = "dp8,tp1,pp3,ep8,etp1,dispatch-allgather,mbs1,zero1,offload-optimizer,bf16,split32-32-30"
    offloaded = explain(text, case, settings_from(devices=24, top=1))
    assert offloaded.estimate is not None and offloaded.estimate.sec_per_it < offloaded.best_estimate.sec_per_it / 2
    assert offloaded.verdict == "not searched" and offloaded.rank is None
    assert offloaded.reasons[0] == "not searched; --fix offload=optimizer searches offload optimizer"
    narrow = explain(text.replace("offload-optimizer,bf16", "fp8"), case, settings_from(devices=48, top=1))
    assert "not searched; --fix precision=fp8 searches precision fp8" in narrow.reasons
    # where nothing fits without, a search offloads by itself, and nobody held that
    text = "dp2,tp1,pp8,ep2,etp1,dispatch-allgather,mbs1,zero1,recompute-full,bf16"
    alone = explain(text, case, settings_from(devices=16, top=1))
    assert alone.best.offload == "optimizer" and alone.verdict == "does not fit"
    assert not any("is held at optimizer" in reason for reason in alone.reasons)


def test_what_would_lessen_a_bottleneck_is_nothing_that_the_layout_has_not() -> None:
    case = Case.of(workload_of("llama3-8b", 64, seq=8192), load_cluster("dgx-h100"), load_stack("megatron-core"))

    def ways(part: str, text: str) -> str:
        (cause,) = [each.cause for each in PARTS if each.name == part]
        assert cause is not None
        return cause(parse_layout(text), case, 8)

    assert "smaller micro-batch" in ways("recompute", "dp8,mbs2,recompute-full,bf16")
    assert "micro-batch" not in ways("recompute", "dp8,mbs1,recompute-full,bf16")
    assert "fewer layers" in ways("head", "dp4,pp2,mbs1,bf16")
    assert "fewer layers" not in ways("head", "dp8,mbs1,bf16")
    assert "ZeRO" in ways("optimizer", "dp8,mbs1,bf16")
    assert "ZeRO" not in ways("optimizer", "dp8,mbs1,zero1,bf16") + ways("optimizer", "mbs1,bf16")


@pytest.mark.parametrize(
    ("model", "layers"), [("qwen3-30b-a3b", ("qkv",)), ("deepseek-v3", ("ffn up", "ffn down")), ("llama3-8b", None)]
)
def test_no_product_is_named_that_no_layer_has(model: str, layers: tuple[str, ...] | None) -> None:
    workload = Workload(model=load_model(model), seq_len=512, global_batch=64)
    layout = parse_layout("dp8,tp1,pp1,mbs1,zero1,bf16")
    notes = kernel_notes(layout, workload, load_cluster("dgx-h100"), load_stack("megatron-core"))
    named = {note.partition(":")[0] for note in notes} - {"logits"}
    assert named and named <= set(layers or ("qkv", "ffn up", "ffn down"))
