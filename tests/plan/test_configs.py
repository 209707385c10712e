"""Configurations of other trainers are read as the layout that they state, and what they do not state is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from trimaran.api import workload_of
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.layout.layout import Layout, resolve_split
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import violations
from trimaran.layout.stages import even_split
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.stack import FOLDED, Schedule, Stack
from trimaran.nouns.workload import Workload
from trimaran.planner.configs.cost import cost_of
from trimaran.planner.configs.read import read_config
from trimaran.planner.configs.resolve import Given, layout_of
from trimaran.planner.export.exporters import export

STACKS = {name: load_stack(name) for name in ("megatron", "megatron-core", "torchtitan", "deepspeed")}
MODELS = ["gpt3-1b3", "llama3.1-8b", "qwen3-8b", "qwen2.5-7b", "mistral-7b"]
MODELS += ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b"]
SUFFIXES = {("megatron-lm", None): "run.sh", ("torchtitan", "0.2"): "job.toml", ("torchtitan", "0.3"): "planned.py",
            ("deepspeed", None): "ds.json", ("deepspeed", "0.18"): "ds.json"}  # fmt: skip
PLAIN = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
PLAIN += "--vocab-size 51200 --micro-batch-size 2 --global-batch-size 64 --bf16 "


# What each trainer can be told at all, so that most of what is drawn is written.
USUAL, NODES = ("tp", "dp", "pp"), ("tp", "pp", "dp")
ABLE: dict[str, dict[str, list[Any]]] = {
    "megatron-lm": {
        "tp": [1, 2, 4], "pp": [1, 2, 3, 4, 8], "zero_stage": [0, 1, 2, 3], "schedule": ["1f1b"],
        "precision": ["fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"], "placement": [USUAL, NODES],
        "recompute": ["none", "selective", "full", "mlp", "core_attn+layernorm", "moe_act"],
        "cp": [1, 1, 2], "cp_kind": ["ring", "all_gather", "ulysses"], "ep": [1, 2, 8],
        "dispatcher": ["allgather", "alltoall", "deepep", "hybridep"], "etp": [0, 1],
    },
    "torchtitan": {
        "tp": [1, 2, 4], "pp": [1, 2, 3, 4, 8], "zero_stage": [0, 3], "schedule": ["1f1b", "gpipe"],
        "precision": ["fp32", "bf16", "bf16_pure", "fp8", "fp8_rowwise", "mxfp8"], "placement": [USUAL],
        "recompute": ["none", "selective", "full"], "cp": [1, 1, 2], "cp_kind": ["ring", "all_gather"],
        "ep": [1, 2, 8], "dispatcher": ["alltoall", "deepep", "hybridep"], "etp": [0, 1],
    },
    "deepspeed": {
        "tp": [1], "pp": [1], "zero_stage": [0, 1, 2, 3], "schedule": ["1f1b"], "precision": ["fp32", "fp16", "bf16"],
        "placement": [USUAL], "recompute": ["none"], "cp": [1, 1, 2], "cp_kind": ["ulysses"],
    },
}  # fmt: skip


@st.composite
def layouts(draw: st.DrawFn, trainer: str) -> tuple[Layout, Workload]:
    """A layout of a model, whose global batch is as many micro-batches as it likes."""
    model = draw(st.sampled_from(MODELS))
    fields = {name: draw(st.sampled_from(values)) for name, values in ABLE[trainer].items()}
    pp = fields["pp"]
    vpp = draw(st.sampled_from([1, 1, 2, 3])) if pp > 1 else 1
    dp, mbs = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([1, 2, 4]))
    workload = workload_of(model, dp * mbs * draw(st.integers(1, 8)) * pp)
    if not workload.model.experts:
        fields |= {"ep": 1, "etp": 0, "dispatcher": "alltoall"}
    if fields["cp"] == 1:
        fields["cp_kind"] = "ring"
    if dp == 8 and fields["zero_stage"]:
        fields["shard"] = draw(st.sampled_from([0, 0, 2, 4]))
    fields |= {"dp": dp, "mbs": mbs, "vpp": vpp, "recompute_every": draw(st.sampled_from([1, 1, 2]))}
    fields["sequence_parallel"] = fields["tp"] > 1 and draw(st.booleans())
    several: tuple[Schedule, ...] = (
        ("interleaved", *FOLDED) if trainer == "torchtitan" and vpp == 2 else ("interleaved",)
    )
    fields["schedule"] = draw(st.sampled_from(several)) if vpp > 1 else fields["schedule"] if pp > 1 else "none"
    if fields["schedule"] == "dualpipev" and fields["ep"] > 1:
        fields["ep_overlap"] = draw(st.sampled_from(["none", "batch"]))
    if fields["zero_stage"] == 3:
        fields["dp_kind"] = "fully_sharded"
    if pp > 1 and draw(st.booleans()):
        split = list(even_split(workload.model.layers, pp * vpp))
        for _ in range(draw(st.integers(0, 3))):
            one, other = (draw(st.integers(0, len(split) - 1)) for _ in range(2))
            if split[other] > 1:
                split[one] += 1
                split[other] -= 1
        fields["stage_split"] = tuple(split)
    return Layout.model_validate(fields), workload


def runs(layout: Layout, workload: Workload, stack: Stack) -> Layout:
    """The layout with the stages that it really runs, and what makes no difference as it is read."""
    update: dict[str, object] = {"stage_split": resolve_split(layout, workload, stack) if layout.pp > 1 else ()}
    if layout.recompute != "full":
        update["recompute_every"] = 1
    # what is not parallel is laid out by no word of its own, and a part that is the whole by none either
    update["etp"] = layout.size("etp") if workload.model.experts else 0
    update["shard"] = 0 if layout.shard == layout.dp else layout.shard
    if layout.ep == 1:
        update |= {"dispatcher": "alltoall", "etp": 0}
    if layout.dp == 1 and layout.zero_stage == 3 and layout.cp == 1:
        update |= {"zero_stage": 0, "dp_kind": "all_reduce"}
    return layout.model_copy(update=update)


@pytest.mark.parametrize(("trainer", "version"), SUFFIXES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_exported_is_read_back_as_the_same_layout(
    tmp_path: Path, trainer: str, version: str | None, data: st.DataObject
) -> None:
    layout, workload = data.draw(layouts(trainer))
    stack = data.draw(st.sampled_from(sorted(STACKS)))
    try:
        resolve_split(layout, workload, STACKS[stack])
        text = export(layout, workload, STACKS[stack], trainer, version)
    except TrimaranError:
        assume(False)
    file = tmp_path / SUFFIXES[trainer, version]
    file.write_text(text)
    stated = read_config(file)
    name = None if trainer == "megatron-lm" else workload.model.name
    given_ = Given("dgx-h100", model=name, devices=layout.devices, seq_len=workload.seq_len)
    read, asked, remarks = layout_of(stated, given_, STACKS[stack], file.name)
    wanted = runs(layout, workload, STACKS[stack])
    # where a stage has few layers, every layer and every second one may be the same
    again = runs(read, asked, STACKS[stack])
    if trainer == "megatron-lm" and wanted.recompute_every > 1:
        again = again.model_copy(update={"recompute_every": wanted.recompute_every})
    assert again == wanted, text
    assert (asked.global_batch, asked.seq_len, asked.optimizer) == (workload.global_batch, workload.seq_len, "adam")
    # Megatron-LM scores a group of experts by a rule of its own
    router = workload.model.router.model_copy(update={"group_best": asked.model.router.group_best})
    trained = STACKS[stack].trained(workload.model) if trainer == "megatron-lm" else workload.model
    assert asked.model.model_copy(update={"name": ""}) == trained.model_copy(
        update={"name": "", "activation": asked.model.activation, "router": router}
    )
    told = ("open", "not counted", "not stated", *([] if trainer == "megatron-lm" else ["not read"]))
    assert not [sentence for kind, sentence in remarks if kind in told]


@pytest.mark.parametrize(
    ("layout", "stack"),
    [
        ("dp8,tp2,sp,zero1,mbs1,bf16", "megatron-core"),
        ("dp8,mbs1,zero1,fp8", "megatron-core"),
        ("dp8,mbs1,zero2,bf16", "megatron-core-fsdp"),
        ("dp8,cp2,mbs1,zero3,fsdp,recompute-full,fp8", "megatron-core-fsdp"),
        ("dp8,shard4,tp2,sp,mbs1,zero3,fsdp,bf16", "megatron-core-fsdp"),
        ("dp4,cp2,mbs1,zero3,fsdp,recompute-full,fp8", "megatron-core-torch-fsdp2"),
    ],
)
def test_a_layout_read_back_costs_what_it_costs_by_itself(tmp_path: Path, layout: str, stack: str) -> None:
    """The stack's facts that flags switch on are those that the planner counted, and so are time and memory."""
    workload, wanted, planned = workload_of("llama3.1-8b", 64), parse_layout(layout), load_stack(stack)
    file = tmp_path / "run.sh"
    file.write_text(export(wanted, workload, planned, "megatron-lm"))
    cost = cost_of(file, "auto", Given("dgx-h100", devices=wanted.devices))
    case = Case.of(workload, cost.case.cluster, planned)
    assert cost.case.stack.name == stack
    assert cost.estimate.sec_per_it == pytest.approx(estimate(case, wanted).sec_per_it, rel=1e-6)
    assert cost.estimate.mem_gib == pytest.approx(estimate(case, wanted).mem_gib, rel=1e-6)


