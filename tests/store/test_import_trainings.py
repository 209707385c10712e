"""Logs of Megatron and torchtitan that hold several trainings, mixtures, or settings that are easily missed."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from test_import_logs import DEEPSPEED, MEGATRON_LM, TITAN, only, read
from trimaran.files.row_as_run import stack_as_run

HEAD, *TAIL = MEGATRON_LM.partition(" > padded vocab")
STEPS = "".join(TAIL)
# A line of torchtitan's start, and the beginning of the next.
BUILT = "Model qwen3 14B size: 14,768,307,200 total parameters\n[titan] INFO - "


def stated(name: str, value: str) -> str:
    """An argument as Megatron-LM prints it, with fewer dots the longer its name."""
    return f"  {name} {'.' * (48 - len(name))} {value}\n"


def megatron(**arguments: str) -> str:
    """The log with arguments of a later Megatron-LM."""
    return HEAD + "".join(stated(name, value) for name, value in arguments.items()) + STEPS


def at_step(number: int, seconds: float, loss: str = "8.1") -> str:
    return (
        f" [2026-04-06 03:02:12] iteration {number:8d}/     100 | consumed samples: 64 "
        f"| elapsed time per iteration (ms): {1000 * seconds:.1f} "
        f"| global batch size:    64 | lm loss: {loss} | loss scale: 1.0 |\n"
    )


@pytest.mark.parametrize(
    ("arguments", "cells"),
    [
        ({"use_megatron_fsdp": "True", "data_parallel_sharding_strategy": "optim_grads_params"},
         {"zero_stage": 3, "dp_kind": "fully_sharded"}),
        ({"use_megatron_fsdp": "True", "data_parallel_sharding_strategy": "optim_grads"},
         {"zero_stage": 2, "dp_kind": "all_reduce"}),
        ({"use_torch_fsdp2": "True"}, {"zero_stage": 3, "dp_kind": "fully_sharded"}),
        ({"use_torch_fsdp2": "True", "torch_fsdp2_reshard_after_forward": "False"},
         {"zero_stage": 2, "dp_kind": "all_reduce"}),
        ({"use_distributed_optimizer": "False"}, {"zero_stage": 0, "dp_kind": "all_reduce"}),
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, {"precision": "fp8"}),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, {"precision": "mxfp8"}),
        ({"fp8": "None"}, {"precision": "bf16"}),
        ({"optimizer_cpu_offload": "True"}, {"offload": "optimizer"}),
        ({"multi_latent_attention": "True"}, {"attention": "mla", "kv_heads": None}),
        ({"swiglu": "True"}, {"mlp": "swiglu"}),
        ({"squared_relu": "True"}, {"mlp": "relu2"}),
        ({"recompute_modules": "['layernorm', 'mlp']"}, {"recompute": "layernorm+mlp"}),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": "4"},
         {"recompute": "full"}),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": "3"},
         {"recompute": None, "quality": "incomplete"}),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": "0"},
         {"recompute": "none"}),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": "4",
          "pipeline_model_parallel_size": "8", "virtual_pipeline_model_parallel_size": "None", "world_size": "32"},
         {"recompute": "full"}),
        ({"recompute_granularity": "None", "moe_layer_recompute": "True"}, {"recompute": "core_attn+moe"}),
        ({"context_parallel_size": "1"}, {"stack": "megatron-core", "cp": 1}),
        ({"context_parallel_size": "1", "tp_comm_overlap": "True"}, {"stack": "megatron-core-tp-overlap"}),
        ({"context_parallel_size": "1", "use_megatron_fsdp": "True", "data_parallel_sharding_strategy": "optim_grads"},
         {"stack": "megatron-core-fsdp"}),
        ({"deepspeed": "True", "zero_stage": "1"}, {"stack": "megatron-deepspeed"}),
        ({"deepspeed": "True", "zero_stage": "3"}, {"stack": "megatron-deepspeed-2025"}),
        ({"deepspeed": "True", "zero_stage": "1", "use_flash_attn_v2": "True"}, {"stack": "megatron-deepspeed-2025"}),
    ],
)  # fmt: skip
def test_what_megatron_prints_of_its_settings_is_the_rows(
    tmp_path: Path, arguments: dict[str, str], cells: dict[str, object]
) -> None:
    first, _ = read(tmp_path, megatron(**arguments)).rows
    assert {name: getattr(first, name) for name in cells} == cells


@pytest.mark.parametrize(
    ("stamps", "seconds", "expected"),
    [
        # as Primus logged it: the second line's mean has the first iteration in it
        (("01.107542", "01.805039", "02.469237"), (19.0139, 9.8556, 0.664), (19.0139, 0.6973, 0.664)),
        (("01", "14", "27"), (19.0, 16.0, 13.0), (19.0, 13.0, 13.0)),
        # the timer was reset: the line stands for its iteration alone, as its clock says
        (("01.107542", "10.963142", "11.627142"), (19.0139, 9.8556, 0.664), (19.0139, 9.8556, 0.664)),
        (("01", "11", "12"), (19.0139, 9.8556, 0.664), (19.0139, 9.8556, 0.664)),
    ],
)
def test_the_second_line_of_megatron_is_timed_without_the_first_iteration(
    tmp_path: Path, stamps: tuple[str, ...], seconds: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    lines = [
        at_step(number, each).replace("03:02:12", f"03:02:{stamp}")
        for number, (stamp, each) in enumerate(zip(stamps, seconds, strict=True), start=1)
    ]
    row = only(read(tmp_path, HEAD + "".join(lines), vocab=128256))
    assert row.step_times_s == pytest.approx(expected)
    assert ("timed without the first" in (row.notes or "")) == (seconds != expected)


def test_ranks_that_wrote_their_memory_into_one_line_have_each_their_own(tmp_path: Path) -> None:
    """As on eight RTX 4090s: `... max reserved: 13236.0[Rank 6] (after 1 iterations) ...`, then an empty line."""
    said = "[Rank {}] (after 1 iterations) memory (MB) | max allocated: {} | reserved: {} | max reserved: {}"
    two = said.format(2, 12680.6, 13236.0, 13236.0) + said.format(6, 10850.7, 14336.0, 14336.0) + "\n\n"
    torn = said.format(3, 1.0, 2.0, 2.0).partition("| reserved")[0] + said.format(0, 1.0, 2048.0, 2048.0) + "\n"
    _, row = read(tmp_path, two + torn + MEGATRON_LM).rows
    assert row.mem_gib_per_rank == (2.0, 13236 / 1024, 14.0)


def test_memory_of_megatron_bridge_is_in_units_of_ten_to_the_nine(tmp_path: Path) -> None:
    said = (
        "[Rank 0] (after 1 iterations) memory (GB) | mem-allocated-gigabytes: 13.367 | mem-active-gigabytes: 13.367 | "
        "mem-inactive-gigabytes: 0.42641 | mem-reserved-gigabytes: 14.259 | mem-max-allocated-gigabytes: 13.367 | "
        "mem-max-active-gigabytes: 13.367 | mem-max-inactive-gigabytes: 0.5 | mem-max-reserved-gigabytes: 14.259 | "
        "mem-alloc-retires: 0\n"
    )
    _, row = read(tmp_path, said + MEGATRON_LM).rows
    assert row.mem_gib == pytest.approx(14.259e9 / 2**30)


def test_sequences_that_deepspeed_shares_out_are_ulysses(tmp_path: Path) -> None:
    world = "using world size: 64, data-parallel-size: 4, sequence-parallel size: 4, tensor-model-parallel size: 4, "
    text = f"{world}pipeline-model-parallel size: 1 \n{megatron(deepspeed='True', world_size='64')}"
    row = read(tmp_path, text).rows[0]
    assert (row.devices, row.dp, row.cp, row.cp_kind, row.tp) == (64, 4, 4, "ulysses", 4)
    assert row.stack == "megatron-deepspeed-2025"


def test_degrees_of_a_further_megatron_training_are_not_those_of_the_one_before(tmp_path: Path) -> None:
    """They are told ahead of its arguments, which do not state DeepSpeed's sequence parallelism."""
    world = "using world size: 64, data-parallel-size: {}, sequence-parallel size: {}, tensor-model-parallel size: 4, "
    world += "pipeline-model-parallel size: 1 \n"
    arguments = megatron(deepspeed="True", world_size="64")
    rows = read(tmp_path, world.format(16, 1) + arguments + world.format(4, 4) + arguments).rows
    assert [(row.dp, row.cp, row.cp_kind) for row in rows] == [(16, 1, None)] * 2 + [(4, 4, "ulysses")] * 2


