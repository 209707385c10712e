"""An exported layout says the same to another trainer, or is refused with what cannot be said."""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from trimaran.api import plan, workload_of
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.files.hugging_face_config import model_from_config
from trimaran.layout.notation import parse_layout
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.workload import Workload
from trimaran.planner.configs.cost import cost_of
from trimaran.planner.configs.resolve import Given
from trimaran.planner.export.exporters import EXPORTERS, export, first_exported

GPT = workload_of("gpt3-1b3", 512, ramp_up=(32, 32, 1_000_000))
PLAIN = workload_of("gpt3-1b3", 512)
LLAMA = workload_of("llama3-8b", 256)
MEGATRON = load_stack("megatron")
CORE = load_stack("megatron-core")


def flags(text: str) -> dict[str, list[str]]:
    """Flags with their values, as a parser of arguments meets them."""
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            assert word not in found, f"{word} twice"
            found[word] = []
        else:
            found[list(found)[-1]].append(word)
    return found


def toml(text: str) -> dict[str, Any]:
    """The configuration of torchtitan 0.2."""
    return tomllib.loads(text)


def test_megatron_lm_gets_every_choice() -> None:
    layout = parse_layout("dp4,tp4,pp4,vpp3,mbs2,zero1,sp,recompute-selective,bf16,place-tp-pp-dp")
    said = flags(export(layout, GPT, MEGATRON, "megatron-lm"))
    assert said["--tensor-model-parallel-size"] == ["4"]
    assert said["--pipeline-model-parallel-size"] == ["4"]
    assert said["--num-layers-per-virtual-pipeline-stage"] == ["2"]
    assert (said["--micro-batch-size"], said["--global-batch-size"]) == (["2"], ["512"])
    assert said["--rampup-batch-size"] == ["32", "32", "1000000"]
    assert said["--recompute-granularity"] == ["selective"]
    for switch in ("--sequence-parallel", "--use-distributed-optimizer", "--use-tp-pp-dp-mapping", "--bf16"):
        assert said[switch] == []


def test_bloom_as_trained_partitions_by_embedding_and_layers() -> None:
    bloom = workload_of("bloom-176b", 2048)
    said = export(parse_layout("dp8,tp4,pp12,mbs2,zero1,recompute-full,bf16"), bloom, load_stack("megatron-deepspeed"),
                  "megatron-deepspeed")  # fmt: skip
    assert "--pp-partition-method 'type:transformer|embedding'" in said


def test_megatron_lm_gets_the_kind_of_model() -> None:
    said = flags(export(parse_layout("dp8,tp4,bf16"), LLAMA, MEGATRON, "megatron-lm"))
    assert said["--num-query-groups"] == ["8"]
    assert said["--position-embedding-type"] == ["rope"]
    for switch in ("--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"):
        assert switch in said
    uneven = parse_layout("dp8,tp1,pp4,split7-9-9-7,bf16")
    said = flags(export(uneven, LLAMA, load_stack("trimaran"), "megatron-lm"))
    assert (said["--decoder-first-pipeline-num-layers"], said["--decoder-last-pipeline-num-layers"]) == (["7"], ["7"])


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_megatron_lm_gets_the_gate_of_gpt_oss(name: str) -> None:
    """As examples/gptoss/02_train.sh and examples/post_training/modelopt/conf/openai state it."""
    said = flags(export(parse_layout("dp8,ep8,mbs1,bf16"), workload_of(name, 64), CORE, "megatron-lm"))
    assert "--swiglu" not in said and "--quick-geglu" in said
    assert (said["--glu-linear-offset"], said["--activation-func-clamp-value"]) == (["1.0"], ["7"])