def read(
    tmp_path: Path, text: str, name: str = "run.sh", devices: int | None = 16, **given_: object
) -> tuple[Layout, Workload, str]:
    """Layout, workload and all remarks of a text."""
    file = tmp_path / name
    file.write_text(text)
    stated = read_config(file)
    options = Given("dgx-h100", devices=devices, **given_)  # type: ignore[arg-type]
    layout, workload, remarks = layout_of(stated, options, STACKS["megatron-core"], file.name)
    return layout, workload, "\n".join(f"{kind}: {sentence}" for kind, sentence in remarks)


def test_what_is_not_stated_is_named_and_nothing_is_made_up(tmp_path: Path) -> None:
    with pytest.raises(TrimaranError, match=r"heads \(--num-attention-heads\), vocab \(--vocab-size\): add --set v"):
        read(tmp_path, "--num-layers 24 --hidden-size 2048 --micro-batch-size 1 --seq-length 2048")
    with pytest.raises(TrimaranError, match=r"--micro-batch-size is MBS, which the file does not set"):
        read(tmp_path, f"{PLAIN} --micro-batch-size $MBS")
    with pytest.raises(TrimaranError, match=r"--micro-batch-size is \$2, which the file does not set"):
        read(tmp_path, f"{PLAIN} --micro-batch-size $2")
    with pytest.raises(TrimaranError, match=r"--micro-batch-size is \(\(GBS / \$DP\)\), which the file does not set"):
        read(tmp_path, f'MBS=$(( GBS / $DP ))\nA="{PLAIN} --micro-batch-size $MBS"\npython pretrain_gpt.py $A')
    layout, workload, remarks = read(tmp_path, PLAIN.replace("--global-batch-size 64", ""))
    assert workload.global_batch == layout.dp * layout.mbs == 32 and "not stated: the global batch" in remarks
    layout, _, remarks = read(tmp_path, PLAIN.replace("--bf16", ""))
    assert layout.precision == "fp32" and "neither --bf16 nor --fp16 is stated" in remarks
    _, workload, _ = read(tmp_path, PLAIN)
    assert workload.model.dropout == 0.1  # as Megatron-LM has it where nothing is said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"{PLAIN} --num-experts 8 --moe-layer-freq '([1]*2+[0]*22)'", "only layers without experts that come first"),
        (f"{PLAIN} --num-experts 8 --moe-shared-expert-intermediate-size 100", "not a multiple of an expert's width"),
        (f"{PLAIN} --context-parallel-size 3", "TP x CP x PP = 3 does not divide 16 devices"),
        (f"{PLAIN} --context-parallel-size 2 --cp-comm-type a2a+p2p", "--cp-comm-type is 'a2a+p2p'"),
        (f"{PLAIN} --mtp-use-repeated-layer", "--mtp-use-repeated-layer makes a model"),
        (f"{PLAIN} --tensor-model-parallel-size two", "--tensor-model-parallel-size is 'two', expected a whole number"),
        (f"{PLAIN} --tensor-model-parallel-size 3", "does not divide 16 devices"),
        (f"{PLAIN} --tensor-model-parallel-size 0", "TP x PP = 0"),
        (
            f"{PLAIN} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*99999999|tL'",
            "100000 layers",
        ),
        (f"{PLAIN} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Ett|m|L|t'", "only layers t"),
        (f"{PLAIN} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Ettm|ttL'", "m before L"),
        (f"{PLAIN} --pipeline-model-parallel-size 16", "do not divide into 16 stages"),
        (f"{PLAIN} --rampup-batch-size 32", "start, increment and samples"),
        (f"{PLAIN} --normalization BatchNorm", "BatchNorm"),
        (f"{PLAIN} --micro-batch-size", "--micro-batch-size has no value"),
        ("echo hello", "states nothing that is known of a training"),
        ("", "states nothing that is known of a training"),
        ('A="x"\n' + "A=$A$A\n" * 40 + PLAIN, "grows beyond"),
        ("(" * 50_000, "states nothing"),
    ],
)
def test_what_cannot_be_said_ends_in_one_line(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(TrimaranError) as refused:
        read(tmp_path, text)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("job.toml", "[parallelism\n", "is not valid TOML"),
        ("job.toml", 'parallelism = 3', "parallelism is not a section"),
        ("job.toml", "[parallelism]\ntensor_parallel_degree = 'two'", "tensor_parallel_degree is"),
        ("job.toml", "[parallelism]\ncontext_parallel_degree = -2", "context_parallel_degree is '-2'"),
        ("job.toml", "[parallelism]\nexpert_parallel_degree = 2\nexpert_parallel_comm_backend = 'x'", "is 'x'"),
        ("job.toml", "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'ZBV'", "ZBV"),
        ("job.toml", "[activation_checkpoint]\nmode = 'memory_budget'", "memory_budget"),
        ("ds.json", "{", "is not valid JSON"),
        ("ds.json", "[" * 100_000, "nested too deep"),
        ("ds.json", '{"train_batch_size": "many"}', "train_batch_size is 'many'"),
        ("ds.json", '{"zero_optimization": {"stage": 7}}', "stage is '7'"),
        ("ds.json", '{"zero_optimization": {"zero_hpz_partition_size": 4}}', "zero_hpz_partition_size is 4"),
        ("ds.json", '{"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}',
         "7 is not a multiple"),
        ("nemo.yaml", "model: {num_layers: 3", "is not valid YAML"),
        ("nemo.yaml", "a: &a [1, 2]\nb: [*a, *a]", "repeats a part by *a"),
        ("nemo.yaml", "[" * 40 + "]" * 40, "nested more than 32 deep"),
        ("nemo.yaml", "- 1\n- 2", "no table of settings"),
        ("nemo.yaml", "!!python/object/apply:os.system ['true']", "is not valid YAML"),
        ("planned.py", "def planned(:", "is not valid Python"),
        ("planned.py", "x = 1", "has 0 functions"),
        ("run.sh", "--num-layers \x00", "is no text"),
    ],
)  # fmt: skip
def test_a_broken_file_ends_in_one_line(tmp_path: Path, name: str, content: str, sentence: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(TrimaranError) as refused:
        layout_of(read_config(file), Given("dgx-h100", model="llama3-8b"), STACKS["torchtitan"], name)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


def test_what_is_no_regular_file_ends_in_one_line(tmp_path: Path) -> None:
    pipe, large, binary = tmp_path / "pipe.sh", tmp_path / "large.sh", tmp_path / "binary.sh"
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate(2**30)
    binary.write_bytes(bytes(range(256)))
    for path, sentence in (
        (pipe, "a pipe"),
        (large, "more than 524288 bytes"),
        (binary, "UTF-8"),
        (tmp_path, "a folder"),
        (tmp_path / "no", "No such"),
    ):
        with pytest.raises(TrimaranError) as refused:
            read_config(path)
        assert sentence in str(refused.value) and "\n" not in str(refused.value)


NEMO = """
trainer: {devices: 8, num_nodes: 2, precision: bf16}
model:
  micro_batch_size: 2
  global_batch_size: 64
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: 2
  sequence_parallel: true
  encoder_seq_length: 4096
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 14336
  num_attention_heads: 32
  num_query_groups: 8
  vocab_size: 128256
  normalization: rmsnorm
  bias: false
  activation: fast-swiglu
  share_embeddings_and_output_weights: false
  position_embedding_type: rope
  hidden_dropout: 0.0
  attention_dropout: 0.0
  activations_checkpoint_granularity: selective
  optim: {name: distributed_fused_adam, lr: 3e-4}
"""


def test_a_nemo_recipe_is_a_layout(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(NEMO)
    cost = cost_of(file, "auto", Given("dgx-h100"))
    assert str(cost.layout) == "dp4,tp2,pp2,vpp2,mbs2,zero1,sp,recompute-selective,bf16" and cost.devices == 16
    model = cost.case.model
    assert (model.kv_heads, model.mlp, model.norm, model.max_positions) == (8, "swiglu", "rmsnorm", 4096)
    assert not model.bias and not model.tied_embedding and model.dropout == 0.0
    assert cost.estimate.sec_per_it > 0
    file.write_text(NEMO.replace("fast-swiglu", "squared-relu"))
    assert cost_of(file, "auto", Given("dgx-h100")).case.model.mlp == "relu2"
    as_bridge = "activation_func: {_target_: megatron.core.activations.squared_relu, _call_: false}"
    file.write_text(NEMO.replace("activation: fast-swiglu", as_bridge))
    assert cost_of(file, "auto", Given("dgx-h100")).case.model.mlp == "relu2"
    plain = {
        "num_layers": 32, "tensor_model_parallel_size": 4, "micro_batch_size": 1, "vocab_size": 50304, "bf16": True,
        "hidden_size": 4096, "num_attention_heads": 32, "seq_length": 2048, "global_batch_size": 64,
    }  # fmt: skip
    flat = tmp_path / "args.json"
    flat.write_text(json.dumps(plain))
    assert str(cost_of(flat, "auto", Given("dgx-h100", devices=8)).layout) == "dp2,tp4,pp1,mbs1,bf16"


def test_torchtitans_defaults_are_those_of_its_source(tmp_path: Path) -> None:
    bare = '[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\ntensor_parallel_degree = 2\n'
    layout, workload, _ = read(tmp_path, bare, "job.toml")
    # shards are what is left of the devices, every second layer is made again, a batch of 8 a replica, 2048 tokens
    assert str(layout) == "dp8,tp2,pp1,mbs8,zero3,fsdp,sp,recompute-full2,bf16"
    assert (workload.seq_len, workload.global_batch, workload.model.name) == (2048, 64, "llama3.1-8b")
    newer = """
def planned():
    config = llama3_8b()
    config.training = TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 8192, max_context_length=8192)
    config.parallelism = ParallelismConfig(pipeline_parallel_degree=2, num_pp_microbatches=4)
    config.activation_checkpoint = FullAC.Config()
    return config
"""
    layout, workload, _ = read(tmp_path, newer, "registry.py")
    assert str(layout) == "dp8,tp1,pp2,mbs2,zero3,fsdp,recompute-full,bf16"
    assert (workload.global_batch, workload.seq_len) == (64, 8192)


def test_deepspeed_says_what_is_left_to_the_trainer_around_it(tmp_path: Path) -> None:
    auto = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}
    with pytest.raises(
        TrimaranError, match="train_micro_batch_size_per_gpu is auto, which Hugging Face's Trainer fills in"
    ):
        read(tmp_path, json.dumps(auto), "ds.json", model="llama3-8b")
    offloading = {
        "train_batch_size": 128, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": 1.0,
    }  # fmt: skip
    with pytest.raises(TrimaranError, match=r"does not state the sequence length \(--seq-len\)"):
        read(tmp_path, json.dumps(offloading), "ds.json", model="llama3-8b")
    layout, workload, remarks = read(tmp_path, json.dumps(offloading), "ds.json", model="llama3-8b", seq_len=8192)
    assert str(layout) == "dp16,tp1,pp1,mbs2,zero3,fsdp,offload-optimizer,bf16" and workload.global_batch == 128
    assert "not read: gradient_clipping" in remarks


def test_a_model_that_the_file_contradicts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrimaranError, match=r"states layers 24, and llama3-8b has 32"):
        read(tmp_path, PLAIN, model="llama3-8b")