def test_layers_that_no_row_can_say_are_refused(tmp_path: Path) -> None:
    traits = {
        "is_hybrid_model": "True", "experimental_attention_variant": "gated_delta_net",
        "hybrid_attention_enabled": "True", "heterogeneous_layers_config_path": "nemotron.json",
    }  # fmt: skip
    for name, value in traits.items():
        found = read(tmp_path, megatron(**{name: value}))
        assert found.rows == () and f"{name} is {value}: " in found.refused[0]
    assert read(tmp_path, megatron(experimental_attention_variant="None", hybrid_attention_enabled="False")).rows


def test_what_only_a_model_of_the_catalogue_has_is_noted_of_a_megatron_log(tmp_path: Path) -> None:
    """Such a row was predicted too fast without a word."""
    row = read(tmp_path, megatron(mtp_num_layers="1", window_size="None")).rows[0]
    assert "mtp_num_layers is 1, which no column says: --model names a model" in str(row.notes)
    assert "window_size" not in str(row.notes)


def test_an_argument_whose_name_left_no_room_for_dots_is_read(tmp_path: Path) -> None:
    """Megatron-LM before core_v0.3 fills up to 32 letters, and `virtual_pipeline_model_parallel_size` has 36."""
    older = megatron().replace(stated("virtual_pipeline_model_parallel_size", "4"),
                               "  virtual_pipeline_model_parallel_size  2\n")  # fmt: skip
    assert {row.vpp for row in read(tmp_path, older).rows} == {2}