def test_megatron_lm_gets_and_gives_back_a_squared_relu(tmp_path: Path) -> None:
    """Nemotron's, whose models were refused by every verb, and whose scripts were read as GELU's."""
    config = {
        "model_type": "nemotron", "num_hidden_layers": 32, "hidden_size": 6144, "num_attention_heads": 48,
        "num_key_value_heads": 8, "intermediate_size": 24576, "vocab_size": 256000, "max_position_embeddings": 4096,
    }  # fmt: skip
    model = model_from_config(config, "nemotron")
    wanted = Workload(model=model, seq_len=4096, global_batch=256)
    said = export(parse_layout("dp32,tp2,mbs2,zero1,sp,bf16"), wanted, CORE, "megatron-lm")
    assert "--squared-relu" in said and "--swiglu" not in said
    script = tmp_path / "train.sh"
    script.write_text(said)
    read = cost_of(script, "auto", Given("dgx-h100", devices=64))
    assert (read.case.model.mlp, read.case.model.rotary_share) == ("relu2", 0.5)
    assert read.case.model.unpadded_parameters == model.unpadded_parameters
    plain = wanted.model_copy(update={"model": GPT.model.model_copy(update={"mlp": "relu2"})})
    with pytest.raises(TrimaranError, match=r"no setting for model\.mlp relu2"):
        export(parse_layout("dp8,mbs1,bf16"), plain, load_stack("megatron-deepspeed"), "megatron-deepspeed")


def test_megatron_lm_gets_the_gate_of_shared_experts_where_it_has_one() -> None:
    mixture = workload_of("qwen3-30b-a3b", 64)
    shared = mixture.model.model_copy(update={"shared_experts": 4, "shared_gate": True})
    workload, layout = mixture.model_copy(update={"model": shared}), parse_layout("dp8,ep8,mbs1,bf16")
    assert "--moe-shared-expert-gate" in flags(export(layout, workload, CORE, "megatron-lm"))
    with pytest.raises(TrimaranError, match=r"model\.shared_gate in core 0\.15"):
        export(layout, workload, CORE, "megatron-lm", "0.15")


def test_what_a_model_has_besides_is_written_for_no_trainer() -> None:
    llama = LLAMA.model.model_copy(update={"uncounted": ("residual_multiplier 0.22",)})
    with pytest.raises(TrimaranError, match=r"no setting for model\.uncounted"):
        export(parse_layout("dp8,mbs1,bf16"), LLAMA.model_copy(update={"model": llama}), MEGATRON, "megatron-lm")


def test_megatron_core_is_told_what_its_stack_says() -> None:
    core = load_stack("megatron-core-tp-overlap")
    big = workload_of("llama3-405b", 2048)
    said = flags(export(parse_layout("dp256,tp8,pp8,vpp8,mbs1,zero1,sp,recompute-mlp,bf16"), big, core,
                        "megatron-lm"))  # fmt: skip
    stages = said["--pipeline-model-parallel-layout"][0].strip("'")
    assert (stages[0], stages[-1], stages.count("t"), stages.count("|")) == ("E", "L", 126, 63)
    assert said["--recompute-modules"] == ["mlp"]
    for switch in (
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--tp-comm-overlap",
        "--cross-entropy-loss-fusion",
    ):
        assert said[switch] == []
    assert said["--attention-dropout"] == ["0"] and "--grad-reduce-in-bf16" not in said
    nemo = load_stack("megatron-core-nemo")
    for precision in ("bf16", "fp8"):
        layout = parse_layout(f"dp256,tp8,pp8,vpp8,mbs1,zero1,sp,{precision}")
        assert "--grad-reduce-in-bf16" in flags(export(layout, big, nemo, "megatron-lm")), precision
    said = flags(
        export(parse_layout("dp128,tp8,pp16,vpp2,mbs1,zero1,sp,recompute-full2,bf16"), big, core, "megatron-lm")
    )
    assert (said["--recompute-method"], said["--recompute-num-layers"]) == (["block"], ["2"])
    plain = flags(export(parse_layout("dp2,tp2,mbs2,bf16"), LLAMA, MEGATRON, "megatron-lm"))
    assert not {"--overlap-grad-reduce", "--tp-comm-overlap", "--overlap-param-gather"} & set(plain)


