"""Shell scripts of others: how bash reads them, Megatron-DeepSpeed's own flags, and what their Slurm lines say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from test_configs import PLAIN, read
from trimaran.nouns.noun import TrimaranError
from trimaran.planner.configs.read import read_config


def test_a_script_is_followed_through_its_variables(tmp_path: Path) -> None:
    script = f"""#!/bin/bash
# --tensor-model-parallel-size 16 is only a comment
GPUS=8; NODES=${{NODES:-2}}
export TP=2 PP=$((GPUS / 4))   # a sum
SHAPE=({PLAIN.replace("--bf16", "")}
    --swiglu # a comment in an array
)
SHAPE+=(--bf16)
WORDS="--tensor-model-parallel-size=$TP \\
  --pipeline-model-parallel-size ${{PP}}"
WORDS+=" --sequence-parallel --tensor-model-parallel-size 4"
if [[ "$X" == "y" ]]; then
  SHAPE+=("--recompute-granularity full" "--recompute-method uniform" "--recompute-num-layers 1")
fi
mkdir -p "$OUT" && echo --num-layers
torchrun --nproc_per_node $GPUS --nnodes "$NODES" pretrain_gpt.py \\
    "${{SHAPE[@]}}" $WORDS --save "$OUT" --lr 1e-4 | tee log.txt