def test_a_mixture_whose_experts_are_stated_is_a_row(tmp_path: Path) -> None:
    text = megatron(
        num_experts="64", moe_router_topk="6", moe_ffn_hidden_size="1408", moe_shared_expert_intermediate_size="2816",
        moe_layer_freq=f"[{', '.join(['0'] + ['1'] * 31)}]", expert_model_parallel_size="2",
        expert_tensor_parallel_size="1", moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep",
        overlap_moe_expert_parallel_comm="True",
    )  # fmt: skip
    row = read(tmp_path, text.replace("| \n", "| load_balancing_loss: 1.0 |\n")).rows[0]
    assert (row.experts, row.top_k, row.moe_ffn_hidden, row.shared_experts, row.dense_layers) == (64, 6, 1408, 2, 1)
    assert (row.ep, row.etp, row.dispatcher, row.ep_overlap) == (2, 1, "deepep", "batch")


def test_a_mixture_of_unknown_experts_is_none_unless_the_user_knows_them(tmp_path: Path) -> None:
    text = "".join(
        at_step(n, 2.0).replace("lm loss: 8.1", "lm loss: 8.1 | seq_load_balancing_loss: 1.0") for n in (1, 2)
    )
    known = {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 32000, "seq_len": 4096, "mbs": 1, "ffn_hidden": 14336}
    found = read(tmp_path, text, **known)
    assert found.rows == () and "load_balancing_loss" in found.refused[0] and "--model" in found.refused[0]
    row = only(read(tmp_path, text, **known, experts=8, top_k=2, moe_ffn_hidden=14336))
    assert (row.experts, row.sec_per_it) == (8, 2.0)


def test_two_trainings_in_one_log_are_two_rows(tmp_path: Path) -> None:
    tp2 = HEAD.replace(stated("tensor_model_parallel_size", "4"), stated("tensor_model_parallel_size", "2"))
    assert tp2 != HEAD
    vocab = " > padded vocab (size: 128256) with 256 dummy tokens (new size: 128512)\n"
    text = HEAD + vocab + at_step(1, 9.0) + at_step(2, 5.0) + tp2 + vocab + at_step(1, 12.0) + at_step(2, 7.0)
    first, second = read(tmp_path, text).rows
    assert (first.tp, first.sec_per_it, first.step_times_s) == (4, 5.0, (9.0, 5.0))
    assert (second.tp, second.sec_per_it, second.step_times_s) == (2, 7.0, (12.0, 7.0))
    assert (first.row, second.row) == ("1", "2")


