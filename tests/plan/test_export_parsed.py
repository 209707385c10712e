"""What is exported is read back by the trainer's own parser, and sets what the layout says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble, get_schedule_class

from plan.foreign_parsers import INSTALLED, read_by_deepspeed, read_by_megatron, read_by_torchtitan
from trimaran.api import workload_of
from trimaran.files.catalogue import load_model, load_stack
from trimaran.layout.layout import resolve_split
from trimaran.layout.notation import parse_layout
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.stack import FOLDED
from trimaran.nouns.workload import Workload
from trimaran.planner.configs.cost import cost_of
from trimaran.planner.configs.resolve import Given
from trimaran.planner.export.exporters import export
from trimaran.planner.export.torchtitan_flavors import CONFIGURED, FLAVORS, SINCE_0_3

MEGATRON, CORE, TITAN = load_stack("megatron"), load_stack("megatron-core"), load_stack("torchtitan")
LLAMA = workload_of("llama3-8b", 256)
# Models by which depths differ, so that stages come out even, uneven at the ends and uneven in the middle.
DEPTHS = ["llama3-8b", "llama3-70b", "llama3-405b", "gpt3-1b3", "qwen2.5-7b", "llama2-13b"]
PIPELINES = [
    "dp2,pp2", "dp2,pp3", "dp2,pp4", "dp2,pp7", "dp2,pp8", "dp2,pp2,vpp2", "dp2,pp4,vpp2", "dp2,pp3,vpp3",
    "dp2,pp2,vpp5", "dp2,pp4,vpp3", "dp2,pp2,vpp7", "dp2,pp4,gpipe", "dp2,pp3,zbv", "dp2,pp4,dualpipev",
]  # fmt: skip


def pipelined() -> list[tuple[Workload, str, Any]]:
    """Workloads, pipelines and stacks whose stages differ, as many as each has layers for."""
    # untied, since 0.3 has no pipeline of a head that shares the embedding's weights
    models = [load_model(model).model_copy(update={"tied_embedding": False}) for model in DEPTHS]
    workloads = [workload_of(model, 256) for model in models]
    stacks = [MEGATRON, TITAN, load_stack("trimaran")]
    return [(w, f"{p},fsdp,bf16", s) for w in workloads for p in PIPELINES for s in stacks]


@pytest.mark.proof
@pytest.mark.parametrize("version", ["0.2", "0.3"])
def test_torchtitan_runs_the_stages_that_were_planned(version: str) -> None:
    cases = pipelined()
    files = [(w.model.layers, export(parse_layout(text), w, stack, "torchtitan", version)) for w, text, stack in cases]
    for (workload, text, stack), read in zip(cases, read_by_torchtitan(version, files), strict=True):
        if "refused" in read:
            continue
        layout = parse_layout(text)
        split = [sum(name.startswith("layers.") for name in stage) for stage in read["stages"]]
        assert tuple(split) == resolve_split(layout, workload, stack), f"{workload.model.name} {text} {stack.name}"
        assert len(split) == layout.pp * layout.vpp
        ends = read["stages"][0][0], read["stages"][-1][-1]
        assert ends == ("tok_embeddings", "output" if version == "0.2" else "lm_head")


def test_torchtitan_03_is_a_module_that_sets_the_layout() -> None:
    wanted = ["dp8,tp2,pp2,mbs4,sp,fsdp,recompute-full,bf16", "dp4,tp2,mbs2,bf16", "dp8,mbs1,fsdp,recompute-selective"]
    texts = [export(parse_layout(text), LLAMA, MEGATRON, "torchtitan") for text in wanted]
    full, replicated, selective = read_by_torchtitan("0.3", [(32, text) for text in texts])
    assert "torchtitan 0.3: dp8" in texts[0].splitlines()[0]
    degrees = full["parallelism"]
    assert (degrees["data_parallel_shard_degree"], degrees["data_parallel_replicate_degree"]) == (8, 1)
    assert (degrees["tensor_parallel_degree"], degrees["pipeline_parallel_degree"]) == (2, 2)
    assert degrees["pipeline_parallel_microbatch_size"] == 4 and degrees["enable_sequence_parallel"] is True
    assert (full["training"]["local_batch_size"], full["training"]["global_batch_size"]) == (32, 256)
    assert (full["training"]["seq_len"], full["activation_checkpoint"]["mode"]) == (8192, "full")
    assert replicated["parallelism"]["data_parallel_replicate_degree"] == 4
    assert replicated["parallelism"]["enable_sequence_parallel"] is False
    assert selective["activation_checkpoint"]["mode"] == "selective"
    assert selective["training"]["mixed_precision_param"] == "float32"


def test_torchtitan_03_runs_what_was_planned_and_nothing_more_of_its_own_configuration() -> None:
    """llama3_405b of 0.3.0 has layers in fp8, compiled, with asynchronous TP; a step is one CUDA graph unless told."""
    asked = [(LLAMA, "dp64,tp8,pp2,mbs1,fsdp,sp,bf16"), (QWEN, "dp8,ep8,etp1,mbs1,fsdp,bf16"), (LLAMA, "dp8,fsdp,bf16")]
    texts = [(w.model.layers, export(parse_layout(text), w, TITAN, "torchtitan")) for w, text in asked]
    for read, size in zip(read_by_torchtitan("0.3", texts), ("8B", "30B-A3B", "8B"), strict=True):
        assert read["model_spec"]["flavor"] == size and "converters" not in read["model_spec"]
        assert not read["compile"]["enable"] and not read["compile"]["enable_async_tensor_parallel"]
        # trainer.py, _validate_cuda_graphs: neither pipelines nor exchanges that wait for the host go with them
        assert read["training"]["disable_cuda_graphs"] is True


@pytest.mark.parametrize("text", ["dp8,ep8,dispatch-deepep,mbs1,zero3,fsdp,bf16", "dp8,mbs1,zero3,fsdp,mxfp8"])
def test_what_torchtitan_03_is_told_of_a_model_is_read_back_with_the_model(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "planned.py").write_text(export(parse_layout(text), QWEN, TITAN, "torchtitan"))
    cost = cost_of(file, "auto", Given("dgx-b200", devices=8))
    assert (cost.case.model, str(cost.layout)) == (QWEN.model, str(parse_layout(text)))
    assert not [remark for kind, remark in cost.remarks if kind == "not read"]


@pytest.mark.parametrize(
    ("version", "model", "what"),
    [
        ("0.2", "qwen3-32b", "a pipeline of qwen3"),
        ("0.2", "gpt-oss-20b", "a pipeline of gpt_oss"),
        ("0.3", "llama3.2-1b", "a pipeline of a head that shares the embedding's weights"),
    ],
)
def test_torchtitan_refuses_pipelines_of_models_that_it_has_none_for(version: str, model: str, what: str) -> None:
    workload, other = workload_of(model, 256, seq=4096), {"0.2": "0.3", "0.3": "0.2"}[version]
    with pytest.raises(TrimaranError, match=what):
        export(parse_layout("dp8,pp2,mbs1,fsdp,bf16"), workload, TITAN, "torchtitan", version)
    assert export(parse_layout("dp8,pp2,mbs1,fsdp,bf16"), workload, TITAN, "torchtitan", other)
    assert export(parse_layout("dp8,mbs1,fsdp,bf16"), workload, TITAN, "torchtitan", version)


@pytest.mark.proof
def test_torchtitan_03_stops_where_it_has_no_such_model_and_compiles_narrow_products() -> None:
    narrow = export(parse_layout("dp8,mbs1,fsdp,mxfp8"), LLAMA, MEGATRON, "torchtitan")
    by_row = export(parse_layout("dp8,mbs1,fsdp,fp8_rowwise"), LLAMA, TITAN, "torchtitan")
    strange = export(parse_layout("dp8,mbs1,fsdp"), workload_of("gpt3-1b3", 256), MEGATRON, "torchtitan")
    known, rowwise, unknown = read_by_torchtitan("0.3", [(32, narrow), (32, by_row), (24, strange)])
    assert known["compile"]["enable"] and known["model_spec"]["flavor"] == "8B"
    assert rowwise["compile"]["enable"] and rowwise["model_spec"]["flavor"] == "8B"
    with pytest.raises(TrimaranError, match=r"--for-version 0\.2"):
        export(parse_layout("dp8,mbs1,fsdp,fp8"), LLAMA, TITAN, "torchtitan")
    assert "return one of your own here" in unknown["refused"]


def test_torchtitan_02_reads_every_setting() -> None:
    wanted = ["dp8,mbs2,fsdp,fp8", "dp8,mbs2,fsdp,recompute-full2,bf16", "dp8,fsdp,mxfp8", "dp8,fsdp,fp8_rowwise"]
    texts = [export(parse_layout(text), LLAMA, TITAN, "torchtitan", "0.2") for text in wanted]
    fp8, every, mxfp8, by_row = read_by_torchtitan("0.2", [(32, text) for text in texts])
    assert by_row["quantize"]["linear"]["float8"]["recipe_name"] == "rowwise"
    assert fp8["quantize"]["linear"]["float8"]["enable_fsdp_float8_all_gather"] is True
    assert (every["activation_checkpoint"]["mode"], every["activation_checkpoint"]["selective_ac_option"]) == (
        "selective", "2",
    )  # fmt: skip
    assert mxfp8["model"]["converters"] == ["quantize.linear.mx"] and mxfp8["compile"]["enable"]


@pytest.mark.proof
@pytest.mark.parametrize("version", ["0.2", "0.3"])
def test_torchtitan_compiles_what_was_planned_compiled_and_cuts_tps_collectives_where_the_plan_does(
    version: str, tmp_path: Path
) -> None:
    wanted = [
        ("torchtitan-0.2", "dp8,tp8,mbs4,fsdp,sp,bf16"),
        ("torchtitan-0.2-compiled", "dp8,tp8,mbs4,fsdp,sp,bf16"),
        ("torchtitan-0.2-async-tp", "dp8,tp8,mbs4,fsdp,sp,bf16"),
        ("torchtitan-0.2-async-tp", "dp8,mbs4,fsdp,bf16"),
    ]
    texts = [export(parse_layout(text), LLAMA, load_stack(stack), "torchtitan", version) for stack, text in wanted]
    section = "parallelism" if version == "0.2" else "compile"
    read = read_by_torchtitan(version, [(32, text) for text in texts])
    found = [(each["compile"]["enable"], each[section]["enable_async_tensor_parallel"]) for each in read]
    assert found == [(False, False), (True, False), (True, True), (True, False)]
    file = tmp_path / ("job.toml" if version == "0.2" else "planned.py")
    for (stack, _), text in list(zip(wanted, texts, strict=True))[:3]:
        file.write_text(text)
        cost = cost_of(file, "auto", Given("dgx-h100", model="llama3-8b", devices=64))
        assert cost.case.stack.software == load_stack(stack).software


def test_deepspeed_reads_batches_stage_and_overlap() -> None:
    stack = load_stack("deepspeed")
    wanted = ["dp16,mbs4,fsdp,bf16", "dp16,mbs2,zero1,bf16", "dp8,mbs2,zero2,fp16", "dp8,mbs1,fp32"]
    layouts = [parse_layout(text) for text in wanted]
    files = [(layout.dp, export(layout, LLAMA, stack, "deepspeed")) for layout in layouts]
    read = read_by_deepspeed(files)
    for layout, said in zip(layouts, read, strict=True):
        assert (said["train_batch_size"], said["micro_batch"], said["stage"]) == (256, layout.mbs, layout.zero_stage)
        assert said["accumulation"] == 256 // (layout.dp * layout.mbs)
        assert (said["bfloat16"], said["fp16"]) == (layout.precision == "bf16", layout.precision == "fp16")
        if layout.zero_stage:
            assert said["overlap_comm"] is (layout.zero_stage == 3) and said["reduce_bucket_size"] == 500_000_000
    assert read[1]["grad_accum_dtype"] == "fp32"


@pytest.mark.parametrize("version", ["0.15", "0.19"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize(
    "layout",
    [
        "dp8,mbs2", "dp4,tp4,pp4,vpp2,mbs2,zero1,sp,recompute-selective,place-tp-pp-dp", "dp2,pp4,split7-9-9-7",
        "dp2,pp4,vpp2,split3-5-4-4-4-4-4-4,recompute-full", "dp8,tp2,zero1,sp,recompute-mlp", "dp8,pp4,recompute-full2",
    ],
)  # fmt: skip
def test_megatron_has_every_option_that_is_written(version: str, precision: str, layout: str) -> None:
    for workload in (LLAMA, workload_of("mistral-7b", 256)):
        said = read_by_megatron(
            version, export(parse_layout(f"{layout},{precision}"), workload, CORE, "megatron-lm", version)
        )
        assert said["--num-layers"] == 32 and said["--global-batch-size"] == 256


@pytest.mark.parametrize("model", ["gpt3-1b3", "llama3.1-8b", "qwen3-8b", "qwen2.5-7b", "mistral-7b", "gpt2-1b5"])
def test_megatron_is_told_what_it_would_take_otherwise(model: str) -> None:
    workload = workload_of(model, 256)
    said = read_by_megatron("0.19", export(parse_layout("dp8,bf16"), workload, CORE, "megatron-lm"))
    assert said["--attention-dropout"] == said["--hidden-dropout"] == workload.model.dropout
    assert (said["--tokenizer-type"], said["--vocab-size"]) == ("NullTokenizer", workload.model.vocab)
    assert said["--normalization"] == {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[workload.model.norm]
    # up to 0.17 the tokenizer adds its end of text to the number
    older = read_by_megatron("0.15", export(parse_layout("dp8,bf16"), workload, CORE, "megatron-lm", "0.17"))
    assert older["--vocab-size"] == workload.model.vocab - 1


def test_megatron_overlaps_what_the_stack_counts_and_no_more() -> None:
    overlaps = {"--overlap-grad-reduce", "--overlap-param-gather", "--tp-comm-overlap"}
    layout, whole = parse_layout("dp8,tp2,sp,zero1,bf16"), load_stack("megatron-core-tp-overlap")
    assert overlaps <= read_by_megatron("0.19", export(layout, LLAMA, whole, "megatron-lm")).keys()
    said = read_by_megatron("0.19", export(layout, LLAMA, CORE, "megatron-lm")).keys()
    assert overlaps - said == {"--tp-comm-overlap"}
    staged = parse_layout("dp4,pp2,sp,zero1,bf16")
    assert overlaps & read_by_megatron("0.19", export(staged, LLAMA, CORE, "megatron-lm")).keys() == {
        "--overlap-grad-reduce"
    }
    assert not overlaps & read_by_megatron("0.19", export(layout, LLAMA, MEGATRON, "megatron-lm")).keys()
    summed = read_by_megatron("0.19", export(parse_layout("dp8,bf16"), LLAMA, CORE, "megatron-lm"))
    assert overlaps & summed.keys() == {"--overlap-grad-reduce"}
    alone = read_by_megatron("0.19", export(parse_layout("dp1,cp8,bf16"), LLAMA, CORE, "megatron-lm"))
    assert overlaps & alone.keys() == {"--overlap-grad-reduce"}


OFFLOADS = {
    ("dp8,mbs1,zero1,offload-optimizer,bf16", "0.15"): {
        "--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d", "--use-precision-aware-optimizer",
        "--use-distributed-optimizer",
    },
    ("dp8,mbs1,zero1,offload-activations,bf16", "0.19"): {"--cpu-offloading-num-layers"},
}  # fmt: skip


@pytest.mark.parametrize(("text", "version"), OFFLOADS)
def test_megatron_has_the_options_of_what_lies_on_the_host(text: str, version: str) -> None:
    said = read_by_megatron(version, export(parse_layout(text), LLAMA, CORE, "megatron-lm", version))
    assert OFFLOADS[text, version] <= said.keys()
    assert said.get("--cpu-offloading-num-layers", 31) == 31


@pytest.mark.parametrize("version", ["0.15", "0.19"])
def test_megatron_has_the_options_of_what_hides_exchanges(version: str) -> None:
    deepseek = workload_of("deepseek-v3", 4096)
    text = "dp16,pp8,vpp4,ep16,etp1,mbs1,zero1,bf16,overlap-{}"
    wanted = {
        "batch": {"--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"},
        "shared": {"--moe-shared-expert-overlap"},
    }
    for word, options in wanted.items():
        written = export(parse_layout(text.format(word)), deepseek, CORE, "megatron-lm", version)
        assert options <= read_by_megatron(version, written).keys()


def test_deepspeed_is_told_what_lies_on_the_host() -> None:
    stack = load_stack("deepspeed")
    states, weights = (
        json.loads(export(parse_layout(text), LLAMA, stack, "deepspeed"))["zero_optimization"]
        for text in ("dp8,mbs1,zero2,offload-optimizer,bf16", "dp8,mbs1,fsdp,offload-weights,bf16")
    )
    assert states["offload_optimizer"]["device"] == "cpu" and "offload_param" not in states
    assert weights["offload_optimizer"]["device"] == weights["offload_param"]["device"] == "cpu"


def test_megatron_stretches_rotary_angles_in_one_way_alone() -> None:
    said = read_by_megatron(
        "0.19", export(parse_layout("dp8,bf16"), workload_of("llama3.1-8b", 256), CORE, "megatron-lm")
    )
    assert said["--use-rope-scaling"] and said["--rope-scaling-factor"] == 8.0
    model = LLAMA.model.model_copy(
        update={"rotary_scaling": workload_of("llama3.1-8b", 256).model.rotary_scaling.model_copy(
            update={"original_max_positions": 4096}
        )}
    )  # fmt: skip
    with pytest.raises(TrimaranError, match="original_max_positions 8192"):
        export(parse_layout("dp8,bf16"), LLAMA.model_copy(update={"model": model}), CORE, "megatron-lm")


def test_a_megatron_option_that_its_source_lacks_fails_here() -> None:
    with pytest.raises(AssertionError, match="no-such"):
        read_by_megatron("0.19", "--bf16 \\\n--no-such-option 3")


DEEPSEEK, QWEN = workload_of("deepseek-v3", 256), workload_of("qwen3-30b-a3b", 256)
LITE = workload_of("deepseek-v2-lite", 256, seq=4096)


@pytest.mark.parametrize("version", ["0.15", "0.19"])
def test_megatron_is_told_of_experts_latent_attention_and_their_axes(version: str) -> None:
    layout = parse_layout("dp32,tp2,cp2,cp-ulysses,pp2,ep16,etp1,dispatch-deepep,mbs1,zero1,shard8,sp,bf16,split31-30")
    said = read_by_megatron(version, export(layout, DEEPSEEK, CORE, "megatron-lm", version))
    assert (said["--num-experts"], said["--moe-router-topk"], said["--moe-ffn-hidden-size"]) == (256, 8, 2048)
    assert (said["--moe-shared-expert-intermediate-size"], said["--moe-layer-freq"]) == (2048, "([0]*3+[1]*58)")
    assert (said["--moe-router-num-groups"], said["--moe-router-group-topk"]) == (8, 4)
    latent = ("--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim")
    assert [said[flag] for flag in latent] == [1536, 512, 128, 64, 128]
    assert said["--multi-latent-attention"] and said["--qk-layernorm"] and said["--moe-grouped-gemm"]
    assert (said["--context-parallel-size"], said["--cp-comm-type"]) == (2, ["a2a"])
    assert (said["--expert-model-parallel-size"], said["--expert-tensor-parallel-size"]) == (16, 1)
    assert said["--num-distributed-optimizer-instances"] == 4
    assert said["--moe-token-dispatcher-type"] == "flex"
    if version == "0.15":
        assert said["--moe-enable-deepep"] is True
        with pytest.raises(TrimaranError, match=r"dispatcher hybridep in core 0\.15"):
            export(layout.model_copy(update={"dispatcher": "hybridep"}), DEEPSEEK, CORE, "megatron-lm", version)
    else:
        assert said["--moe-flex-dispatcher-backend"] == "deepep"


@pytest.mark.parametrize("version", ["0.2", "0.3"])
def test_torchtitan_is_told_of_shards_parts_of_sequences_and_experts(version: str) -> None:
    layout = parse_layout("dp8,shard4,tp2,cp2,cp-all_gather,ep8,etp1,dispatch-deepep,mbs1,fsdp,sp,bf16")
    (read,) = read_by_torchtitan(version, [(48, export(layout, QWEN, TITAN, "torchtitan", version))])
    degrees = read["parallelism"]
    assert (degrees["data_parallel_replicate_degree"], degrees["data_parallel_shard_degree"]) == (2, 4)
    assert (degrees["context_parallel_degree"], degrees["expert_parallel_degree"]) == (2, 8)
    if version == "0.2":
        assert degrees["context_parallel_rotate_method"] == "allgather"
        assert (degrees["expert_tensor_parallel_degree"], degrees["expert_parallel_comm_backend"]) == (1, "deepep")
    else:
        assert (read["model_spec"]["flavor"], read["model_spec"]["moe_comm_backend"]) == ("30B-A3B", "deepep")
    ring = layout.model_copy(update={"cp_kind": "ring"})
    if version == "0.3":
        with pytest.raises(TrimaranError, match="CP by ring"):
            export(ring, QWEN, TITAN, "torchtitan", version)
        with pytest.raises(TrimaranError, match="ETP 2"):
            export(layout.model_copy(update={"etp": 2}), QWEN, TITAN, "torchtitan", version)
    for kind, what in (("ulysses", "CP by ulysses"),):
        with pytest.raises(TrimaranError, match=what):
            export(layout.model_copy(update={"cp_kind": kind}), QWEN, TITAN, "torchtitan", version)


@pytest.mark.proof
def test_torchtitan_is_told_of_folded_schedules_by_pytorchs_names() -> None:
    texts = [f"dp4,pp4,{word},mbs1,fsdp,bf16" for word in FOLDED]
    files = [(32, export(parse_layout(text), LLAMA, TITAN, "torchtitan")) for text in texts]
    for text, read in zip(texts, read_by_torchtitan("0.3", files), strict=True):
        schedule = get_schedule_class(read["parallelism"]["pipeline_parallel_schedule"])
        assert schedule is {"zbv": ScheduleZBVZeroBubble, "dualpipev": ScheduleDualPipeV}[parse_layout(text).schedule]
        assert len(read["stages"]) == 8
    with pytest.raises(TrimaranError, match="precision mxfp8, which is compiled, under the zbv schedule"):
        export(parse_layout("dp4,pp4,zbv,mbs1,fsdp,mxfp8"), LLAMA, TITAN, "torchtitan")
    for trainer, stack in (("megatron-lm", CORE), ("megatron-deepspeed", load_stack("megatron-deepspeed"))):
        with pytest.raises(TrimaranError, match="the dualpipev schedule"):
            export(parse_layout("dp4,pp4,dualpipev,mbs1,bf16"), LLAMA, stack, trainer)


def test_dualpipev_hides_exchanges_where_torchtitan_is_told_so() -> None:
    layout = parse_layout("dp8,pp4,ep8,etp1,dualpipev,overlap-batch,mbs1,fsdp,bf16")
    apart = layout.model_copy(update={"ep_overlap": "none"})
    files = [(27, export(one, LITE, TITAN, "torchtitan", "0.2")) for one in (layout, apart)]
    said = [read["parallelism"] for read in read_by_torchtitan("0.2", files)]
    assert [one["pipeline_parallel_expert_parallel_overlap"] for one in said] == [True, False]
    with pytest.raises(TrimaranError, match=r"ep_overlap batch \(0\.2 has"):
        export(layout, QWEN, TITAN, "torchtitan", "0.3")


def test_deepspeed_is_told_of_shards_among_a_part_and_of_ulysses() -> None:
    stack = load_stack("deepspeed")
    layout = parse_layout("dp16,shard8,cp2,cp-ulysses,mbs2,fsdp,bf16")
    older = json.loads(export(layout, LLAMA, stack, "deepspeed", "0.18"))
    assert older["sequence_parallel_size"] == 2 and older["zero_optimization"]["mics_shard_size"] == 8
    # 0.19's own parser refuses that setting
    with pytest.raises(TrimaranError, match=r"shard 8 \(0\.18 has MiCS"):
        export(layout, LLAMA, stack, "deepspeed")
    whole = layout.model_copy(update={"shard": 0})
    (said,) = read_by_deepspeed([(16, export(whole, LLAMA, stack, "deepspeed"))])
    assert said["train_batch_size"] == 256 and said["accumulation"] == 8
    with pytest.raises(TrimaranError, match="CP by ring"):
        export(layout.model_copy(update={"cp_kind": "ring"}), LLAMA, stack, "deepspeed")
    with pytest.raises(TrimaranError, match="experts, which are laid out where the model is made"):
        export(parse_layout("dp16,mbs2,fsdp,bf16"), QWEN, stack, "deepspeed")


@pytest.mark.parametrize("version", ["0.2", "0.3"])
def test_the_flavors_of_torchtitan_are_those_of_its_source(version: str) -> None:
    """Names that an export writes: flavors of its models, and functions of the registries that 0.3 has."""
    folder = INSTALLED / f"torchtitan-{version}" / "torchtitan" / "models"
    if not folder.exists():
        pytest.skip(f"torchtitan-{version} is not in .parsers: make parsers")
    for flavor in FLAVORS:
        has = f'    "{flavor.size}": ' in (folder / flavor.name / "__init__.py").read_text()
        assert has == (version == "0.3" or flavor not in SINCE_0_3)
        if version == "0.3":
            registry = (folder / flavor.name / "config_registry.py").read_text()
            assert (f"def {flavor.function}()" in registry) == (flavor in CONFIGURED)


@pytest.mark.parametrize("version", ["0.2", "0.3"])
def test_torchtitan_trains_the_model_that_was_planned(version: str, tmp_path: Path) -> None:
    """0.2 trains a toy of six layers where no flavor is named (job_config.py, Model.flavor)."""
    file = tmp_path / ("job.toml" if version == "0.2" else "planned.py")
    for name in ("llama3.1-8b", "qwen3-0.6b", "qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b"):
        workload = workload_of(name, 64, seq=4096)
        file.write_text(export(parse_layout("dp8,mbs1,fsdp,bf16"), workload, TITAN, "torchtitan", version))
        assert cost_of(file, "auto", Given("dgx-h100", devices=8)).case.model == TITAN.trained(workload.model)
    text = export(parse_layout("dp8,mbs2,fsdp,fp8"), LLAMA, TITAN, "torchtitan", "0.2")
    (read,) = read_by_torchtitan("0.2", [(32, text)])
    assert (read["model"]["name"], read["model"]["flavor"]) == ("llama3", "8B")
    assert read["model"]["converters"] == ["quantize.linear.float8"]
    strange = export(parse_layout("dp8,mbs1,fsdp"), workload_of("gpt3-1b3", 256), TITAN, "torchtitan", "0.2")
    assert "# It has no flavor of 24 layers of width 2048" in strange
