"""Configurations of nanotron, accelerate, Primus and torchtitan's registry are layouts; others are told of.

Shapes of the files are those of the projects' own examples.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from trimaran.nouns.noun import TrimaranError
from trimaran.planner.configs.cost import ConfigCost, cost_of
from trimaran.planner.configs.resolve import Given

# huggingface/nanotron 2411b02, examples/config_tiny_llama.yaml, as far as a step feels it.
NANOTRON: dict[str, Any] = {
    "model": {
        "dtype": "bfloat16",
        "model_config": {
            "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11008, "is_llama_config": True,
            "max_position_embeddings": 4096, "num_attention_heads": 16, "num_hidden_layers": 28,
            "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "vocab_size": 128256,
            "rope_scaling": None,
        },
    },
    "optimizer": {
        "accumulate_grad_in_fp32": True, "optimizer_factory": {"name": "adamW"}, "zero_stage": 1,
    },
    "parallelism": {
        "dp": 4, "pp": 2, "tp": 2, "pp_engine": "1f1b", "tp_mode": "REDUCE_SCATTER", "expert_parallel_size": 1,
    },
    "tokens": {"batch_accumulation_per_replica": 4, "micro_batch_size": 3, "sequence_length": 4096},
}  # fmt: skip
# accelerate's examples/config_yaml_templates/fsdp.yaml and examples/torch_native_parallelism/configs/tp_hsdp.yaml.
FSDP: dict[str, Any] = {
    "distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 16, "num_machines": 2,
    "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": False},
}  # fmt: skip

# AMD-AGI/Primus fd1eeab, examples/megatron/configs/MI355X/qwen3_30B_A3B-BF16-pretrain.yaml and
# examples/torchtitan/configs/MI300X/llama3.1_405B-FP8-pretrain.yaml, as far as a step feels them.
PRIMUS: dict[str, Any] = {
    "exp_name": "${PRIMUS_EXP_NAME:qwen3}",
    "modules": {"pre_trainer": {
        "framework": "megatron", "config": "pre_trainer.yaml", "model": "${PRIMUS_MODEL:qwen3_30B_A3B}.yaml",
        "overrides": {
            "stderr_sink_level": "DEBUG", "micro_batch_size": 8, "global_batch_size": 1024,
            "seq_length": "${PRIMUS_SEQ_LENGTH:4096}", "tensor_model_parallel_size": "${PRIMUS_TP:1}",
            "expert_model_parallel_size": "${PRIMUS_EP:8}", "recompute_granularity": "full",
            "recompute_method": "block", "recompute_num_layers": 5, "enable_primus_turbo": True,
            "use_turbo_deepep": True, "train_data_path": "${PRIMUS_TOKENIZED_DATA_PATH:null}",
        },
    }},
}  # fmt: skip
PRIMUS_TITAN: dict[str, Any] = {
    "modules": {"pre_trainer": {
        "framework": "torchtitan", "config": "pre_trainer.yaml", "model": "llama3.1_405B-fp8.yaml",
        "overrides": {
            "training": {"local_batch_size": 2}, "activation_checkpoint": {"mode": "full"},
            "primus_turbo": {"enable_primus_turbo": True},
        },
    }},
}  # fmt: skip


def price(tmp_path: Path, document: dict[str, Any], given: Given, name: str = "config.yaml") -> tuple[ConfigCost, str]:
    (tmp_path / name).write_text(yaml.safe_dump(document) if name.endswith("yaml") else json.dumps(document))
    cost = cost_of(tmp_path / name, "auto", given)
    return cost, "\n".join(f"{kind}: {sentence}" for kind, sentence in cost.remarks)


def changed(document: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(document))
    inner = copy
    *sections, name = path.split(".")
    for section in sections:
        inner = inner[section]
    inner[name] = value
    return copy


def test_nanotron_is_a_layout_of_its_model(tmp_path: Path) -> None:
    cost, _ = price(tmp_path, NANOTRON, Given("dgx-h100", stack="megatron-core"))
    assert str(cost.layout) == "dp4,tp2,pp2,mbs3,zero1,sp,bf16"
    model, workload = cost.case.model, cost.case.workload
    assert (model.layers, model.kv_heads, model.mlp, model.tied_embedding) == (28, 2, "swiglu", True)
    assert (workload.seq_len, workload.global_batch, cost.devices) == (4096, 3 * 4 * 4, 16)


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        ("parallelism.pp_engine", "afab", "gpipe"),
        ("parallelism.pp_engine", None, "gpipe"),
        ("parallelism.recompute_layer", True, "recompute-full"),
        ("parallelism.context_parallel_size", 2, "cp2,cp-all_gather"),
        ("optimizer.accumulate_grad_in_fp32", False, "bf16_pure"),
        ("model.dtype", "float16", "fp16"),
        ("model.dtype", None, ",bf16"),  # config.py, ModelArgs.__post_init__
        ("optimizer.zero_stage", 0, "mbs3,sp"),
        ("parallelism.tp_mode", "ALL_REDUCE", "zero1,bf16"),
    ],
)
def test_nanotrons_settings_are_words_of_the_layout(tmp_path: Path, path: str, value: object, word: str) -> None:
    cost, _ = price(tmp_path, changed(NANOTRON, path, value), Given("dgx-h100", stack="megatron-core"))
    assert word in str(cost.layout)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("parallelism.tp", 0, "tp is '0', expected a whole number from 1 on"),
        ("model.dtype", "int8", "dtype is 'int8': of it only bfloat16"),
        ("model.model_config.moe_config", {"num_experts": 8}, "only dense models are read"),
        ("model.model_config.hidden_size", "wide", "hidden_size is 'wide'"),
        ("model.model_config.num_attention_heads", 3, "hidden 2048 is not a multiple of heads 3"),
        ("tokens.micro_batch_size", None, "does not state the micro-batch (--set mbs=N)"),
    ],
)
def test_what_nanotron_states_wrongly_ends_in_one_line(tmp_path: Path, path: str, value: object, says: str) -> None:
    with pytest.raises(TrimaranError) as refused:
        price(tmp_path, changed(NANOTRON, path, value), Given("dgx-h100", stack="megatron-core"))
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_nanotron_has_no_stack_here_which_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        TrimaranError, match=r"is nanotron's, of dp 4, tp 2, pp 2, mbs 3: no stack here is that software"
    ):
        price(tmp_path, NANOTRON, Given("dgx-h100"))


SCRIPT = Given("dgx-h100", model="llama3-8b", global_batch=64, seq_len=2048, mbs=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "dp16,tp1,pp1,mbs1,zero3,fsdp,bf16"),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, "dp16,tp1,pp1,mbs1,zero2,bf16"),
        ({"fsdp_sharding_strategy": 3}, "dp16,tp1,pp1,mbs1,bf16"),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, "dp16,shard8,tp1,pp1,mbs1,zero3,fsdp,bf16"),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": False}, "dp16,tp1,pp1,mbs1,zero2,bf16"),
        ({"fsdp_version": 2, "fsdp_activation_checkpointing": True}, "zero3,fsdp,recompute-full,bf16"),
        ({"fsdp_offload_params": True}, "offload-weights"),
    ],
)
def test_what_accelerate_shards_is_a_layout(tmp_path: Path, change: dict[str, object], words: str) -> None:
    document = {**FSDP, "fsdp_config": FSDP["fsdp_config"] | change}
    cost, remarks = price(tmp_path, document, SCRIPT)
    assert words in str(cost.layout) and cost.case.stack.name == "torch-fsdp"
    assert "those of the script that accelerate starts" in remarks and "Composer's models" in remarks


def test_accelerates_other_kinds_and_degrees(tmp_path: Path) -> None:
    alone, _ = price(tmp_path, {"distributed_type": "MULTI_GPU", "num_processes": 8, "mixed_precision": "fp16"}, SCRIPT)
    assert str(alone.layout) == "dp8,tp1,pp1,mbs1,fp16"
    degrees: dict[str, Any] = {
        "parallelism_config": {f"parallelism_config_{axis}_size": 2 for axis in ("tp", "cp", "dp_replicate")}
    }
    cost, _ = price(tmp_path, FSDP | degrees, SCRIPT)
    assert str(cost.layout).startswith("dp4,shard2,tp2,cp2,cp-all_gather,pp1,mbs1,zero3")
    degrees["parallelism_config"]["parallelism_config_cp_comm_strategy"] = "alltoall"
    assert price(tmp_path, FSDP | degrees, SCRIPT)[0].layout.cp_kind == "ring"
    zero = {"zero_stage": 3, "gradient_accumulation_steps": 2, "offload_optimizer_device": "cpu"}
    deepspeed = {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "bf16",
        "num_processes": 8,
        "deepspeed_config": zero,
    }
    cost, _ = price(tmp_path, deepspeed, SCRIPT)
    assert str(cost.layout) == "dp8,tp1,pp1,mbs1,zero3,fsdp,offload-optimizer,bf16"
    assert cost.case.stack.name == "deepspeed"
    # what shares out a sequence is DeepSpeed's Ulysses, by its word in accelerate 1.11 and by that of later ones
    for shared in ({"cp_size": 2, "cp_backend": "deepspeed"}, {"sp_size": 2, "dp_replicate_size": 4}):
        sizes = {f"parallelism_config_{name}": value for name, value in shared.items()}
        cost, _ = price(tmp_path, deepspeed | {"parallelism_config": sizes}, SCRIPT)
        assert str(cost.layout) == "dp4,tp1,cp2,cp-ulysses,pp1,mbs1,zero3,fsdp,offload-optimizer,bf16"


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (FSDP, "does not state the model's layers, hidden, heads, vocab (model, sequences and batches are those of"),
        (
            FSDP | {"parallelism_config": {"parallelism_config_cp_size": 2, "parallelism_config_sp_size": 4}},
            "cp_size is 2 and sp_size 4, but a sequence is shared out in one way: set one to 1",
        ),
        (FSDP | {"distributed_type": "TPU"}, "distributed_type is 'TPU': of it only FSDP, DEEPSPEED"),
        (FSDP | {"fsdp_config": {"fsdp_sharding_strategy": "SOME"}}, "fsdp_sharding_strategy is 'SOME': it is one of"),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "zero1.json"}},
            "deepspeed_config_file is 'zero1.json', which says what is trained: give that file",
        ),
        (
            {"base_model": "Qwen/Qwen3-8B", "micro_batch_size": 1, "sequence_len": 8192, "bf16": True,
             "gradient_accumulation_steps": 1, "tensor_parallel_size": 2},
            "is axolotl's, which is read for no cost; it states base_model 'Qwen/Qwen3-8B', sequence_len 8192, micro",
        ),
        (
            {"model_name_or_path": "Qwen/Qwen3-4B", "finetuning_type": "full", "per_device_train_batch_size": 1,
             "gradient_accumulation_steps": 2, "bf16": True, "deepspeed": "ds_z3_config.json"},
            "is LLaMA-Factory's, which is read for no cost",
        ),
        (
            {"model": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"}, "batch_size": 2,
             "gradient_accumulation_steps": 1},
            "is torchtune's, which is read for no cost; it states model._component_ 'torchtune.models.llama3_1",
        ),
        (
            {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 32000},
            "is a model's and states no training: give it by --model",
        ),
        ({"model": {"d_model": 4096, "n_layers": 32, "n_heads": 32}}, "is OLMo-core's, which is read for no cost"),
        (
            {"model": {"name": "mpt_causal_lm", "d_model": 4096, "n_layers": 32, "n_heads": 32}, "max_seq_len": 2048,
             "global_train_batch_size": 1024, "device_train_microbatch_size": 16},
            "is LLM Foundry's, which is read for no cost; it states model.name 'mpt_causal_lm'",
        ),
        (
            {"actor_rollout_ref": {"actor": {"strategy": "megatron", "megatron": {"tensor_model_parallel_size": 2}},
             "rollout": {"tensor_model_parallel_size": 4}}, "trainer": {"nnodes": 1}},
            "megatron.tensor_model_parallel_size 2, trainer.nnodes 1: ask for its layout by trimaran plan --model "
            "config.json --cluster C --gbs N --stack megatron-core",
        ),
        (
            {"grpo": {"num_prompts_per_step": 32}, "policy": {"model_name": "meta-llama/Llama-3.1-8B-Instruct",
             "train_global_batch_size": 512, "megatron_cfg": {"pipeline_model_parallel_size": 2}}},
            "is NeMo RL's, which is read for no cost; it states policy.model_name 'meta-llama/Llama-3.1-8B-Instruct'",
        ),
        (
            {"model": {"peft": {"peft_scheme": "lora"}, "micro_batch_size": 4}},
            "trains adapters alone, model.peft 'lora': no cost is known of that; leave model.peft out",
        ),
        (
            {"model": {"num_layers": 32}, "peft": {"_target_": "megatron.bridge.peft.lora.LoRA", "dim": 32}},
            "trains adapters alone, peft 'megatron.bridge.peft.lora.LoRA'",
        ),
    ],
)  # fmt: skip
def test_other_trainers_files_are_told_with_what_they_state(
    tmp_path: Path, document: dict[str, Any], says: str
) -> None:
    with pytest.raises(TrimaranError) as refused:
        price(tmp_path, document, Given("dgx-h100"))
    assert says in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "from megatron.bridge.recipes.llama import llama3",
            "a program of Megatron-Bridge, which is not run: give the",
        ),
        ("import nemo_run as run", "a program of NeMo 2"),
        ("from olmo_core.config import DType", "a program of OLMo-core"),
        ("from transformers import Trainer", "a program of Hugging Face"),
    ],
)
def test_programs_of_others_are_not_run(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "train.py").write_text(f"{line}\n\ndef main():\n    pass\n")
    with pytest.raises(TrimaranError, match=says):
        cost_of(tmp_path / "train.py", "auto", Given("dgx-h100"))


def test_an_experiment_of_primus_is_a_layout_of_the_model_that_it_names(tmp_path: Path) -> None:
    """Its variables were `not set`, its precision fp32, its model unknown; and of one that is named EP was dropped."""
    cost, said = price(tmp_path, PRIMUS, Given("mi355x-8x-node", devices=64))
    # 5 of 48 layers are made again: one in 10
    assert str(cost.layout) == "dp64,tp1,pp1,ep8,dispatch-deepep,mbs8,zero1,recompute-full10,bf16"
    assert (cost.case.model.name, cost.case.workload.seq_len) == ("qwen3-30b-a3b", 4096)
    assert "PRIMUS_EP 8" in said and "not read" not in said
    titan, _ = price(tmp_path, PRIMUS_TITAN, Given("mi300x-8x-node", devices=64))
    assert str(titan.layout) == "dp64,tp1,pp1,mbs2,zero3,fsdp,recompute-full,fp8"
    assert (titan.case.model.name, titan.case.stack.name) == ("llama3.1-405b", "torchtitan-0.2-compiled")
    other = changed(PRIMUS, "modules.pre_trainer.framework", "maxtext")
    with pytest.raises(TrimaranError, match="framework is 'maxtext': of Primus megatron and torchtitan"):
        price(tmp_path, other, Given("mi300x-8x-node"))


@pytest.mark.parametrize(
    ("layers", "word", "noted"),
    [
        (0, "zero1,bf16", ""),
        (48, "zero1,recompute-full,bf16", ""),
        (30, "zero1,recompute-full2,bf16", "30 of a stage's 48 layers is counted as one in 2, 24 of them"),
        (16, "zero1,recompute-full3,bf16", ""),
    ],
)
def test_any_number_of_a_stages_layers_may_be_made_again(tmp_path: Path, layers: int, word: str, noted: str) -> None:
    """As recipes for large memories have it, all but halves and quarters of which were refused."""
    stated = changed(PRIMUS, "modules.pre_trainer.overrides.recompute_num_layers", layers)
    cost, said = price(tmp_path, stated, Given("mi355x-8x-node", devices=64))
    assert str(cost.layout).endswith(word)
    assert noted in said and ("is counted as one in" in said) == bool(noted)


def test_a_function_of_torchtitans_registry_says_model_recompute_loss_and_converters(tmp_path: Path) -> None:
    """As models/llama3/config_registry.py has them at b5bcd76: it needed --model, and had the logits of all tokens."""
    source = """
