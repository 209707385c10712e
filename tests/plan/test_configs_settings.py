"""Settings of torchtitan, DeepSpeed and nested files count as those trainers take them, and others are told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trimaran.nouns.noun import TrimaranError
from trimaran.planner.configs.cost import ConfigCost, cost_of
from trimaran.planner.configs.read import read_config
from trimaran.planner.configs.resolve import Given
from trimaran.planner.configs.stated import Stated

MEGATRON = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 2 --bf16"
LLAMA = '[model]\nname = "llama3"\nflavor = "8B"\n'


def titan(tmp_path: Path, text: str, model: str | None = None) -> tuple[ConfigCost, str]:
    """The cost of a torchtitan file on 16 devices, and its remarks."""
    return priced(tmp_path / "job.toml", text, Given("dgx-h100", devices=16, model=model))


def priced(file: Path, text: str, given: Given) -> tuple[ConfigCost, str]:
    file.write_text(text)
    cost = cost_of(file, "auto", given)
    return cost, "\n".join(f"{kind}: {sentence}" for kind, sentence in cost.remarks)


def test_torchtitans_settings_that_are_not_read_are_told(tmp_path: Path) -> None:
    text = LLAMA + (
        '[optimizer]\nname = "SGD"\nlr = 1e-4\nimplementation = "for-loop"\n'
        "[parallelism]\ntensor_paralel_degree = 8\ndisable_loss_parallel = false\ncontext_parallel_degree = 1\n"
        "[metrics]\nlog_freq = 1\n[checkpoint]\nenable = true\n[validation]\nenable = false\nfreq = 5\n"
        '[quantize.linear.float8]\nfilter_fqns = ["output"]\nrecipe = "rowwise"\n[paralelism]\ntensor = 2\n'
    )
    cost, remarks = titan(tmp_path, text)
    assert cost.case.workload.optimizer == "sgd"
    wanted = "optimizer.implementation, parallelism.tensor_paralel_degree, quantize.linear.float8.recipe, "
    wanted += "paralelism.tensor"
    assert remarks.endswith(f"not read: {wanted}")
    cost, remarks = titan(tmp_path, LLAMA + '[optimizer]\nname = "Muon"\n[validation]\nenable = true\n')
    assert cost.case.workload.optimizer == "adam"
    assert "not counted: optimizer Muon, counted as adam" in remarks and "not read: validation.enable" in remarks


@pytest.mark.parametrize(
    ("name", "flavor", "model"),
    [
        ("llama3", "3B", "llama3.2-3b"), ("llama3", "8B_flex", "llama3.1-8b"), ("qwen3", "32B", "qwen3-32b"),
        ("qwen3", "30B-A3B", "qwen3-30b-a3b"), ("deepseek_v3", "16B", "deepseek-v2-lite"),
        ("deepseek_v3", "671B", "deepseek-v3"), ("gpt_oss", "120b", "gpt-oss-120b"),
    ],
)  # fmt: skip
def test_torchtitans_flavors_are_models_of_the_catalogue(tmp_path: Path, name: str, flavor: str, model: str) -> None:
    cost, remarks = titan(tmp_path, f'[model]\nname = "{name}"\nflavor = "{flavor}"\n')
    assert cost.case.model.name == model
    assert ("attention kernel of flavor 8B_flex" in remarks) == flavor.endswith("flex")


@pytest.mark.parametrize(
    ("components", "stack", "fp32_loss"),
    [
        ("", "torchtitan-0.2-compiled", False),
        ('components = ["model", "loss"]', "torchtitan-0.2-compiled", False),
        ('components = ["model"]', "torchtitan-0.2-compiled", True),
        ('components = ["loss"]', "torchtitan-0.2", False),
    ],
)
def test_torchtitan_compiles_the_components_that_are_named(
    tmp_path: Path, components: str, stack: str, fp32_loss: bool
) -> None:
    cost, remarks = titan(tmp_path, f"{LLAMA}[compile]\nenable = true\n{components}\n")
    assert (cost.case.stack.name, cost.case.stack.fp32_loss) == (stack, fp32_loss)
    assert ("the loss alone is compiled" in remarks) == (stack == "torchtitan-0.2")


def test_torchtitan_0_1s_words_are_read(tmp_path: Path) -> None:
    old = f'{LLAMA}converters = ["float8"]\n[training]\ncompile = true\n[float8]\n'
    cost, remarks = titan(tmp_path, old + "enable_fsdp_float8_all_gather = true\n")
    assert cost.case.stack.name == "torchtitan-0.1-compiled" and cost.case.stack.gathers_casts
    assert str(cost.layout).endswith(",fp8") and "not as known" not in remarks and "not read" not in remarks
    cost, _ = titan(tmp_path, old + 'recipe_name = "rowwise"\n[parallelism]\nenable_async_tensor_parallel = true\n')
    assert cost.case.stack.name == "torchtitan-0.2-async-tp" and cost.layout.precision == "fp8_rowwise"
    assert not cost.case.stack.gathers_casts


def test_megatrons_precision_aware_optimizer_holds_states_as_it_is_told(tmp_path: Path) -> None:
    file, size = tmp_path / "run.sh", 1.313e9  # parameters of MEGATRON's model, by its sizes and GPT-2's vocabulary
    text = f"{MEGATRON} --vocab-size 50257 --global-batch-size 64 --use-distributed-optimizer --disable-bias-linear"

    def states(flags: str) -> tuple[float, float, str]:
        """Bytes of a parameter's gradient, and of its share of the optimizer on 8 ranks."""
        cost, remarks = priced(file, f"{text} {flags}", Given("dgx-h100", devices=8))
        memory = cost.estimate.memory[0]
        return memory.gradients * 2**30 / size, memory.optimizer * 2**30 / size * 8, remarks

    aware = "--use-precision-aware-optimizer"
    narrow = "--exp-avg-dtype bf16 --exp-avg-sq-dtype fp8 --main-grads-dtype bf16"
    for flags, gradients, optimizer in (
        ("", 4, 12), (aware, 4, 10), (f"{aware} {narrow}", 2, 5), (narrow, 4, 12),
        (f"{aware} {narrow} --main-params-dtype fp16", 2, 5),
        # a copy in 8 bit lacks more than 16 of 32
        (f"{aware} --fp8-format hybrid --fp8-param-gather", 4, 12),
    ):  # fmt: skip
        counted = states(flags)
        assert counted[:2] == pytest.approx((gradients, optimizer), rel=0.01), flags
        assert "dtype" not in counted[2] and "aware" not in counted[2]
    # what lies on the host is stepped there in fp32
    assert states(f"{aware} {narrow} --optimizer-cpu-offload")[:2] == pytest.approx((2, 0), rel=0.01)
    assert "not counted: --exp-avg-dtype 'fp4', counted as fp32" in states(f"{aware} --exp-avg-dtype fp4")[2]