def test_megatron_core_is_told_which_modules_are_graphs() -> None:
    graphs = load_stack("megatron-core-graphs")
    mixture, layout = workload_of("qwen3-235b-a22b", 256), parse_layout("dp32,ep32,mbs1,zero1,bf16")
    said = {
        version: flags(export(layout, mixture, graphs, "megatron-lm", version))
        for version in ("0.15", "0.17", "0.18", "0.19")
    }
    assert all(found["--cuda-graph-impl"] == ["transformer_engine"] for found in said.values())
    assert said["0.19"]["--cuda-graph-modules"] == said["0.18"]["--cuda-graph-modules"] == ["attn", "moe_router"]
    assert said["0.17"]["--cuda-graph-scope"] == ["attn", "moe_router"]
    assert said["0.15"]["--cuda-graph-scope"] == ["attn"]
    # a dense layer is covered whole, which is what no module means
    dense = flags(export(parse_layout("dp8,mbs1,zero1,bf16"), LLAMA, graphs, "megatron-lm"))
    assert dense["--cuda-graph-impl"] == ["transformer_engine"] and not {"--cuda-graph-modules"} & set(dense)
    assert "--cuda-graph-impl" not in flags(export(layout, mixture, load_stack("megatron-core"), "megatron-lm"))


@pytest.mark.parametrize(
    ("precision", "said"),
    [
        ("fp8", {"--bf16": [], "--fp8-format": ["hybrid"], "--fp8-recipe": ["tensorwise"]}),
        ("mxfp8", {"--bf16": [], "--fp8-format": ["e4m3"], "--fp8-recipe": ["mxfp8"]}),
        ("nvfp4", {"--bf16": [], "--fp4-format": ["e2m1"], "--fp4-recipe": ["nvfp4"]}),
    ],
)
def test_narrow_precisions_are_said_where_a_trainer_has_them(precision: str, said: dict[str, list[str]]) -> None:
    layout = parse_layout(f"dp8,mbs2,{precision}")
    assert said.items() <= flags(export(layout, PLAIN, MEGATRON, "megatron-lm")).items()
    for trainer in ("deepspeed", "megatron-deepspeed"):
        with pytest.raises(TrimaranError, match=f"precision {precision}"):
            export(layout, PLAIN, MEGATRON, trainer)


def test_torchtitan_gathers_in_8_bit_where_its_stack_does() -> None:
    layout, stack = parse_layout("dp8,mbs2,zero3,fsdp,fp8"), load_stack("torchtitan")
    config = toml(export(layout, LLAMA, stack, "torchtitan", "0.2"))
    assert config["model"]["converters"] == ["quantize.linear.float8"]
    assert config["quantize"]["linear"]["float8"]["enable_fsdp_float8_all_gather"] is True
    assert config["training"]["mixed_precision_param"] == "bfloat16" and config["compile"]["enable"] is True
    with pytest.raises(TrimaranError, match="fp8 with a scale a tensor"):
        export(layout, LLAMA, stack, "torchtitan", "0.3")


def test_megatron_lm_gets_the_traits_that_it_has_flags_for() -> None:
    layout = parse_layout("dp8,tp4,bf16")
    said = flags(export(layout, workload_of("qwen3-8b", 256), MEGATRON, "megatron-lm"))
    assert said["--qk-layernorm"] == []
    assert "--add-qkv-bias" in flags(export(layout, workload_of("qwen2.5-7b", 256), MEGATRON, "megatron-lm"))
    with pytest.raises(TrimaranError, match=r"no setting for model\.norm_placement both"):
        export(layout, workload_of("gemma2-9b", 256), MEGATRON, "megatron-lm")


def test_deepspeed_batches_multiply_out() -> None:
    config = json.loads(export(parse_layout("dp16,mbs4,zero3,fsdp,fp16"), PLAIN, MEGATRON, "deepspeed"))
    product = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 16
    assert config["train_batch_size"] == product == 512
    assert config["zero_optimization"]["stage"] == 3 and config["fp16"]["enabled"]