"""
    file = tmp_path / "run.sh"
    file.write_text(script)
    stated = read_config(file)
    assert stated.devices == 16
    layout, workload, remarks = read(tmp_path, script)
    assert str(layout) == "dp2,tp4,pp2,mbs2,sp,recompute-full,bf16"
    assert (workload.model.layers, workload.model.mlp, workload.global_batch) == (24, "swiglu", 64)
    assert "note: --tensor-model-parallel-size is stated twice, and the last counts: 4" in remarks
    assert "conditions and loops" in remarks and "not read" not in remarks


@pytest.mark.parametrize(
    ("expression", "tp"),
    [("${A[2]} * 2", 4), ("A[1] * 2", 8), ("A * 4", 4), ("${N:-8} / 2", 4), ('"$TP" * 2', 4), ("$((TP + 2)) / 2", 2)],
)
def test_a_sum_takes_what_stands_in_arrays_and_what_has_a_default(tmp_path: Path, expression: str, tp: int) -> None:
    words = f"A=(1 4 2)\nTP=2\npython pretrain_gpt.py {PLAIN} --tensor-model-parallel-size $(({expression}))\n"
    layout, _, remarks = read(tmp_path, words)
    assert layout.tp == tp and "which the file does not set" not in remarks


def test_values_that_stand_too_deep_in_each_other_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("X=" + "${A:-" * 5000 + "1" + "}" * 5000 + f"\npython pretrain_gpt.py {PLAIN}\n")
    with pytest.raises(TrimaranError, match="too deep in each other"):
        read_config(tmp_path / "run.sh")


def test_what_no_step_feels_is_not_told_and_what_is_misspelt_is(tmp_path: Path) -> None:
    beside = "--lr 1e-4 --lr-decay-style cosine --seed 1 --log-interval 1 --save-interval 9 --tensorboard-dir x "
    beside += "--tokenizer-model t --data-path d --clip-grad 1.0 --eval-iters 0 --adam-beta1 0.9 --node_rank 0 "
    beside += "--ckpt-format torch --no-load-optim --timing-log-level 0 --wandb-project p --exit-duration-in-mins 9"
    told = "--tensor-model-paralel-size 8 --transformer-impl local --manual-gc"
    _, _, remarks = read(tmp_path, f"torchrun --master_addr a pretrain_gpt.py {PLAIN} {beside} {told}")
    assert "not read: --tensor-model-paralel-size, --transformer-impl, --manual-gc" in remarks.splitlines()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--use-megatron-fsdp --use-distributed-optimizer", "zero3,fsdp"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", "zero3,fsdp"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "zero2"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", "zero1"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy no_shard", "mbs2,bf16"),
        ("--use-torch-fsdp2", "zero3,fsdp"),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", "zero2"),
        ("--data-parallel-sharding-strategy optim", "mbs2,bf16"),
        ("--use-megatron-fsdp --num-distributed-optimizer-instances 2", "dp16,shard8,tp1"),
    ],
)
def test_what_fsdp_shards_is_part_of_the_layout(tmp_path: Path, flags: str, words: str) -> None:
    """megatron/training/arguments.py at core_v0.19.0, --data-parallel-sharding-strategy."""
    layout, _, remarks = read(tmp_path, f"{PLAIN} {flags}")
    assert words in str(layout) and "not read" not in remarks and "not counted" not in remarks
    assert ("optim_grads_params, as core 0.19" in remarks) == (
        "fsdp " in f"{flags} " and "strategy" not in flags and "torch" not in flags
    )


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("", {"grad_bytes_16bit": 2, "fused_accumulation": "always", "overlap_dp": 1.0}),
        (
            "--grad-reduce-in-bf16 --no-gradient-accumulation-fusion",
            {"grad_bytes_16bit": 2, "fused_accumulation": "never"},
        ),
        ("--megatron-fsdp-main-grads-dtype fp32", {"grad_bytes_16bit": 4, "narrow_gradient_stages": ()}),
        (
            "--megatron-fsdp-main-grads-dtype fp32 --megatron-fsdp-grad-comm-dtype bf16",
            {"grad_bytes_16bit": 4, "narrow_gradient_stages": (2, 3)},
        ),
        ("--fsdp-double-buffer", {"live_parameters": 0}),
        ("--suggested-communication-unit-size 1000000000", {"live_parameters": 500_000_000}),
    ],
)
def test_what_megatron_fsdp_does_is_as_its_flags_say(tmp_path: Path, flags: str, wanted: dict[str, object]) -> None:
    (tmp_path / "run.sh").write_text(f"{PLAIN} --use-megatron-fsdp {flags}")
    stated = read_config(tmp_path / "run.sh")
    assert stated.stack_name == "megatron-core-fsdp" and not stated.unread
    assert {name: stated.stack[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--moe-layer-recompute", "core_attn+moe"),
        ("--moe-layer-recompute --recompute-granularity selective --recompute-modules layernorm", "layernorm+moe"),
        ("--moe-layer-recompute --recompute-granularity selective --recompute-modules moe", "recompute-moe,"),
    ],
)
def test_a_mixtures_own_switch_of_recompute_is_one_of_modules(tmp_path: Path, flags: str, words: str) -> None:
    """transformer_config.py at core_v0.19.0, moe_layer_recompute."""
    layout, _, remarks = read(tmp_path, f"{PLAIN} --num-experts 8 --moe-router-topk 2 {flags}")
    assert words in str(layout) and "not read" not in remarks


@pytest.mark.parametrize(
    "script",
    [
        f'ARGS="{PLAIN}"\nsrun bash -c "python pretrain_gpt.py $ARGS --tensor-model-parallel-size 2"',
        f"ARGS='{PLAIN} --tensor-model-parallel-size 2'",
        f"{PLAIN} --tensor-model-parallel-size=2",
        f"python pretrain_gpt.py {PLAIN} \\\n  --tensor-model-parallel-size \\\n  2",
        f"cat <<'END' > a.txt\n--tensor-model-parallel-size 8 it's\nEND\nx {PLAIN} --tensor-model-parallel-size 2",
        f"#  --tensor-model-parallel-size 8 \\\npython pretrain_gpt.py {PLAIN} --tensor-model-parallel-size 2",
        f"A='{PLAIN} --tensor-model-parallel-size 2'\nsrun bash -c 'python pretrain_gpt.py $A'\necho $A --seq-length 9",
        f"TP=2\nif [ -n $1 ]; then TP=$1; fi\npython pretrain_gpt.py {PLAIN} --tensor-model-parallel-size $TP",
        f"A=2\nB=$A\npython x.py {PLAIN} --tensor-model-parallel-size ${{B:?unset}} # ' an open quote",
    ],
)
def test_arguments_are_found_however_a_script_holds_them(tmp_path: Path, script: str) -> None:
    layout, workload, _ = read(tmp_path, script)
    assert (layout.tp, layout.dp, layout.mbs, workload.model.layers) == (2, 8, 2, 24)


@pytest.mark.parametrize(
    ("flags", "cells"),
    [
        ("--bf16 --zero-stage 0", "zero1"),
        ("--zero-stage 0", "dp16,tp1"),
        ("--ds-sequence-parallel-size 4", "cp4,cp-ulysses"),
        ("--cpu-optimizer --zero-stage 1", "offload-optimizer"),
        ("--num-experts 1 --moe-expert-parallel-size 1", "dp16,tp1"),
        ("--num-experts 8 --topk 1 --expert-interval 1 --moe-expert-parallel-size 8", "ep8"),
        ("--pipeline-model-parallel-size 2 --enable-zbh1-pipeline", "zero_bubble"),
    ],
)
def test_megatron_deepspeeds_own_flags_are_a_layout(tmp_path: Path, flags: str, cells: str) -> None:
    layout, _, remarks = read(tmp_path, f"python pretrain_gpt.py {PLAIN.replace('--bf16', '')} --deepspeed {flags}")
    assert cells in str(layout)
    assert not [flag for flag in flags.split() if flag.startswith("--") and flag in remarks]


@pytest.mark.parametrize(
    ("flags", "name", "flash"),
    [
        ("--zero-stage 1", None, None),
        ("--zero-stage 1 --use-flash-attn-v2", "megatron-deepspeed-2025", "flash"),
        ("--zero-stage 3 --use-flash-attn-triton", "megatron-deepspeed-2025", "triton"),
        ("--zero-stage 2", "megatron-deepspeed-2025", None),
        ("--ds-sequence-parallel-size 4", "megatron-deepspeed-2025", None),
    ],
)
def test_what_megatron_deepspeed_of_2022_has_not_is_a_later_ones(
    tmp_path: Path, flags: str, name: str | None, flash: str | None
) -> None:
    (tmp_path / "run.sh").write_text(f"python pretrain_gpt.py {PLAIN} --deepspeed {flags}")
    stated = read_config(tmp_path / "run.sh")
    assert (stated.stack_name, stated.stack.get("flash_kernel"), bool(stated.stack.get("flash_attention"))) == (
        name, flash, flash is not None,
    )  # fmt: skip


def test_megatron_deepspeeds_experts_are_in_every_second_layer(tmp_path: Path) -> None:
    flags = "--num-experts 8 --moe-expert-parallel-size 4 --mlp-type residual --moe-loss-coeff 0.01"
    layout, workload, remarks = read(tmp_path, f"{PLAIN} --deepspeed {flags}")
    model = workload.model
    assert (model.experts, model.experts_every, model.top_k, model.shared_experts) == (8, 2, 1, 1)
    assert (layout.ep, layout.size("etp"), workload.capacity_factor) == (4, 1, 1.0)
    assert "--expert-interval is not stated" in remarks and "not read" not in remarks
    with pytest.raises(TrimaranError, match="--num-experts is 64 128: only one number"):
        read(tmp_path, f"{PLAIN} --deepspeed --num-experts 64 128")


@pytest.mark.parametrize(
    ("directives", "launcher", "devices"),
    [
        ("#SBATCH --nodes=4\n#SBATCH --gres=gpu:8   # number of gpus", "srun python", 32),
        ("#SBATCH -N 4 --gpus-per-node=h100:4", "srun python", 16),
        ("#SBATCH --nodes 2 --ntasks-per-node=8", "srun python", 16),
        ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1",
         "G=8\ntorchrun --nproc_per_node $G --nnodes $SLURM_NNODES", 16),
    ],
)  # fmt: skip
def test_a_slurm_script_says_how_many_devices_it_takes(
    tmp_path: Path, directives: str, launcher: str, devices: int
) -> None:
    script = f"#!/bin/bash\n{directives}\n{launcher} pretrain_gpt.py {PLAIN}"
    layout, _, remarks = read(tmp_path, script, devices=None)
    assert layout.dp == devices and "how many devices" not in remarks


def test_an_optimizer_without_a_word_here_is_counted_as_adam_and_told(tmp_path: Path) -> None:
    _, workload, remarks = read(tmp_path, f"{PLAIN} --optimizer muon")
    assert workload.optimizer == "adam" and "not counted: optimizer muon, counted as adam" in remarks


@pytest.mark.parametrize(
    ("flags", "vocab"),
    [
        ("--pad-vocab-size-to 250880", 250880),
        ("--vocab-file $DATA/gpt2-vocab.json --merge-file $DATA/gpt2-merges.txt", 50257),
        ("--tokenizer-type GPT2BPETokenizer", 50257),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model $1", 32000),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model deepseek-ai/DeepSeek-V3", 129280),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model $HOME/meta-llama/Meta-Llama-3-8B-Instruct", 128256),
    ],
)
def test_the_vocabulary_is_known_by_what_scripts_say_of_it(tmp_path: Path, flags: str, vocab: int) -> None:
    unsaid = re.sub(r"--(?:padded-)?vocab-size \d+", "", PLAIN)
    assert unsaid != PLAIN
    assert read(tmp_path, f"{unsaid} {flags}")[1].model.vocab == vocab


def test_other_spellings_and_numbers_with_underscores_are_read(tmp_path: Path) -> None:
    words = "--deepspeed --normalization rmsnorm --num-key-value-heads 2 --rampup-batch-size 32 16 9_765_625"
    _, workload, _ = read(tmp_path, f"{PLAIN} {words}")
    assert (workload.model.norm, workload.model.kv_heads) == ("rmsnorm", 2)
    assert workload.ramp_up is not None and workload.ramp_up.samples == 9_765_625


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("pretrain_bert.py", "starts pretrain_bert.py, whose model is no decoder of text alone"),
        ("/megatron/pretrain_t5.py", "starts pretrain_t5.py, whose model"),
        ("tools/run_text_generation_server.py", "starts run_text_generation_server.py, which trains nothing"),
        ("examples/inference/gpt/gpt_static_inference.py", "which trains nothing"),
        ("-m examples.inference.offline_inference", "starts offline_inference.py, which trains nothing"),
    ],
)
def test_a_program_that_trains_no_decoder_of_text_is_refused(tmp_path: Path, program: str, says: str) -> None:
    with pytest.raises(TrimaranError, match=re.escape(says)):
        read(tmp_path, f"torchrun --nproc_per_node 8 {program} {PLAIN}")


def test_what_sees_images_beside_the_decoder_is_told(tmp_path: Path) -> None:
    _, _, remarks = read(tmp_path, f"torchrun examples/multimodal/train.py {PLAIN}")
    assert "not counted: what multimodal/train.py trains beside the decoder of text" in remarks
    _, _, remarks = read(tmp_path, f"torchrun /inference/pretrain_gpt.py {PLAIN}")
    assert "beside the decoder" not in remarks


@pytest.mark.parametrize(
    ("launcher", "devices"),
    [
        ("torchrun --nproc_per_node 8", 8),
        ("python -m torch.distributed.run --nproc-per-node=4", 4),
        ("deepspeed --num_nodes 2 --num_gpus 8", 16),
        ("#SBATCH --nodes=2\n#SBATCH --gres=gpu:4\nsrun torchrun --nproc_per_node 4", 8),
    ],
)
def test_a_launcher_says_how_many_devices_it_takes(tmp_path: Path, launcher: str, devices: int) -> None:
    layout, _, remarks = read(tmp_path, f"{launcher} pretrain_gpt.py {PLAIN}", devices=None)
    assert layout.dp == devices and "how many devices" not in remarks and "not read" not in remarks
    assert ("one node, as torchrun takes it" in remarks) == (devices in (4, 8) and "SBATCH" not in launcher)
    _, _, remarks = read(tmp_path, f"torchrun --nproc_per_node gpu pretrain_gpt.py {PLAIN}", devices=None)
    assert "how many devices it runs on" in remarks


@pytest.mark.parametrize(("flags", "told"), [("", True), ("--zero-stage 0", False), ("--zero-stage 1", False)])
def test_a_stage_of_zero_that_stands_in_another_file_is_told(tmp_path: Path, flags: str, told: bool) -> None:
    _, _, remarks = read(tmp_path, f"python pretrain_gpt.py {PLAIN} --deepspeed {flags}")
    assert ("--zero-stage is not stated" in remarks) == told