def test_a_training_out_of_memory_leaves_the_one_before_it_as_it_was(tmp_path: Path) -> None:
    mbs8 = HEAD.replace(stated("micro_batch_size", "1"), stated("micro_batch_size", "8"))
    vocab = " > padded vocab (size: 128256) with 256 dummy tokens (new size: 128512)\n"
    text = (
        HEAD
        + vocab
        + at_step(1, 9.0)
        + at_step(2, 5.0)
        + mbs8
        + vocab
        + "torch.OutOfMemoryError: CUDA out of memory.\n"
    )
    first, second = read(tmp_path, text, gbs=64).rows
    assert (first.mbs, first.status, first.sec_per_it) == (1, "ok", 5.0)
    assert (second.mbs, second.status, second.sec_per_it) == (8, "oom", None)


@pytest.mark.parametrize("again", [HEAD, ""], ids=["arguments printed again", "steps alone"])
def test_a_training_that_was_started_again_is_one_without_its_second_start(tmp_path: Path, again: str) -> None:
    text = HEAD + STEPS.partition("\n")[0] + "\n" + at_step(1, 9.0) + at_step(2, 5.0) + at_step(3, 5.2)
    row = only(
        read(tmp_path, text + "Traceback (most recent call last)\n" + again + at_step(2, 11.0) + at_step(3, 5.1))
    )
    assert row.step_times_s == (9.0, 5.0, 5.2, 5.1) and row.status == "ok"
    assert "started again before iteration 2" in (row.notes or "")


def test_what_fails_after_the_last_iteration_leaves_the_run_as_good_as_any(tmp_path: Path) -> None:
    done = read(tmp_path, HEAD + STEPS + at_step(100, 5.0) + "Traceback (most recent call last)\nBrokenPipeError\n")
    assert {row.status for row in done.rows} == {"ok"} and "all 100 iterations" in (done.rows[-1].notes or "")


def test_losses_that_are_not_finite_are_told(tmp_path: Path) -> None:
    text = HEAD + STEPS.partition("\n")[0] + "\n" + at_step(1, 9.0) + at_step(2, 5.0, "nan") + at_step(3, 5.0, "NaN")
    row = only(read(tmp_path, text))
    assert row.losses == (8.1,) and "2 of 3 logged losses are not finite" in (row.notes or "")


@pytest.mark.parametrize("loss", ["8.1", "nan"])
def test_a_line_that_stands_twice_is_one_iteration(tmp_path: Path, loss: str) -> None:
    text = HEAD + STEPS.partition("\n")[0] + "\n" + 2 * at_step(1, 9.0) + 2 * at_step(2, 5.0, loss)
    assert only(read(tmp_path, text)).step_times_s == (9.0, 5.0)


def test_the_first_of_two_figures_is_the_iterations_own(tmp_path: Path) -> None:
    """Primus prints the mean so far behind it."""
    text = HEAD + STEPS.partition("\n")[0] + "\n" + at_step(1, 9.0) + at_step(2, 5.0).replace("5000.0", "5000.0/7000.0")
    assert only(read(tmp_path, text)).sec_per_it == 5.0


@pytest.mark.parametrize(
    "rates",
    [
        "throughput per GPU (TFLOP/s/GPU): 560.5/500.1 | tokens per GPU (tokens/s/GPU): 9801.4/9000.0",
        "compute per GPU (TFLOP/s/GPU): 560.5 (avg 500.1) | tokens/s/GPU inst/harmonic mean: 9801.4/9000.0",
        "TFLOPs: 560.5 | tokens per gpu per second (tgs): 9801.4",
    ],
)
def test_tokens_a_second_of_a_gpu_are_read_by_every_name_that_megatrons_forks_have(tmp_path: Path, rates: str) -> None:
    """Primus and Megatron-DeepSpeed print them; of Primus' newer lines the TFLOPs were lost too."""
    lines = "".join(at_step(n, 5.0).replace("| loss scale", f"| {rates} | loss scale") for n in (1, 2))
    row = only(read(tmp_path, HEAD + STEPS.partition("\n")[0] + "\n" + lines))
    assert (row.tflops, row.tokens_per_s_per_gpu, row.sec_per_it) == (560.5, 9801.4, 5.0)