def test_torchtitan_degrees_and_micro_batches() -> None:
    text = export(parse_layout("dp8,tp2,pp2,mbs4,sp,fsdp,recompute-full,bf16"), LLAMA, MEGATRON, "torchtitan", "0.2")
    config = toml(text)
    degrees = config["parallelism"]
    assert degrees["data_parallel_replicate_degree"] == 1 and degrees["data_parallel_shard_degree"] == 8
    assert (degrees["tensor_parallel_degree"], degrees["pipeline_parallel_degree"]) == (2, 2)
    assert config["training"]["local_batch_size"] == 256 // 8
    assert degrees["pipeline_parallel_microbatch_size"] == 4
    assert config["activation_checkpoint"]["mode"] == "full"
    kept = parse_layout("dp8,mbs4,bf16").model_copy(update={"recompute_every": 2})
    replicated = toml(export(kept, LLAMA, MEGATRON, "torchtitan", "0.2"))
    assert replicated["activation_checkpoint"] == {"mode": "none"}
    assert replicated["parallelism"]["data_parallel_replicate_degree"] == 8
    assert replicated["training"]["local_batch_size"] == 4


@pytest.mark.parametrize(
    ("to", "layout", "what"),
    [
        ("megatron-lm", "dp2,pp2,gpipe", "gpipe"),
        ("megatron-lm", "dp2,pp2,zero3,fsdp", "ZeRO stage 3 of a pipeline"),
        ("megatron-lm", "dp2,place-dp-tp-pp", "placement"),
        ("megatron-deepspeed", "dp2,tp2,sp", "sequence parallelism"),
        ("megatron-deepspeed", "dp2,pp5", "24 layers on 5 stages"),
        ("megatron-deepspeed", "dp2,recompute-full2", "one layer in 2"),
        ("torchtitan", "dp2,zero1", "ZeRO stage 1"),
        ("torchtitan", "dp2,fsdp,recompute-full2", "one layer in 2"),
        ("torchtitan", "dp2,fp16", "fp16"),
        ("deepspeed", "dp2,tp2", "TP 2"),
        ("deepspeed", "dp2,recompute-full", "full recompute"),
        ("megatron-lm", "dp3", "a global batch of 512"),
        ("nemo", "dp2", "nemo"),
    ],
)
def test_what_a_trainer_cannot_state_is_refused_by_name(to: str, layout: str, what: str) -> None:
    with pytest.raises(TrimaranError, match=what):
        export(parse_layout(layout), PLAIN, MEGATRON, to)


@pytest.mark.parametrize(
    ("model", "stack", "devices", "batch"),
    [("llama3-70b", "torchtitan-0.2-compiled", 512, 512), ("mixtral-8x7b", "torchtitan-0.2", 64, 256)],
)
def test_what_a_plan_for_torchtitan_names_as_best_it_runs(model: str, stack: str, devices: int, batch: int) -> None:
    cluster = load_cluster("dgx-h100")
    best = plan(model, cluster.model_copy(update={"nodes": 64}), batch, devices=devices, stack=stack, top=1).best.layout
    text = export(best, workload_of(model, batch), load_stack(stack), "torchtitan", "0.2")
    assert toml(text)["parallelism"]["tensor_parallel_degree"] == best.tp


@pytest.mark.parametrize(
    ("layout", "what"),
    [
        ("dp2,tp2", "TP without sequence parallelism"),
        ("dp2,tp2,sp", "replicas that are not sharded beside TP or PP"),
        ("dp1,tp2,sp,bf16", "precision bf16 under TP or PP where nothing is sharded"),
        ("dp1,tp2,sp,zero3,fsdp,bf16", "precision bf16 under TP or PP where nothing is sharded"),
    ],
)
def test_what_torchtitan_does_not_do_without_shards_is_refused(layout: str, what: str) -> None:
    with pytest.raises(TrimaranError, match=what):
        export(parse_layout(layout), PLAIN, MEGATRON, "torchtitan", "0.2")
    assert "ParallelismConfig(" in export(parse_layout(layout), PLAIN, MEGATRON, "torchtitan", "0.3")