def test_torchtitan_holds_states_in_bf16_where_it_is_told_to(tmp_path: Path) -> None:
    large = '[model]\nname = "llama3"\nflavor = "70B"\n[training]\nlocal_batch_size = 1\n'
    usual, _ = titan(tmp_path, large)
    pure, remarks = titan(tmp_path, large + 'dtype = "bfloat16"\nmixed_precision_reduce = "bfloat16"\n')
    states = [cost.estimate.memory[0].gradients + cost.estimate.memory[0].optimizer for cost in (usual, pure)]
    # of 16 ranks each: master copy, both moments and gradients in fp32; weights, moments and gradients in bf16
    assert states[0] * 2**30 == pytest.approx(70.55e9 * 16 / 16, rel=0.01)
    assert states[1] * 2**30 == pytest.approx(70.55e9 * 6 / 16, rel=0.01)
    assert str(pure.layout).endswith(",bf16_pure") and remarks == ""
    wide, _ = titan(tmp_path, large + 'dtype = "bfloat16"\n')
    narrow, _ = titan(tmp_path, large + 'mixed_precision_reduce = "bfloat16"\n')
    assert wide.estimate.time.dp == pytest.approx(usual.estimate.time.dp)
    assert narrow.estimate.time.dp == pytest.approx(pure.estimate.time.dp)
    assert pure.estimate.time.dp < usual.estimate.time.dp
    _, remarks = titan(tmp_path, large + 'dtype = "bfloat16"\nmixed_precision_param = "float32"\n')
    assert "not counted: dtype bfloat16 beside fp32" in remarks
    with pytest.raises(TrimaranError, match="dtype is 'float16'"):
        titan(tmp_path, large + 'dtype = "float16"\n')
    # what is held in bf16 is not cast, so that ranks of TP need no FSDP for it
    whole = "[parallelism]\ntensor_parallel_degree = 8\npipeline_parallel_degree = 2\n"
    assert "casts there" in titan(tmp_path, large + whole)[1]
    assert "casts there" not in titan(tmp_path, f'{large}dtype = "bfloat16"\n{whole}')[1]


