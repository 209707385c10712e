"""Configurations that Megatron-Bridge prints give the rows that Megatron-LM's arguments do."""

from __future__ import annotations

from pathlib import Path

import pytest

from test_import_logs import only, read

# As its releases of 2025 print it behind the set-up, shortened; the model takes longer sequences than the data have.
YAML = """done with setup ...
------- Task Configuration -------
_target_: megatron.bridge.training.config.ConfigContainer
comm_overlap: null
dataset:
  _target_: megatron.bridge.training.config.GPTDatasetConfig
  sequence_length: 1024
  split_matrix:
  - - 0
    - 0.3333333333333333
ddp:
  _target_: megatron.bridge.training.config.DistributedDataParallelConfig
  num_distributed_optimizer_instances: 1
  use_distributed_optimizer: true
  use_megatron_fsdp: false
model:
  _target_: megatron.bridge.models.llama.llama_provider.Llama31ModelProvider
  activation_func:
    _call_: false
    _target_: torch.nn.functional.silu
  context_parallel_size: 1
  expert_model_parallel_size: 1
  ffn_hidden_size: 8192
  fp8: null
  fp8_recipe: tensorwise
  gated_linear_unit: true
  generation_config:
    _call_: true
    config_dict:
      num_layers: 3
  hidden_size: 2048
  kv_channels: 64
  moe_router_topk: 2
  num_attention_heads: 32
  num_layers: 16
  num_moe_experts: null
  num_query_groups: 8
  params_dtype:
    _call_: false
    _target_: torch.bfloat16
  pipeline_model_parallel_size: 2
  recompute_granularity: null
  recompute_modules:
  - core_attn
  seq_length: 131072
  tensor_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: null
  vocab_size: 128256
optimizer:
  _target_: megatron.bridge.training.config.OptimizerConfig
  optimizer: adam
  optimizer_cpu_offload: false
  use_distributed_optimizer: true
train:
  _target_: megatron.bridge.training.config.TrainingConfig
  global_batch_size: 512
  micro_batch_size: 1

----------------------------------
Training ...
"""
# As it prints it since February 2026: Megatron-Core's defaults are left out.
SUMMARY = """
======================================================================
Configuration Summary (Non-Default Values vs Megatron Core)
======================================================================

[ddp] Non-default values (vs Mcore DistributedDataParallelConfig):
  overlap_grad_reduce: True  (Mcore default: False)
  use_distributed_optimizer: True  (Mcore default: False)

[model] Non-default values (vs Mcore TransformerConfig):
  cuda_graph_scope: []  (Mcore default: 'full')
  ffn_hidden_size: 8192  (Mcore default: None)
  gated_linear_unit: True  (Mcore default: False)
  hidden_size: 2048  (Mcore default: 0)
  kv_channels: 64  (Mcore default: None)
  num_attention_heads: 32  (Mcore default: 0)
  num_layers: 16  (Mcore default: 0)
  num_query_groups: 8  (Mcore default: None)
  params_dtype: torch.bfloat16  (Mcore default: torch.float32)
  pipeline_model_parallel_size: 2  (Mcore default: 1)
  tensor_model_parallel_size: 2  (Mcore default: 1)

----------------------------------------------------------------------
Other Configuration Values:
----------------------------------------------------------------------

[train]:
  global_batch_size: 512
  micro_batch_size: 1

[dataset]:
  seq_length: 1024

[tokenizer]:
  vocab_size: 128256

======================================================================
"""
STEP = (
    " [2025-10-06 03:27:0{0}] iteration       {0}/      10 | elapsed time per iteration (ms): {1} | "
    "global batch size:   512 | lm loss: 9.{0} |\n"
)
STEPS = STEP.format(1, 9000.0) + STEP.format(2, 4000.0) + STEP.format(3, 4001.0)