@pytest.mark.parametrize("version", ["0.15", "0.17", "0.18", "0.19"])
def test_the_token_that_a_null_tokenizer_adds_is_counted_of_the_core_that_the_script_is_for(
    tmp_path: Path, version: str
) -> None:
    workload, core = workload_of("gpt3-175b", 1536), STACKS["megatron-core"]
    script = export(parse_layout("dp2,tp8,mbs1,sp,zero1,bf16"), workload, core, "megatron-lm", version)
    assert f"--vocab-size {50256 if version < '0.18' else 50257} " in script
    assert read(tmp_path, script, model="gpt3-175b")[1].model.vocab == 50257


def test_megatron_deepspeeds_words_of_positions_and_stages_are_read(tmp_path: Path) -> None:
    workload, stack = workload_of("bloom-176b", 2048), load_stack("megatron-deepspeed")
    asked = parse_layout("dp8,tp4,pp12,mbs2,zero1,recompute-full,bf16")
    script = export(asked, workload, stack, "megatron-deepspeed")
    layout, read_back, _ = read(tmp_path, script, devices=384, model="bloom-176b")
    assert read_back.model.positions == "alibi" and layout == asked
    bare = script.replace("--pad-vocab-size-to", "--padded-vocab-size")
    model = read(tmp_path, bare, devices=384)[1].model
    assert (model.positions, model.embedding_norm) == ("alibi", True)