def test_a_version_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(TrimaranError, match=r"'1\.0' is not known of torchtitan: write one of 0\.3, 0\.2"):
        export(parse_layout("dp2"), PLAIN, MEGATRON, "torchtitan", "1.0")
    with pytest.raises(TrimaranError, match="write without it"):
        export(parse_layout("dp2"), PLAIN, MEGATRON, "megatron-deepspeed", "0.19")


def test_a_stack_of_ones_own_keeps_whose_fsdp_the_one_that_it_extends_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('extends = "megatron-core-torch-fsdp2"\nop_us = 20.0\n')
    said = export(parse_layout("dp8,mbs1,fsdp,bf16"), LLAMA, load_stack(str(tmp_path / "mine.toml")), "megatron-lm")
    assert "--use-torch-fsdp2" in said and "--use-megatron-fsdp" not in said


def test_what_is_written_is_planned_for_software_of_the_catalogue() -> None:
    """Manifests start our own trainer, and a configuration that is read back is of the software it was written for."""
    for exporter in EXPORTERS.values():
        assert (load_stack(exporter.stack).framework == "trimaran") == exporter.starts


def test_the_best_layout_that_can_be_stated_is_exported() -> None:
    layouts = [parse_layout("dp2,pp2,gpipe"), parse_layout("dp2,pp2")]
    chosen = first_exported(layouts, PLAIN, MEGATRON, "megatron-lm")
    assert chosen.layout == layouts[1] and "--pipeline-model-parallel-size 2" in chosen.text
    assert chosen.passed == 1 and "no setting for the gpipe schedule" in chosen.refused


def test_megatron_is_told_of_as_many_positions_as_tokens() -> None:
    """megatron/training/arguments.py, validate_args: max_position_embeddings must not be less than seq_length."""
    longer = workload_of("llama3-8b", 64, seq=32768)
    assert longer.model.max_positions < longer.seq_len
    said = flags(export(parse_layout("dp8,cp4,mbs1,bf16"), longer, CORE, "megatron-lm"))
    assert said["--max-position-embeddings"] == said["--seq-length"] == ["32768"]
    said = flags(export(parse_layout("dp8,mbs1,bf16"), workload_of("llama3-8b", 64, seq=4096), CORE, "megatron-lm"))
    assert (said["--max-position-embeddings"], said["--seq-length"]) == (["8192"], ["4096"])


def test_megatron_gathers_narrow_weights_where_it_shards_them_alone() -> None:
    """megatron/training/arguments.py, validate_args: --fp8-param-gather only with the distributed optimizer or FSDP."""
    for layout, gathers in (("tp8,sp,fp8", False), ("dp8,fp8", False), ("dp8,zero1,fp8", True)):
        said = flags(export(parse_layout(layout), LLAMA, CORE, "megatron-lm"))
        assert ("--fp8-param-gather" in said) == gathers == ("--use-distributed-optimizer" in said)


@pytest.mark.parametrize("to", ["megatron-lm", "megatron-deepspeed", "torchtitan", "deepspeed"])
@pytest.mark.parametrize(
    ("layout", "what"),
    [
        ("dp8,mbs1,compress-int8", "compress-int8"),
        ("dp8,mbs1,local50,fragments5", "local50,fragments5"),
        ("dp8,mbs1,on1-7.0", "the device that each rank stands on"),
    ],
)
def test_what_only_our_trainer_does_is_never_dropped(to: str, layout: str, what: str) -> None:
    with pytest.raises(TrimaranError, match=f"no setting for {what}"):
        export(parse_layout(layout), PLAIN, load_stack("trimaran"), to)
    assert export(parse_layout("dp8,mbs1,on0-7"), PLAIN, MEGATRON, to)


def test_a_ramp_up_and_dropped_tokens_are_refused_where_there_is_no_word_for_them() -> None:
    with pytest.raises(TrimaranError, match="no setting for a batch ramp-up"):
        export(parse_layout("dp8,mbs1,bf16"), GPT, load_stack("deepspeed"), "deepspeed")
    mixture = workload_of("qwen3-30b-a3b", 64).model_copy(update={"capacity_factor": 1.5})
    for version in ("0.3", "0.2"):
        with pytest.raises(TrimaranError, match="no setting for experts that drop tokens"):
            export(parse_layout("dp8,mbs1,fsdp,bf16"), mixture, load_stack("torchtitan"), "torchtitan", version)