@pytest.mark.parametrize("prefix", ["", "0: ", "n1: "])
@pytest.mark.parametrize("printed", [YAML, SUMMARY], ids=["yaml", "summary"])
def test_a_configuration_of_megatron_bridge_states_its_run(tmp_path: Path, printed: str, prefix: str) -> None:
    """Such a log was refused for want of all that it says."""
    text = "".join(f"{prefix}{line}\n" for line in (printed + STEPS).split("\n"))
    row = only(read(tmp_path, text, devices=16))
    assert (row.layers, row.hidden, row.ffn_hidden, row.heads, row.kv_heads) == (16, 2048, 8192, 32, 8)
    assert (row.seq_len, row.vocab, row.mlp, row.head_dim, row.experts) == (1024, 128256, "swiglu", None, None)
    assert (row.dp, row.tp, row.pp, row.cp, row.mbs, row.gbs) == (4, 2, 2, 1, 1, 512)
    assert (row.zero_stage, row.precision, row.recompute, row.optimizer) == (1, "bf16", "none", "adam")
    assert (row.stack, row.step_times_s, row.quality) == ("megatron-core", (9.0, 4.0, 4.001), "ok")


@pytest.mark.parametrize(
    ("printed", "lines"),
    [
        (
            YAML,
            {
                "expert_model_parallel_size: 1": "expert_model_parallel_size: 4\n  expert_tensor_parallel_size: 1",
                "num_moe_experts: null": "num_moe_experts: 8\n  moe_ffn_hidden_size: 768\n"
                "  moe_token_dispatcher_type: alltoall\n  moe_layer_freq:\n  - 0\n  - 1\n  - 1",
                "fp8: null": "fp8: hybrid",
                "recompute_granularity: null": "recompute_granularity: selective",
                "  - core_attn": "  - core_attn\n  - moe_act",
            },
        ),
        (
            SUMMARY,
            {
                "  ffn_hidden_size": "  expert_model_parallel_size: 4  (Mcore default: 1)\n"
                "  expert_tensor_parallel_size: 1  (Mcore default: None)\n"
                "  num_moe_experts: 8  (Mcore default: None)\n  moe_ffn_hidden_size: 768  (Mcore default: None)\n"
                "  moe_token_dispatcher_type: 'alltoall'  (Mcore default: 'allgather')\n"
                "  moe_layer_freq: [0, 1, 1]  (Mcore default: 1)\n  fp8: 'hybrid'  (Mcore default: None)\n"
                "  recompute_granularity: 'selective'  (Mcore default: None)\n"
                "  recompute_modules: ['core_attn', 'moe_act']  (Mcore default: None)\n  ffn_hidden_size",
            },
        ),
    ],
    ids=["yaml", "summary"],
)
def test_experts_of_megatron_bridge_are_stored(tmp_path: Path, printed: str, lines: dict[str, str]) -> None:
    for line, instead in lines.items():
        printed = printed.replace(line, instead, 1)
    row = only(read(tmp_path, printed + STEPS, devices=16))
    assert (row.experts, row.top_k, row.moe_ffn_hidden, row.dense_layers) == (8, 2, 768, 1)
    assert (row.ep, row.etp, row.dispatcher) == (4, 1, "alltoall")
    assert (row.precision, row.recompute) == ("fp8", "core_attn+moe_act")


def test_a_latent_attention_of_megatron_bridge_is_told_by_the_class_that_it_is_compared_with(tmp_path: Path) -> None:
    latent = SUMMARY.replace("Mcore TransformerConfig", "Mcore MLATransformerConfig")
    assert only(read(tmp_path, latent + STEPS, devices=16)).attention == "mla"


def test_another_configuration_of_megatron_bridge_in_the_same_log_is_another_training(tmp_path: Path) -> None:
    found = read(tmp_path, YAML + STEPS + YAML.replace("num_layers: 16", "num_layers: 8") + STEPS, devices=16)
    assert [row.layers for row in found.rows] == [16, 8]