def test_degrees_of_the_first_line_count_where_no_argument_is_printed(tmp_path: Path) -> None:
    world = (
        "using world size: 16, data-parallel size: 2, context-parallel size: 1, tensor-model-parallel size: 4, "
        "pipeline-model-parallel size: 2\n"
    )
    shape = {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 32000, "seq_len": 4096, "mbs": 1}
    row = only(read(tmp_path, world + at_step(1, 9.0) + at_step(2, 5.0), **shape))
    assert (row.devices, row.dp, row.tp, row.pp, row.cp) == (16, 2, 4, 2, 1)


def test_deepspeeds_fork_is_known_by_its_fields_and_states_its_length(tmp_path: Path) -> None:
    text = "".join(at_step(n, 5.0).replace("| loss scale", "| actual seqlen:  2048 | loss scale") for n in (1, 2))
    row = only(read(tmp_path, text, layers=2, hidden=64, heads=2, vocab=512, mbs=1, seq_len=4096))
    assert (row.stack, row.seq_len) == ("megatron-deepspeed", 2048)
    assert only(read(tmp_path, DEEPSPEED)).stack == "megatron-deepspeed"


def test_fields_with_equals_signs_are_read(tmp_path: Path) -> None:
    line = (
        "[2026-11-10 09:43:36][I][megatron/training_log:402]  iteration=  {}/  136100 | consumed_samples= 835608576 "
        "| elapsed_time_per_iteration_ms=3415.3 | global_batch_size= 6144 | lm loss=12.316531 | actual_seqlen= 8192 | "
        "TFLOPs=53.4 |\n"
    )
    row = only(
        read(tmp_path, line.format(136004) + line.format(136005), layers=2, hidden=64, heads=2, vocab=512, mbs=1)
    )
    assert row.sec_per_it == pytest.approx(3.4153)
    assert (row.gbs, row.seq_len, row.tflops) == (6144, 8192, 53.4)


def test_ranks_that_share_a_sequence_share_torchtitans_tokens(tmp_path: Path) -> None:
    """torchtitan divides tokens by all but data parallelism (torchtitan/components/metrics.py, v0.2.0, line 402)."""
    shared = TITAN.replace("['pp', 'dp_shard', 'tp'], [1, 4, 2]", "['dp_shard', 'cp'], [4, 2]")
    row = only(read(tmp_path, shared, layers=32, hidden=4096, heads=32, vocab=128256))
    before = only(read(tmp_path, TITAN, layers=32, hidden=4096, heads=32, vocab=128256))
    assert (row.cp, row.tp, row.devices) == (2, 1, 8)
    assert row.sec_per_it == before.sec_per_it


def test_a_second_training_of_torchtitan_has_its_own_devices_and_steps(tmp_path: Path) -> None:
    lines = TITAN.splitlines(keepends=True)
    fewer = [line.replace("[1, 4, 2]", "[1, 2, 2]").replace("loss: ", "loss: 1") for line in lines]
    shape = {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 128256}
    first, second = read(tmp_path, "".join(lines + fewer), **shape).rows
    assert (first.dp, second.dp) == (4, 2)
    assert first.step_times_s is not None and second.step_times_s is not None
    assert second.step_times_s == pytest.approx([2 * each for each in first.step_times_s])
    assert first.losses is not None and second.losses is not None and first.losses[0] != second.losses[0]