def of(workload: Workload, **fields: object) -> Workload:
    """The workload with a model of other `fields`."""
    model = Model.model_validate(workload.model.model_dump() | fields)
    return workload.model_copy(update={"model": model})


def test_megatron_fuses_no_bias_into_a_squared_relu() -> None:
    """megatron/core/transformer/transformer_config.py, __post_init__: only into GELU, SwiGLU and quick GEGLU."""
    squared = of(PLAIN, mlp="relu2")
    assert squared.model.bias
    assert "--no-bias-gelu-fusion" in flags(export(parse_layout("dp8,mbs1,bf16"), squared, CORE, "megatron-lm"))
    for other in (PLAIN, of(squared, bias=False)):
        assert "--no-bias-gelu-fusion" not in flags(export(parse_layout("dp8,bf16"), other, CORE, "megatron-lm"))


def test_what_megatron_asserts_against_is_refused_before() -> None:
    graphs, mixture = load_stack("megatron-core-graphs"), workload_of("qwen3-30b-a3b", 64)
    slow, shared = PLAIN.model_copy(update={"optimizer": "sgd"}), workload_of("deepseek-v3", 64)
    hidden = "dp8,ep8,etp1,dispatch-deepep,overlap-shared,mbs1,bf16"
    for workload, stack, layout, version, what in (
        (slow, CORE, "dp8,mbs1,zero1,bf16", "0.19", "optimizer sgd in ZeRO stage 1"),
        (LLAMA, graphs, "dp8,mbs1,recompute-full,bf16", "0.19", "CUDA graphs of layers that are all made again"),
        (mixture, CORE, "dp8,mbs1,ep8,fp16", "0.15", r"precision fp16 of experts in core 0\.15"),
        (shared, CORE, hidden, "0.17", r"ep_overlap shared beside dispatcher deepep in core 0\.17"),
        (mixture, CORE, "dp8,mbs1,dispatch-deepep,etp1,bf16", "0.19", "dispatcher deepep of EP 1 x ETP 1"),
        (LLAMA, graphs, "dp8,mbs1,offload-activations,bf16", "0.19", "CUDA graphs beside offload activations"),
        (
            mixture,
            graphs,
            "dp8,mbs1,ep8,recompute-layernorm+moe,bf16",
            "0.19",
            "CUDA graphs of a router that is",
        ),
        (of(mixture, top_k=1), CORE, "dp8,mbs1,ep8,bf16", "0.19", "a softmax over one chosen expert"),
        (of(mixture, router={"bias": True}), CORE, "dp8,mbs1,ep8,bf16", "0.19", "a bias of experts beside softmax"),
        (of(shared, bias=True), CORE, "dp8,mbs1,ep8,bf16", "0.19", "biases of shared experts"),
    ):
        with pytest.raises(TrimaranError, match=what):
            export(parse_layout(layout), workload, stack, "megatron-lm", version)
    assert "--optimizer sgd" in export(parse_layout("dp8,mbs1,bf16"), slow, CORE, "megatron-lm")
    assert "--fp16" in export(parse_layout("dp8,mbs1,ep8,fp16"), mixture, CORE, "megatron-lm")
    assert "--moe-shared-expert-overlap" in export(parse_layout(hidden), shared, CORE, "megatron-lm", "0.18")


@pytest.mark.parametrize(("precision", "gathers"), [("fp8", True), ("mxfp8", False)])
def test_megatron_gathers_narrow_weights_beside_an_optimizer_on_the_host_by_delayed_scales_alone(
    precision: str, gathers: bool
) -> None:
    """megatron/training/arguments.py, validate_args: "must be used in conjunction with --fp8-recipe delayed"."""
    said = flags(export(parse_layout(f"dp8,zero1,offload-optimizer,{precision}"), LLAMA, CORE, "megatron-lm"))
    assert ("--fp8-param-gather" in said) == gathers and "--optimizer-cpu-offload" in said
    assert "--fp8-param-gather" in flags(export(parse_layout(f"dp8,zero1,{precision}"), LLAMA, CORE, "megatron-lm"))