def test_torchtitans_resharding_is_told_where_it_is_not_counted(tmp_path: Path) -> None:
    for policy, degree, told in (("never", 1, "dropped"), ("always", 1, ""), ("default", 2, ""), ("always", 2, "kept")):
        text = f'{LLAMA}[parallelism]\nfsdp_reshard_after_forward = "{policy}"\npipeline_parallel_degree = {degree}\n'
        _, remarks = titan(tmp_path, text)
        wanted = f"not counted: fsdp_reshard_after_forward {policy}: gathered weights are counted as {told}"
        assert wanted in remarks if told else "reshard" not in remarks


def test_a_model_given_beside_another_that_the_file_names_is_told(tmp_path: Path) -> None:
    qwen = '[model]\nname = "qwen3"\nflavor = "32B"\n'
    _, remarks = titan(tmp_path, qwen, model="qwen3-8b")
    assert "note: the file names qwen3 32B, and you gave qwen3-8b, which is what is counted" in remarks
    _, remarks = titan(tmp_path, LLAMA, model="llama3.1-70b")
    assert "note: the file names llama3 8B, and you gave llama3.1-70b" in remarks
    for text, model in ((qwen.replace("32B", "8B"), "qwen3-8b"), (LLAMA, "llama3.1-8b")):
        assert "the file names" not in titan(tmp_path, text, model=model)[1]
    with pytest.raises(TrimaranError, match=r"it names qwen3 33B, which is not known\): give --model"):
        titan(tmp_path, qwen.replace("32B", "33B"))


def test_what_megatron_bridge_writes_beside_a_checkpoint_is_a_layout(tmp_path: Path) -> None:
    """Names as in run_config.yaml of Megatron-Bridge: sections with `_target_`, experts and stages as lists."""
    model = {
        "_target_": "megatron.bridge.models.GPTModelProvider", "num_layers": 8, "hidden_size": 1024, "vocab_size": 5120,
        "num_attention_heads": 16, "num_query_groups": 16, "ffn_hidden_size": 4096, "gated_linear_unit": True,
        "normalization": "RMSNorm", "add_bias_linear": False, "position_embedding_type": "rope", "seq_length": 2048,
        "share_embeddings_and_output_weights": False, "num_moe_experts": 8, "moe_router_topk": 2,
        "moe_ffn_hidden_size": 512, "moe_layer_freq": [0, *[1] * 7], "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2, "bf16": True, "hidden_dropout": 0.0,
        "moe_token_dispatcher_type": "alltoall", "attention_dropout": 0.0, "params_dtype": "torch.bfloat16",
        "pipeline_model_parallel_layout": [["embedding", *["decoder"] * 5], [*["decoder"] * 3, "loss"]],
    }  # fmt: skip
    ddp = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": False, "overlap_grad_reduce": True}
    recipe = {"model": model, "train": {"micro_batch_size": 1, "global_batch_size": 64}, "ddp": ddp}
    cost, remarks = priced(tmp_path / "run_config.yaml", json.dumps(recipe), Given("dgx-h100", devices=16))
    assert str(cost.layout) == "dp8,tp1,pp2,ep2,mbs1,zero1,bf16,split5-3"
    assert (cost.case.model.dense_layers, cost.case.model.mlp) == (1, "swiglu")
    assert cost.case.stack.grad_bytes_16bit == 2 and "not read" not in remarks


