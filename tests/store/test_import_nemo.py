"""What NeMo prints of its configuration, and by which names it calls its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from test_import_forms import only
from test_import_logs import read

# As `OmegaConf.to_yaml` prints it behind the logger's first line, shortened; then what Lightning and Megatron say.
CONFIGURATION = """[NeMo I 2023-10-26 13:26:58 megatron_gpt_pretraining:31]
    name: megatron_gpt
    trainer:
      devices: 8
      num_nodes: 2
      precision: bf16
    exp_manager:
      name: megatron_gpt
    model:
      micro_batch_size: 1
      global_batch_size: 64
      tensor_model_parallel_size: 2
      pipeline_model_parallel_size: 1
      virtual_pipeline_model_parallel_size: null
      encoder_seq_length: 4096
      num_layers: 24
      hidden_size: 2048
      ffn_hidden_size: 5440
      num_attention_heads: 16
      activation: fast-swiglu
      num_query_groups: null
      activations_checkpoint_granularity: null
      activations_checkpoint_method: null
      activations_checkpoint_num_layers: null
      fp8: false
      optim:
        name: distributed_fused_adam
        sched:
          name: CosineAnnealing
"""
BUILT = """[NeMo I 2023-10-26 13:27:06 model:314] Padded vocab_size: 50304, original vocab_size: 50257, dummy 47
All distributed processes registered. Starting with 16 processes
"""
BAR = (
    "Epoch 0: : {0}%|#| {0}/50 [00:22<00:00, reduced_train_loss=9.{0}, global_step={0}.00, train_step_timing in s=2.{0}"
)
STEPS = "".join(BAR.format(number) + "]\n" for number in (1, 2, 3))


def test_a_log_of_nemo_states_its_run_whole(tmp_path: Path) -> None:
    """It was refused for a vocabulary that it has, and a row had neither devices nor shards nor recompute."""
    row = only(read(tmp_path, CONFIGURATION + BUILT + STEPS), "nemo")
    assert (row.nodes, row.devices_per_node, row.devices, row.dp, row.tp, row.cp) == (2, 8, 16, 8, 2, 1)
    assert (row.vocab, row.mlp, row.precision, row.recompute) == (50304, "swiglu", "bf16", "none")
    assert (row.optimizer, row.zero_stage, row.dp_kind, row.quality) == ("adam", 1, "all_reduce", "ok")


@pytest.mark.parametrize(
    ("stated", "instead", "column", "cell"),
    [
        ("fp8: false", "fp8: true", "precision", "fp8"),
        ("granularity: null", "granularity: selective", "recompute", "selective"),
        ("granularity: null", "granularity: full", "recompute", "full"),
        ("distributed_fused_adam", "fused_adam", "zero_stage", 0),
        ("fp8: false", "fsdp: true\n      fsdp_sharding_strategy: full", "zero_stage", 3),
        ("fp8: false", "fsdp: true\n      fsdp_sharding_strategy: hybrid", "zero_stage", None),
    ],
)
def test_what_nemo_says_of_arithmetic_shards_and_recompute_is_stored(
    tmp_path: Path, stated: str, instead: str, column: str, cell: object
) -> None:
    """A run in fp8 was stored as one in bf16."""
    row = only(read(tmp_path, CONFIGURATION.replace(stated, instead) + BUILT + STEPS), "nemo")
    assert getattr(row, column) == cell


def test_ranks_of_nemo_that_share_experts_are_stored_so(tmp_path: Path) -> None:
    """Each rank was stored as holding all experts."""
    experts = "      expert_model_parallel_size: 4\n      num_moe_experts: 8\n"
    given = {"experts": 8, "top_k": 2, "moe_ffn_hidden": 5440}
    row = only(read(tmp_path, CONFIGURATION + experts + BUILT + STEPS, **given), "nemo")
    assert (row.dp, row.tp, row.ep, row.experts) == (8, 2, 4, 8)


@pytest.mark.parametrize("name", ["TFLOPS_per_GPU", "tflops_per_sec_per_gpu"])
def test_tflops_of_nemo_are_read_under_their_name_of_2024_too(tmp_path: Path, name: str) -> None:
    bar = "".join(f"{BAR.format(number)}, {name}=20{number}.0]\n" for number in (1, 2, 3))
    printed = "".join(
        f"Training epoch 0, iteration {number}/9 | global_batch_size: 64 | global_step: {number} | "
        f"reduced_train_loss: 9.{number} | train_step_timing in s: 2.{number} | {name}: 20{number}\n"
        for number in (1, 2, 3)
    )
    for steps in (bar, printed):
        assert only(read(tmp_path, CONFIGURATION + BUILT + steps), "nemo").tflops == 202.5