def rotary(**fields: object) -> Workload:
    """GPT-3's shape with rotary positions, and other `fields`."""
    return PLAIN.model_copy(update={"model": PLAIN.model.model_copy(update={"positions": "rotary", **fields})})


def test_megatron_deepspeed_of_either_kind_takes_rotary_positions_as_it_parses_them(tmp_path: Path) -> None:
    """BigScience's asserts that no number of positions comes with them, deepspeedai's knows no word for them."""
    old, new = load_stack("megatron-deepspeed"), load_stack("megatron-deepspeed-2025")
    said = export(parse_layout("dp8,mbs1,zero1,bf16"), rotary(), old, "megatron-deepspeed")
    assert "--position-embedding-type rotary" in said and "--max-position-embeddings" not in said
    with pytest.raises(TrimaranError, match=r"no setting for a rotary base of 500000"):
        export(parse_layout("dp8,mbs1,zero1,bf16"), rotary(rotary_theta=500_000.0), old, "megatron-deepspeed")
    longer = rotary(rotary_theta=500_000.0, norm_epsilon=1e-6)
    said = export(parse_layout("dp8,mbs1,zero2,bf16"), longer, new, "megatron-deepspeed")
    for flag in ("--position-embedding-type", "--pad-vocab-size-to", "--embed-layernorm"):
        assert flag not in said
    script = tmp_path / "train.sh"
    script.write_text(said)
    read = cost_of(script, "auto", Given("dgx-h100", devices=8))
    assert str(read.layout) == "dp8,tp1,pp1,mbs1,zero2,bf16"
    model = read.case.model
    assert (model.positions, model.rotary_theta, model.norm_epsilon) == ("rotary", 500_000.0, 1e-6)
    assert model.vocab == longer.model.vocab
    assert [word for kind, word in read.remarks if kind == "not read"] == ["--deepspeed_config"]
    bloom = workload_of("bloom-1b7", 64)
    with pytest.raises(TrimaranError, match="no setting for ALiBi positions in ZeRO stage 2"):
        export(parse_layout("dp8,mbs1,zero2,bf16"), bloom, new, "megatron-deepspeed")


def test_one_stage_of_megatron_deepspeed_goes_without_its_pipelines_where_zero_asks_for_it() -> None:
    """BigScience's megatron/arguments.py at 8387ae1 has no --no-pipeline-parallel and refuses what it does not know."""
    for layout, stack, without in (
        ("dp8,mbs1,zero1,bf16", "megatron-deepspeed", False),
        ("dp8,mbs1,zero2,bf16", "megatron-deepspeed-2025", True),
    ):
        said = export(parse_layout(layout), PLAIN, load_stack(stack), "megatron-deepspeed")
        assert ("--no-pipeline-parallel" in said) == without


@pytest.mark.parametrize(
    ("optimizer", "layout", "allowed"), [("sgd", "dp8,zero1", True), ("sgd", "dp8", None), ("adam", "dp8,zero1", None)]
)
def test_deepspeed_shards_the_states_of_an_optimizer_that_it_does_not_know(
    tmp_path: Path, optimizer: str, layout: str, allowed: bool | None
) -> None:
    workload = PLAIN.model_copy(update={"optimizer": optimizer})
    text = export(parse_layout(f"{layout},mbs1,bf16"), workload, load_stack("deepspeed"), "deepspeed")
    assert json.loads(text).get("zero_allow_untested_optimizer") is allowed
    (tmp_path / "ds.json").write_text(text)
    read = cost_of(tmp_path / "ds.json", "auto", Given("dgx-h100", model="gpt3-1b3", devices=8, seq_len=2048))
    assert "not read" not in [kind for kind, _ in read.remarks]