# As Megatron-Bridge writes a function.
FUNCTION = "activation_func: {{_target_: {}, _call_: false}}"
SHAPE = (
    "num_layers: 8\nhidden_size: 1024\nnum_attention_heads: 16\nvocab_size: 5120\nffn_hidden_size: 4096\n"
    "seq_length: 2048\nmicro_batch_size: 1\nglobal_batch_size: 64\nbf16: true\n"
)


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        (f"gated_linear_unit: true\n{FUNCTION.format('torch.nn.functional.silu')}", ("swiglu", 0)),
        (f"gated_linear_unit: true\n{FUNCTION.format('torch.nn.functional.gelu')}", ("geglu", 0)),
        (f"{FUNCTION.format('torch.nn.functional.gelu')}\ngated_linear_unit: true", ("geglu", 0)),
        (f"gated_linear_unit: false\n{FUNCTION.format('torch.nn.functional.gelu')}", ("gelu", 0)),
        ("activation: fast-geglu", ("geglu", 0)),
        (
            "gated_linear_unit: true\nglu_linear_offset: 1.0\nactivation_func_clamp_value: 7.0\n"
            + FUNCTION.format("megatron.core.fusions.fused_bias_geglu.quick_gelu"),
            ("swiglu", 7.0),
        ),
    ],
)  # fmt: skip
def test_a_gate_is_the_one_whose_function_is_stated(tmp_path: Path, settings: str, fields: tuple[str, float]) -> None:
    """GELU's gate was taken for SiLU's, and gpt-oss's for a plain one."""
    cost, remarks = priced(tmp_path / "recipe.yaml", SHAPE + settings, Given("dgx-h100", devices=8))
    assert (cost.case.model.mlp, cost.case.model.swiglu_limit) == fields
    assert "not read" not in remarks and "not counted" not in remarks


def test_windows_yarn_and_4_bit_are_read_as_megatron_bridge_writes_them(tmp_path: Path) -> None:
    further = "window_size: [127, 0]\nfp4: e2m1\nfp4_recipe: nvfp4\nposition_embedding_type: yarn\n"
    further += "yarn_rotary_scaling_factor: 32.0\nyarn_mscale: 1.0\nyarn_correction_range_round_to_int: false\n"
    cost, remarks = priced(tmp_path / "recipe.yaml", SHAPE + further, Given("dgx-b200", devices=8))
    model = cost.case.model
    assert (model.sliding_window, cost.layout.precision) == (128, "nvfp4")
    assert model.rotary_yarn is not None and (model.rotary_yarn.factor, model.rotary_yarn.truncate) == (32.0, False)
    assert "not read" not in remarks


def test_nested_names_may_be_written_as_flags(tmp_path: Path) -> None:
    settings = {
        "num-layers": 32, "hidden-size": 4096, "num-attention-heads": 32, "group-query-attention": True,
        "num-query-groups": 8, "micro-batch-size": 1, "global-batch-size": 8, "seq-length": 8192,
        "max-position-embeddings": 8192, "vocab-size": 131072, "pipeline-model-parallel-size": 4, "bf16": True,
    }  # fmt: skip
    dashed = {"ENV_VARS": {"NCCL_ALGO": "Ring"}, "MODEL_ARGS": {f"--{name}": each for name, each in settings.items()}}
    cost, _ = priced(tmp_path / "model_config.yaml", json.dumps(dashed), Given("dgx-h100", devices=8))
    assert str(cost.layout) == "dp2,tp1,pp4,mbs1,bf16" and cost.case.model.kv_heads == 8


def zero(tmp_path: Path, **settings: object) -> tuple[ConfigCost, str]:
    """The cost of ZeRO's settings on 16 devices, and its remarks."""
    config = {"train_batch_size": 128, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}
    text = json.dumps({**config, "zero_optimization": settings})
    return priced(tmp_path / "ds.json", text, Given("dgx-h100", model="llama3-8b", devices=16, seq_len=2048))


def test_deepspeeds_settings_of_zero_that_are_not_read_are_told(tmp_path: Path) -> None:
    _, remarks = zero(tmp_path, stage=3, zero_quantized_weights=True, zero_quantized_gradients=False, stag=2)
    assert remarks.endswith("not read: zero_optimization.zero_quantized_weights, zero_optimization.stag")
    _, remarks = zero(tmp_path, stage=2, contiguous_gradients=True, reduce_scatter=False)
    assert remarks.endswith("not read: zero_optimization.reduce_scatter")


def test_deepspeeds_deprecated_offloads_are_read(tmp_path: Path) -> None:
    for settings, offload in (
        ({"cpu_offload": True}, "optimizer"),
        ({"cpu_offload": False}, "none"),
        ({"cpu_offload": True, "cpu_offload_param": True}, "weights"),
    ):
        cost, remarks = zero(tmp_path, stage=3, **settings)
        assert cost.layout.offload == offload and "not read" not in remarks
    cost, remarks = zero(tmp_path, stage=3, offload_optimizer={"device": "cpu", "ratio": 0.3})
    assert cost.layout.offload == "optimizer"
    assert "not counted: zero_optimization.offload_optimizer.ratio 0.3, counted as 1" in remarks