from . import model_registry

def llama3_70b():
    model_spec = model_registry("70B", converters=[NVFP4LinearConverter.Config(fqns=["layers"])])
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()),
        model_spec=model_spec,
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=8 * 8192, max_context_length=8192),
        parallelism=ParallelismConfig(tensor_parallel_degree=8),
    )
"""
    file = tmp_path / "config_registry.py"
    answers = []
    for text in (source, source.replace("loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config())", "")):
        file.write_text(text.replace("        ,\n", ""))
        answers.append(cost_of(file, "auto", Given("dgx-h100", devices=64)))
    chunked, whole = answers
    assert chunked.case.model.name == "llama3.1-70b"
    # trainer.py, line 108: SelectiveAC where nothing is stated, which is by operator
    assert str(chunked.layout) == "dp8,tp8,pp1,mbs8,zero3,fsdp,sp,recompute-selective,bf16"
    assert chunked.estimate.memory[0].logits < whole.estimate.memory[0].logits / 3
    assert ("not read", "quantize.NVFP4LinearConverter") in chunked.remarks


def test_a_pipeline_of_torchtitan_that_fills_more_than_once_an_iteration_is_told(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    text = "[training]\nlocal_batch_size = 8\nglobal_batch_size = {}\n[parallelism]\npipeline_parallel_degree = {}\n"
    given = Given("dgx-h100", model="llama3-8b", devices=16)
    for batch, pp, told in ((256, 4, "fills and drains 8 times an iteration"), (32, 4, None), (256, 1, None)):
        file.write_text(text.format(batch, pp))
        remarks = "\n".join(sentence for _, sentence in cost_of(file, "auto", given).remarks)
        assert (told in remarks) if told else "fills and drains" not in remarks


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("converters = 8", "converter '8' cannot be said here"),
        ("converters = [['mx']]", "converter \"['mx']\" cannot be said here"),
        ("converters = ['float8']\n[float8]\nrecipe_name = ['rowwise']", "recipe_name is \"['rowwise']\": only"),
    ],
)
def test_a_setting_of_torchtitan_that_is_of_another_kind_ends_in_a_line(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "job.toml").write_text(f"[model]\n{line}\n")
    with pytest.raises(TrimaranError, match=re.escape(says)):
        cost_of(tmp_path / "job.toml", "auto", Given("dgx-h100", model="llama3-8b", devices=8))


@pytest.mark.parametrize(
    "settings", [{"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, {"dynamo_backend": "INDUCTOR"}]
)
def test_what_accelerate_compiles_is_told(tmp_path: Path, settings: dict[str, Any]) -> None:
    given = Given("dgx-h100", model="llama3-8b", global_batch=64, seq_len=2048, mbs=1)
    _, remarks = price(tmp_path, FSDP | settings, given)
    assert "not counted: dynamo_backend INDUCTOR: layers are counted as not compiled" in remarks
    usual: list[dict[str, Any]] = [{}, {"dynamo_config": {}}, {"dynamo_backend": "NO"}]
    for plain in usual:
        assert "dynamo" not in price(tmp_path, FSDP | plain, given)[1]