@pytest.mark.parametrize(
    ("written", "fields"),
    [
        ("'([0]*1+[1]*1)*24'", {"experts_every": 2}),
        ("2", {"experts_every": 2}),
        ("'([1]*1+[0]*2)*16'", {"experts_every": 3}),
        ("'[0,0,1]*16'", {"experts_every": 3}),
        ("'([0]*3+[1]*45)'", {"dense_layers": 3}),
        ("1", {}),
    ],
)
def test_which_of_megatrons_layers_have_experts_is_read(tmp_path: Path, written: str, fields: dict[str, int]) -> None:
    workload, core = workload_of("qwen3-30b-a3b", 64), STACKS["megatron-core"]
    script = export(parse_layout("dp8,ep8,mbs1,zero1,bf16"), workload, core, "megatron-lm")
    model = read(tmp_path, f"{script} \\\n--moe-layer-freq {written}")[1].model
    assert {name: getattr(model, name) for name in ("experts_every", "dense_layers")} == {
        "experts_every": 1, "dense_layers": 0, **fields,
    }  # fmt: skip


def test_experts_between_dense_layers_are_written_for_megatron_and_refused_by_what_trains_none(tmp_path: Path) -> None:
    whole = workload_of("qwen3-30b-a3b", 64)
    workload = whole.model_copy(update={"model": whole.model.model_copy(update={"experts_every": 4})})
    layout = parse_layout("dp8,ep8,mbs1,zero1,bf16")
    script = export(layout, workload, STACKS["megatron-core"], "megatron-lm")
    assert "--moe-layer-freq '([0]*3+[1]*1)*12'" in script
    assert read(tmp_path, script)[1].model.experts_every == 4
    broken = [each.rule for each in violations(layout, workload, load_cluster("dgx-h100"), load_stack("trimaran"))]
    assert "model_traits" in broken


def test_other_patterns_of_layers_with_experts_are_refused(tmp_path: Path) -> None:
    script = export(
        parse_layout("dp8,ep8,mbs1,zero1,bf16"),
        workload_of("qwen3-30b-a3b", 64),
        STACKS["megatron-core"],
        "megatron-lm",
    )
    for written in ("'([0]*2+[1]*2)*12'", "'([0]*1+[1]*1)*24+[0]'", "0", "'([1]*47+[0])'"):
        with pytest.raises(TrimaranError, match="only layers without experts that come first"):
            read(tmp_path, f"{script} \\\n--moe-layer-freq {written}")