@pytest.mark.parametrize(
    "arguments", ["TransformerModelArgs(dim=4096, n_layers=32", '{\n  "dim": 4096,'], ids=["Python", "JSON"]
)
def test_a_second_training_of_torchtitan_on_the_same_mesh_has_its_own_batch_and_steps(
    tmp_path: Path, arguments: str
) -> None:
    """Its batch was read as that of the first one's steps, and its own steps were passed over."""
    mesh, *others = TITAN.splitlines(keepends=True)
    built = f"[titan] 2026-02-24 19:46:01,100 - root - INFO - Building llama3 8B with {arguments}\n"
    job = "".join([mesh, built, *others])
    batch = re.search(r"global batch size:? (\d+)", job)
    assert batch is not None
    larger = job.replace(batch[0], batch[0].replace(batch[1], str(2 * int(batch[1])))).replace("loss: ", "loss: 1")
    shape = {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 128256}
    first, second = read(tmp_path, job + larger, **shape).rows
    alone = only(read(tmp_path, job, **shape))
    assert (first.gbs, first.step_times_s, first.losses) == (alone.gbs, alone.step_times_s, alone.losses)
    assert (second.gbs, second.dp, second.tp) == (2 * int(batch[1]), alone.dp, alone.tp)
    assert second.step_times_s == pytest.approx([2 * each for each in alone.step_times_s])


def test_a_mesh_that_is_built_after_the_first_step_is_no_other_training(tmp_path: Path) -> None:
    mesh, batches, step, *others = TITAN.splitlines(keepends=True)
    shape = {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 128256}
    late = mesh.replace(
        "Building 3-D device mesh with ['pp', 'dp_shard', 'tp'], [1, 4, 2]",
        "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=1, etp=1",
    )
    assert late != mesh
    assert (
        only(read(tmp_path, "".join([batches, step, late, *others]), **shape)).step_times_s
        == only(read(tmp_path, TITAN, **shape)).step_times_s
    )


@pytest.mark.parametrize(
    ("line", "cells"),
    [
        ("Float8 tensorwise scaled training active", {"precision": "fp8"}),
        ("Float8 training active with recipe rowwise", {"precision": "fp8_rowwise"}),
        ("MX training active with recipe mxfp8_cublas", {"precision": "mxfp8"}),
        ("Converted Linear layers to NVFP4Linear", {"precision": "nvfp4"}),
        (
            "Converted modules to use dynamic mxfp8_rceil quantization for grouped_mm and linear ops",
            {"precision": "mxfp8"},
        ),
        ("Applied CPU Offloading to the model", {"offload": "weights"}),
        ("Total parameter count: dense 14,768,307,200, sparse 0, active 14,768,307,200", {"experts": None}),
        ("Applied DDP to the model", {"dp_kind": "all_reduce", "zero_stage": 0}),
        (f"{BUILT}Compiling each TransformerBlock with torch.compile", {"recompute": "none"}),
        (f"{BUILT}Applied full activation checkpointing to the model", {"recompute": "full"}),
        (f"{BUILT}Applied FullAC activation checkpointing to the model", {"recompute": "full"}),
        (f"{BUILT}Applied SelectiveAC activation checkpointing to the model", {"recompute": "selective"}),
        (f"{BUILT}Selected 0.9 budget option\n{BUILT}Compiling the loss function", {"recompute": None}),
        (f"{BUILT}Applied memory_budget activation checkpointing to the model", {"recompute": None}),
    ],
)
def test_what_torchtitan_says_of_its_model_is_the_rows(tmp_path: Path, line: str, cells: dict[str, object]) -> None:
    mesh = "['dp_replicate'], [8]" if "DDP" in line else "['dp_shard'], [8]"
    text = TITAN.replace("['pp', 'dp_shard', 'tp'], [1, 4, 2]", mesh)
    said = text.replace("INFO - Trainer is", f"INFO - {line}\n[titan] INFO - Trainer is", 1)
    row = only(read(tmp_path, said, layers=32, hidden=4096, heads=32, vocab=128256))
    assert {name: getattr(row, name) for name in cells} == cells


def test_a_compiled_torchtitan_is_predicted_as_the_compiled_one_of_its_day(tmp_path: Path) -> None:
    line = "2026-02-24 19:46:01,100 - root - INFO - Compiling each TransformerBlock with torch.compile"
    begun = "[rank0]:[titan] 2026-02-24 19:46:02"
    said = TITAN.replace(begun, f"[rank0]:[titan] {line}\n{begun}", 1)
    stated = {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 128256, "precision": "bf16", "cluster": "dgx-h100"}
    row, eager = only(read(tmp_path, said, **stated)), only(read(tmp_path, TITAN, **stated))
    assert (row.stack, row.system, row.date) == ("torchtitan", "torch.compile", "2026-02-24")
    assert stack_as_run(row, "torchtitan")[0].name == "torchtitan-0.1-compiled"
    assert eager.system is None and stack_as_run(eager, "torchtitan")[0].name == "torchtitan"