@pytest.mark.parametrize(("steps", "mbs"), [(None, 8), (2, 4)])
def test_deepspeed_makes_the_micro_batch_of_a_batch(tmp_path: Path, steps: int | None, mbs: int) -> None:
    config = {"train_batch_size": 128, **({"gradient_accumulation_steps": steps} if steps else {})}
    given = Given("dgx-h100", model="llama3-8b", devices=16, seq_len=2048)
    cost, _ = priced(tmp_path / "ds.json", json.dumps(config), given)
    assert (cost.layout.mbs, cost.layout.dp, cost.case.workload.global_batch) == (mbs, 16, 128)
    with pytest.raises(TrimaranError, match=r"a batch of 136 does not divide into \d steps of 16 replicas"):
        priced(tmp_path / "ds.json", json.dumps({**config, "train_batch_size": 136}), given)
    # Hugging Face's Trainer fills it in, and refuses what does not make the batch with the steps
    auto = json.dumps({**config, "train_micro_batch_size_per_gpu": "auto"})
    if steps:
        assert priced(tmp_path / "ds.json", auto, given)[0].layout.mbs == mbs
        return
    with pytest.raises(TrimaranError, match=r"does not state the micro-batch \(--set mbs=N\)"):
        priced(tmp_path / "ds.json", auto, given)


def test_what_hugging_faces_trainer_fills_in_can_be_stated(tmp_path: Path) -> None:
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    given = Given("dgx-h100", model="llama3-8b", devices=16, seq_len=2048, mbs=2)
    text = json.dumps({**auto, "bf16": {"enabled": "auto"}})
    cost, _ = priced(tmp_path / "ds.json", text, replace(given, global_batch=128))
    assert (cost.layout.mbs, cost.case.workload.global_batch) == (2, 128)
    with pytest.raises(TrimaranError, match=r"does not state the global batch \(--gbs\)"):
        priced(tmp_path / "ds.json", text, given)
    cost, _ = priced(tmp_path / "ds.json", json.dumps({**auto, "gradient_accumulation_steps": 4}), given)
    assert (cost.layout.mbs, cost.case.workload.global_batch) == (2, 2 * 4 * 16)


