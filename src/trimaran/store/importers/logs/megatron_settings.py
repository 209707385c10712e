"""What Megatron-LM's printed arguments say of model, layout and software, as cells of a row.

Names are those of megatron/training/arguments.py at core_v0.19.0 and of the versions before it, of Megatron-DeepSpeed's
and GPT-NeoX's forks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from trimaran.nouns.columns import Cell
from trimaran.nouns.precision import BY_DTYPE
from trimaran.store.importers.logs.steps import LogReading, mixture, optimizer_cell, stated_cell

_COLUMNS = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "ffn_hidden_size": "ffn_hidden",
    "num_attention_heads": "heads",
    "num_query_groups": "kv_heads",
    "seq_length": "seq_len",
    "padded_vocab_size": "vocab",
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "virtual_pipeline_model_parallel_size": "vpp",
    "data_parallel_size": "dp",
    "world_size": "devices",
    "micro_batch_size": "mbs",
    "global_batch_size": "gbs",
    "zero_stage": "zero_stage",
    "model_parallel_size": "tp",
    "pipe_parallel_size": "pp",
    "train_micro_batch_size_per_gpu": "mbs",
    "train_batch_size": "gbs",
}
_OF_EXPERTS = {
    "num_experts": "experts",
    "moe_router_topk": "top_k",
    "moe_ffn_hidden_size": "moe_ffn_hidden",
    "expert_tensor_parallel_size": "etp",
    "moe_expert_capacity_factor": "capacity_factor",
}
_DISPATCHERS = {"allgather": "allgather", "alltoall": "alltoall", "alltoall_seq": "alltoall"}
_CONTEXT_KINDS = {"p2p": "ring", "all_gather": "all_gather", "allgather": "all_gather", "a2a": "ulysses"}
# Values of `num_experts` that stand for a dense model.
_DENSE = ("None", "0", "1", "[1]")
_PRECISIONS = {
    **{f"torch.{dtype}": precision for dtype, precision in BY_DTYPE.items()},
    **{"torch.half": "fp16", "fp16": "fp16", "bfloat16": "bf16", "fp32": "fp32"},
}
# By `data_parallel_sharding_strategy` of Megatron's own FSDP.
_FSDP_STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
NAMES = frozenset({*_COLUMNS, *_OF_EXPERTS, "use_distributed_optimizer", "activations_checkpoint_method"})
_OFF = ("None", "False", "0", "")
# What makes another model than a row can say; Primus prints the third, for DeepSeek-V4.
_UNSAID = {
    "is_hybrid_model": "layers of state spaces stand between those that a row can say",
    "experimental_attention_variant": "no row can say such an attention",
    "hybrid_attention_enabled": "no row can say attention that differs from layer to layer",
    "heterogeneous_layers_config_path": "no row can say layers of several shapes",
    "peft": "no row can say that adapters alone are trained",
}
# What a model of the catalogue may have, and no column can say of another.
_ONLY_NAMED = ("mtp_num_layers", "window_size")
# What gives stages unlike numbers of layers; no column says of which.
_UNEVEN = (
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout",
)  # fmt: skip


def set_up(reading: LogReading, arguments: Mapping[str, str]) -> None:
    """State what the arguments do, by name, in a reading; arguments that no column can say refuse its row."""
    cells = {column: stated_cell(column, arguments[name]) for name, column in _COLUMNS.items() if name in arguments}
    cells["optimizer"] = optimizer_cell(arguments.get("optimizer", arguments.get("optimizer_type")))
    cells["precision"] = _precision(arguments)
    if arguments.get("group_query_attention") == "False":
        cells["kv_heads"] = None
    if arguments.get("swiglu") in ("True", "False"):
        cells["mlp"] = "swiglu" if _on(arguments, "swiglu") else None
    for name, mlp in {"geglu": "geglu", "squared_relu": "relu2"}.items():
        if _on(arguments, name):
            cells["mlp"] = mlp
    if cells.get("pp") == 0:  # GPT-NeoX's word for none
        cells["pp"] = 1
    interleaved = isinstance(cells.get("vpp"), int) and arguments.get("virtual_pipeline_model_parallel_size") != "None"
    cells["vpp"] = cells.get("vpp") if interleaved else None
    if cells.get("cp") not in (None, 1):
        cells["cp_kind"] = _CONTEXT_KINDS.get(arguments.get("cp_comm_type", "").strip("[]'"))
    cells |= _attention(arguments, cells)
    cells |= _sharding(arguments)
    cells |= _groups(arguments, cells)
    recompute, unsaid = recompute_of(arguments, cells)
    cells["recompute"] = recompute
    reading.notes += [unsaid] if unsaid else []
    if _on(arguments, "optimizer_cpu_offload"):
        cells["offload"] = "optimizer"
    elif _on(arguments, "cpu_offloading"):
        cells["offload"] = "activations"
    reading.cells |= {name: value for name, value in cells.items() if value is not None}
    _experts(reading, arguments)
    reading.notes += [
        f"{name} is {arguments[name][:40]}, which no column says: --model names a model that has it"
        for name in _ONLY_NAMED
        if _on(arguments, name)
    ]
    reading.notes += [
        f"{name} is {arguments[name][:40]}: stages have unlike numbers of layers, which no column says"
        for name in _UNEVEN
        if _on(arguments, name)
    ]
    for name, why in _UNSAID.items():
        if _on(arguments, name):
            reading.refusal = f"{name} is {arguments[name][:40]}: {why}"


def stack_of(arguments: Mapping[str, str], cells: Mapping[str, Cell], *, deepspeed: bool, today: bool) -> str:
    """The stack as which it ran: under DeepSpeed or not, of `today` or of 2021, and what it asked for beside."""
    stage, ulysses = cells.get("zero_stage"), cells.get("cp_kind") == "ulysses"
    sharded = isinstance(stage, int) and stage > 1
    if deepspeed:
        flash = any(_on(arguments, f"use_flash_attn{kind}") for kind in ("", "_v1", "_v2", "_triton", "_builder"))
        return "megatron-deepspeed-2025" if flash or ulysses or sharded else "megatron-deepspeed"
    if sharded and (_on(arguments, "use_megatron_fsdp") or _on(arguments, "use_torch_fsdp2")):
        return "megatron-core-fsdp" if _on(arguments, "use_megatron_fsdp") else "megatron-core-torch-fsdp2"
    if today and _on(arguments, "tp_comm_overlap"):
        return "megatron-core-tp-overlap"
    if today and _is_graphed(arguments):
        return "megatron-core-graphs"
    return "megatron-core" if today else "megatron"


def _on(arguments: Mapping[str, str], name: str) -> bool:
    """Whether a switch is on, or a choice made."""
    return arguments.get(name, "") not in _OFF


def _is_graphed(arguments: Mapping[str, str]) -> bool:
    """Whether attention and MLP of a layer are replayed as CUDA graphs (transformer_config.py, cuda_graph_impl)."""
    if arguments.get("cuda_graph_impl", "none") == "none" and not any(
        arguments.get(switch) == "True" for switch in ("enable_cuda_graph", "external_cuda_graph")
    ):
        return False
    scope = arguments.get("cuda_graph_modules", arguments.get("cuda_graph_scope", ""))
    named = set(re.findall(r"full|attn|mlp|moe_router", scope))
    return not named or "full" in named or ("attn" in named and len(named) > 1)


def _precision(arguments: Mapping[str, str]) -> str | None:
    if _on(arguments, "fp4"):
        return "nvfp4"
    if _on(arguments, "fp8"):
        return "mxfp8" if arguments.get("fp8_recipe") == "mxfp8" else "fp8"
    return _PRECISIONS.get(arguments.get("params_dtype", arguments.get("precision", "")))


def _attention(arguments: Mapping[str, str], cells: Mapping[str, Cell]) -> dict[str, Cell]:
    if _on(arguments, "multi_latent_attention"):
        return {"attention": "mla", "kv_heads": None}
    hidden, heads = cells.get("hidden"), cells.get("heads")
    width = stated_cell("head_dim", arguments.get("kv_channels", "None"))
    usual = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else width
    return {"head_dim": width} if isinstance(width, int) and width != usual else {}


def _sharding(arguments: Mapping[str, str]) -> dict[str, Cell]:
    """What replicas share out, from which it follows how they agree."""
    if _on(arguments, "use_megatron_fsdp") or _on(arguments, "use_custom_fsdp"):
        return {"zero_stage": _FSDP_STAGES.get(arguments.get("data_parallel_sharding_strategy", "no_shard"))}
    if _on(arguments, "use_torch_fsdp2"):
        kept = arguments.get("torch_fsdp2_reshard_after_forward") == "False"
        return {"zero_stage": 2 if kept else 3}
    if "zero_stage" in arguments or _on(arguments, "deepspeed"):
        return {}
    distributed = arguments.get("use_distributed_optimizer")
    return {} if distributed is None else {"zero_stage": int(distributed == "True")}


def _groups(arguments: Mapping[str, str], cells: Mapping[str, Cell]) -> dict[str, Cell]:
    """How many replicas share out the optimizer, where that is in several instances."""
    instances = arguments.get("num_distributed_optimizer_instances", "1")
    dp = cells.get("dp")
    if not (instances.isdecimal() and int(instances) > 1 and isinstance(dp, int) and cells.get("zero_stage")):
        return {}
    return {"shard": dp // int(instances)} if dp % int(instances) == 0 else {}


def recompute_of(arguments: Mapping[str, str], cells: Mapping[str, Cell]) -> tuple[str | None, str]:
    """The table's word for what arguments say is computed again, and what no word says.

    Of a block of each stage's layers the words can say none and all.
    """
    granularity = arguments.get("recompute_granularity")
    method = arguments.get("recompute_method", arguments.get("activations_checkpoint_method"))
    switch = arguments.get("checkpoint_activations")
    modules = re.findall(r"\w+", arguments.get("recompute_modules", "None").replace("None", ""))
    if _on(arguments, "moe_layer_recompute"):  # transformer_config.py, __post_init__: beside the others, or core_attn
        granularity, modules = "selective", [*(modules or ["core_attn"]), *(["moe"] if "moe" not in modules else [])]
    if granularity == "selective":
        return ("selective" if set(modules) <= {"core_attn"} else "+".join(modules)), ""
    if granularity == "full" or (granularity is None and method in ("uniform", "block")) or switch == "True":
        number = arguments.get("recompute_num_layers", arguments.get("activations_checkpoint_num_layers", "1"))
        if method == "block" and number == "0":
            return "none", ""
        if method == "block" and not _all_layers(number, cells):
            return None, f"{number} layers of each stage are computed again, which no word of recompute says"
        return "full", ""
    off = "None" in (granularity, method, switch) or switch == "False"
    return ("none" if off else None), ""


def _all_layers(number: str, cells: Mapping[str, Cell]) -> bool:
    """Whether so many layers are all that a stage has."""
    layers, stages, chunks = cells.get("layers"), cells.get("pp"), cells.get("vpp") or 1
    if not (isinstance(layers, int) and isinstance(stages, int) and isinstance(chunks, int) and number.isdecimal()):
        return False
    return stages > 0 and int(number) >= -(-layers // (stages * chunks))


def _experts(reading: LogReading, arguments: Mapping[str, str]) -> None:
    """The cells of a mixture, where its experts are stated whole; else what tells that it is one."""
    experts = arguments.get("num_experts", "None")
    if experts in _DENSE:
        return
    cells = {column: stated_cell(column, arguments[name]) for name, column in _OF_EXPERTS.items() if name in arguments}
    if arguments.get("moe_ffn_hidden_size", "None") == "None":
        cells["moe_ffn_hidden"] = reading.cells.get("ffn_hidden")
    width, shared = cells.get("moe_ffn_hidden"), arguments.get("moe_shared_expert_intermediate_size", "None")
    whole = all(isinstance(cells.get(name), int) for name in ("experts", "top_k", "moe_ffn_hidden"))
    if isinstance(width, int) and width > 0 and shared.isdecimal():
        cells["shared_experts"] = int(shared) // width
        whole = whole and int(shared) % width == 0
    kinds = "".join(re.findall(r"\d+", arguments.get("moe_layer_freq", "1")))  # a list of 0 and 1, or each n-th layer
    with_experts = kinds.lstrip("0")
    cells["dense_layers"] = len(kinds) - len(with_experts) or None
    if not whole or set(with_experts) != {"1"}:
        reading.mixture = mixture("num_experts", experts)
        return
    kind, backend = arguments.get("moe_token_dispatcher_type", ""), arguments.get("moe_flex_dispatcher_backend")
    cells["dispatcher"] = _DISPATCHERS.get(kind, (backend or "deepep") if kind == "flex" else None)
    hides = {"batch": "overlap_moe_expert_parallel_comm", "shared": "moe_shared_expert_overlap"}
    cells["ep_overlap"] = next((word for word, name in hides.items() if _on(arguments, name)), None)
    reading.cells |= {name: value for name, value in cells.items() if value is not None}