def test_parameters_of_experts_in_torchtitans_log_are_of_a_mixture(tmp_path: Path) -> None:
    """Since its models' arguments are printed no more, their count alone tells."""
    line = "Total parameter count: dense 23,173,376, sparse 9,840,640, active 28,098,816"
    said = TITAN.replace("INFO - Trainer is", f"INFO - {line}\n[titan] INFO - Trainer is", 1)
    shape = {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 128256}
    (refused,) = read(tmp_path, said, **shape).refused
    assert "count of sparse parameters is 9,840,640: the model is a mixture of experts" in refused
    assert only(read(tmp_path, said, **shape, experts=8, top_k=2, moe_ffn_hidden=1408)).experts == 8


def test_colours_that_lost_their_escape_and_words_a_second_are_read(tmp_path: Path) -> None:
    shape = {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 128256}
    whole = only(read(tmp_path, TITAN, **shape))
    pasted = TITAN.replace("\x1b", "").replace("step:  2", "[31mstep:  2").replace("loss:  9", "[32mloss:  9")
    assert "[31m" in pasted
    for text in (pasted, TITAN.replace("tps:", "wps:")):
        assert only(read(tmp_path, text, **shape)).step_times_s == whole.step_times_s


@pytest.mark.parametrize(
    ("said", "cells"),
    [
        ("1F1B with 2 microbatches and 4 stages.", ("1f1b", 1, 1)),
        ("Interleaved1F1B with 2 and 8 stages.", ("interleaved", 2, 1)),
        ("GPipe with 1 microbatches and 4 stages.", ("gpipe", 1, 2)),
        ("ZBVZeroBubble with 2 microbatches and 8 stages.", ("zbv", 2, 1)),
    ],
)
def test_torchtitan_names_the_schedule_stages_and_micro_batches_of_a_pipeline(
    tmp_path: Path, said: str, cells: tuple[str, int, int]
) -> None:
    shape = {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 128256}
    mesh, *others = TITAN.replace("['pp', 'dp_shard', 'tp'], [1, 4, 2]", "['pp', 'dp_shard'], [4, 4]").splitlines(True)
    line = "[titan] 2026-02-24 19:46:01,500 - root - INFO - Using pipeline schedule "
    row = only(read(tmp_path, "".join([mesh, f"{line}{said}\n", *others]), **shape))
    assert (row.schedule, row.vpp, row.mbs, row.pp) == (*cells, 4)
    unsaid = read(tmp_path, "".join([mesh, *others]), **shape)
    assert "mbs is not stated" in unsaid.refused[0], "the local batch is cut into an unknown number"
    other = read(tmp_path, "".join([mesh, f"{line}LoopedBFS with 2 microbatches and 8 stages.\n", *others]), **shape)
    assert "the pipeline schedule is LoopedBFS: only 1f1b, gpipe," in other.refused[0]


def test_an_evaluation_of_torchtitan_is_no_step(tmp_path: Path) -> None:
    shape = {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 128256}
    begun, *steps = TITAN.partition("[rank0]:[titan] 2026-02-24 19:46:11,024")
    validated = (
        "[titan] 2026-02-24 19:46:11,000 - root - INFO - validate step:  {}  loss: 12.4699  memory: 69.81GiB(88.17%)  "
        "tps: 74,600\n"
    )
    row = only(read(tmp_path, begun + validated.format(1) + "".join(steps) + validated.format(4), **shape))
    trained = only(read(tmp_path, begun + "".join(steps), **shape))
    assert (row.step_times_s, row.losses, row.mem_gib) == (trained.step_times_s, trained.losses, trained.mem_gib)


def test_a_loss_of_torchtitan_that_is_no_number_is_told(tmp_path: Path) -> None:
    row = only(read(tmp_path, TITAN.replace("7.62585", "nan"), layers=32, hidden=4096, heads=32, vocab=128256))
    assert row.losses is not None and all(map(math.isfinite, row.losses))
    assert "1 of 3 logged losses are not finite" in (row.notes or "")