@pytest.mark.parametrize(
    ("flags", "graphed"),
    [
        ("", ()),
        ("--cuda-graph-impl none", ()),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router", ("attn", "moe_router")),
        ("--cuda-graph-impl local --cuda-graph-scope attn", ("attn",)),
        ("--cuda-graph-impl transformer_engine", ("attn", "mlp", "moe")),
        ("--cuda-graph-impl full_iteration", ("attn", "mlp", "moe")),
        ("--enable-cuda-graph --cuda-graph-scope full_iteration", ("attn", "mlp", "moe")),
        ("--external-cuda-graph", ("attn", "mlp", "moe")),
        ("--cuda-graph-impl local --cuda-graph-modules mamba,attn", ("attn",)),
    ],
)
def test_megatrons_cuda_graphs_are_modules_of_a_layer(tmp_path: Path, flags: str, graphed: tuple[str, ...]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{MEGATRON} {flags}")
    stated = read_config(script)
    assert stated.stack.get("graphed", ()) == graphed
    assert not stated.unread and not [word for word in stated.uncounted if "graph" in word]


def test_a_module_that_no_graph_covers_ends_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{MEGATRON} --cuda-graph-impl local --cuda-graph-modules atn")
    with pytest.raises(TrimaranError, match=r"^--cuda-graph-modules is 'atn': of it only attn, mlp, moe"):
        read_config(script)


def test_what_zero_3_keeps_gathered_and_masters_in_bf16_are_counted(tmp_path: Path) -> None:
    def stated(bf16: dict[str, bool], **settings: float) -> Stated:
        zero = {"stage": 3, **settings}
        (tmp_path / "ds.json").write_text(json.dumps({"bf16": {"enabled": True, **bf16}, "zero_optimization": zero}))
        return read_config(tmp_path / "ds.json")

    found = stated({}, stage3_max_live_parameters=1e8, stage3_max_reuse_distance=0, reduce_bucket_size=2e8)
    sizes = {"live_parameters": 100_000_000, "reuse_parameters": 0, "bucket_elements": 200_000_000}
    assert {name: found.stack[name] for name in sizes} == sizes and not found.unread
    narrow = stated({"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True})
    assert (narrow.stack["master_weight_bytes"], narrow.stack["wide_gradients"]) == (2, ())
    assert narrow.stack["moment_bytes_16bit"] == 2 and not narrow.uncounted


def test_deepspeeds_autotp_and_autoep_are_degrees_of_a_layout(tmp_path: Path) -> None:
    # tensor_parallel/hf_integration and expert_parallel of DeepSpeedExamples, as far as a step feels them
    file = tmp_path / "ds.json"
    config = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}

    def found(model: str, **sections: object) -> tuple[ConfigCost, str]:
        return priced(file, json.dumps(config | sections), Given("dgx-h100", devices=8, model=model, seq_len=2048))

    zero = {"stage": 1}
    tensor, remarks = found("llama2-7b", zero_optimization=zero, tensor_parallel={"autotp_size": 4})
    assert str(tensor.layout) == "dp2,tp4,pp1,mbs2,zero1,bf16" and "not read" not in remarks
    spread, whole = {"enabled": True, "autoep_size": 8}, {"enabled": False, "autoep_size": 8}
    experts, remarks = found("qwen3-30b-a3b", zero_optimization=zero, expert_parallel=spread)
    alone, _ = found("qwen3-30b-a3b", zero_optimization=zero, expert_parallel=whole)
    assert (experts.layout.ep, alone.layout.ep) == (8, 1) and "not read" not in remarks
    # of 30.5 billion parameters 29.0 are experts', of which a rank then holds an eighth
    held = [cost.estimate.memory[0].weights * 2**30 / 2 for cost in (alone, experts)]
    assert held == pytest.approx([30.5e9, 1.54e9 + 29.0e9 / 8], rel=0.01)


@pytest.mark.parametrize("position", ["rope", "mrope"])
def test_values_stand_before_flags_that_are_not_known(tmp_path: Path, position: str) -> None:
    """As `--seq-length 2048 $EXTRA` has it: such values counted as not set, and an argument `${10}` showed as 10."""
    script = tmp_path / "pretrain.sh"
    script.write_text(
        f"TP=${{10}}\ntorchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py {MEGATRON} $EXTRA --vocab-size 32000 "
        f"$MORE --global-batch-size 32 $MORE --tensor-model-parallel-size $TP --position-embedding-type {position}\n"
    )
    cost, said = priced(script, script.read_text(), Given("dgx-h100"))
    assert (cost.case.model.vocab, cost.case.workload.global_batch) == (32000, 32)
    # of text the three positions of mrope, as Qwen-VL has them, are equal
    assert (cost.case.model.positions, str(cost.layout)) == ("rotary", "dp8,tp1,pp1,mbs2,bf16")
    assert "--tensor-model-parallel-size is $10, which the file does not set" in said and "EXTRA" not in said


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("apply_rope_fusion", "--no-rope-fusion"), ("masked_softmax_fusion", "--no-masked-softmax-fusion"),
        ("bias_swiglu_fusion", "--no-bias-swiglu-fusion"), ("gradient_accumulation_fusion", None),
    ],
)  # fmt: skip
def test_what_a_recipe_switches_off_is_told_as_the_flag_that_does_so(
    tmp_path: Path, name: str, told: str | None
) -> None:
    """Megatron-Bridge and NeMo state these as true or false, for which Megatron-LM has a flag of the second alone."""
    plain = "num_layers: 24\nhidden_size: 2048\nnum_attention_heads: 16\nseq_length: 2048\nmicro_batch_size: 2\n"
    file = tmp_path / "recipe.yaml"
    file.write_text(f"{plain}{name}: false\n")
    stated = read_config(file)
    assert stated.uncounted == ([told] if told else []) and not stated.unread
    assert stated.stack.get("fused_accumulation") == (None if told else "never")


def test_a_precision_that_a_trainer_fills_in_is_told(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    for sections, told in (
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, "bf16.enabled is auto"),
        ({"fp16": {"enabled": "auto"}}, "fp16.enabled is auto"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}}, None),
    ):
        file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, **sections}))
        said = "; ".join(read_config(file).open)
        assert (f"{told}, which Hugging Face's Trainer fills in" in said) if told else not said
