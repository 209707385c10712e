"""torchtitan's configuration as a layout: TOML up to 0.2, and of the Python modules since 0.3 what they set plainly."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping
from typing import Any

from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import quoted
from trimaran.planner.configs.flags import whole
from trimaran.planner.configs.stated import Stated, optimizer_of
from trimaran.planner.configs.torchtitan_known import unread
from trimaran.planner.export.torchtitan import ASYNC_TP, ROTATE_METHODS
from trimaran.planner.export.torchtitan_experts import BACKENDS, OVERLAPS
from trimaran.planner.export.torchtitan_flavors import FLAVORS, Flavor
from trimaran.planner.export.torchtitan_stages import LESS, SCHEDULES, USUAL_CHUNKS

Sections = dict[str, dict[str, Any]]
_FUNCTIONS = {flavor.function: flavor for flavor in FLAVORS}
# What a flavor's name ends in that has another attention kernel.
_KERNELS = ("_flex_attn", "_varlen_attn", "_flex", "_varlen")
_PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}
_CLASSES = {"ParallelismConfig": "parallelism", "TrainingConfig": "training", "CompileConfig": "compile"}
_SECTIONS = ("training", "parallelism", "compile")
_NARROW = {"quantize.linear.float8": "fp8", "float8": "fp8", "quantize.linear.mx": "mxfp8", "mx": "mxfp8"}
_CONVERTERS = {"Float8LinearConverter": "quantize.linear.float8", "MXFP8LinearConverter": "quantize.linear.mx"}
# How products are scaled: a scale a tensor or a row; 0.3 has rows alone (components/quantization/float8.py).
_FP8_RECIPES = {"tensorwise": "fp8", "rowwise": "fp8_rowwise"}
_RECOMPUTE = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}


def torchtitan(sections: Mapping[str, Any]) -> Stated:
    """What the sections state; what they leave out is as torchtitan has it. Raises TrimaranError naming a setting."""
    stated = Stated("torchtitan", titan_stages=True)
    training, parallelism, recompute, model, compiling = (
        _table(sections, name) for name in ("training", "parallelism", "activation_checkpoint", "model", "compile")
    )
    _named(model, stated)
    _compiled(training, parallelism, compiling, stated)
    degrees = {name: _count(parallelism, f"{name}_parallel_degree", 1) for name in ("tensor", "pipeline")}
    replicate = _count(parallelism, "data_parallel_replicate_degree", 1)
    shard = _count(parallelism, "data_parallel_shard_degree", -1, least=-1)
    cp = _count(parallelism, "context_parallel_degree", 1)
    stated.replicas = replicate * shard if shard > 0 else None
    stated.replicate = replicate
    layout = stated.layout
    layout |= {"tp": degrees["tensor"], "pp": degrees["pipeline"]}
    # what is sharded is shared out over CP as well (distributed/parallel_dims.py)
    if shard != 1 or cp > 1:
        layout |= {"zero_stage": 3, "dp_kind": "fully_sharded"}
        _resharding(parallelism, stated)
    _context(parallelism, cp, stated)
    _experts(parallelism, stated)
    layout["sequence_parallel"] = (
        degrees["tensor"] > 1 and parallelism.get("enable_sequence_parallel", True) is not False
    )
    _batch(training, parallelism, stated)
    _loss(_table(sections, "loss"), cp, stated)
    _precision(sections, training, model, stated)
    _recompute(recompute, stated)
    _pipeline(parallelism, stated)
    if training.get("enable_cpu_offload") is True:
        layout["offload"] = "weights"
    stated.workload["optimizer"] = optimizer_of(_table(sections, "optimizer").get("name", "AdamW"), stated)
    stated.unread = list(unread(sections))
    return stated


def _precision(
    sections: Mapping[str, Any], training: Mapping[str, Any], model: Mapping[str, Any], stated: Stated
) -> None:
    """What products read, and what weights are held in."""
    layout = stated.layout
    precision = str(training.get("mixed_precision_param", "bfloat16"))
    if precision not in _PRECISIONS:
        raise TrimaranError(f"mixed_precision_param is {quoted(precision)}: it is one of {', '.join(_PRECISIONS)}")
    layout["precision"] = _PRECISIONS[precision]
    converters = model.get("converters", [])
    for converter in converters if isinstance(converters, list) else [converters]:
        if str(converter) not in _NARROW:
            raise TrimaranError(
                f"converter {quoted(str(converter))} cannot be said here: it is none of {', '.join(_NARROW)}"
            )
        layout["precision"] = _NARROW[str(converter)]
    # a section of its own in 0.1, whose files have no other
    float8 = _table(_table(_table(sections, "quantize"), "linear"), "float8") or _table(sections, "float8")
    if layout["precision"] == "fp8":
        recipe = str(float8.get("recipe_name") or "tensorwise")
        if recipe not in _FP8_RECIPES:
            raise TrimaranError(f"recipe_name is {quoted(recipe)}: only {', '.join(_FP8_RECIPES)} can be said here")
        layout["precision"] = _FP8_RECIPES[recipe]
        stated.stack["gathers_casts"] = float8.get("enable_fsdp_float8_all_gather", False) is True
    _held_in(training, stated)


def _held_in(training: Mapping[str, Any], stated: Stated) -> None:
    """Weights, gradients and moments held in bf16, without a copy in fp32, and what gradients are summed in.

    By torchtitan 0.2.2, config/job_config.py, lines 275 to 294.
    """
    held, summed = (str(training.get(name, "float32")) for name in ("dtype", "mixed_precision_reduce"))
    for name, word in (("dtype", held), ("mixed_precision_reduce", summed)):
        if word not in _PRECISIONS:
            raise TrimaranError(f"{name} is {quoted(word)}: it is one of {', '.join(_PRECISIONS)}")
    precision = stated.layout["precision"]
    if held == "bfloat16" and precision == "bf16":
        stated.layout["precision"] = "bf16_pure"
    elif held == "bfloat16":
        stated.uncounted.append(f"dtype {held} beside {precision}: weights and moments are counted in fp32")
    # which 0.2.2 takes as float32 alone, but FSDP2 takes in either
    if summed == "bfloat16":
        stated.stack |= {"narrow_gradient_stages": (3,), "wide_sum_stages": ()}


def _named(model: Mapping[str, Any], stated: Stated) -> None:
    """The model by its name and flavor, whichever kernel its attention takes."""
    name, flavor = model.get("name"), model.get("flavor")
    kernel = next((end for end in _KERNELS if str(flavor).endswith(end)), "")
    stated.model_name = FLAVORS.get(Flavor(str(name), str(flavor).removesuffix(kernel)))
    stated.named = " ".join(str(word) for word in (name, flavor) if word)
    if kernel:
        stated.uncounted.append(f"the attention kernel of flavor {flavor}, counted as the usual one")


def _compiled(
    training: Mapping[str, Any], parallelism: Mapping[str, Any], compiling: Mapping[str, Any], stated: Stated
) -> None:
    """What is compiled: the layers, the loss or both (models/llama3/infra/parallelize.py of 0.2.0, line 94).

    0.1 asked for both by `compile` of training.
    """
    stated.stack_name = "torchtitan-0.2"
    by_pieces = any(section.get(ASYNC_TP) is True for section in (parallelism, compiling))
    if training.get("compile") is True:
        stated.stack_name = "torchtitan-0.2-async-tp" if by_pieces else "torchtitan-0.1-compiled"
    elif compiling.get("enable") is True:
        components = compiling.get("components", ["model", "loss"])
        if not isinstance(components, list):
            raise TrimaranError(f"components is {quoted(str(components))}, expected a list of model and loss")
        if "model" in components:
            stated.stack_name = "torchtitan-0.2-async-tp" if by_pieces else "torchtitan-0.2-compiled"
        elif "loss" in components:
            stated.notes.append("the loss alone is compiled, no layer is")
        # a loss that is compiled reads 16-bit logits, whatever the layers are
        stated.stack["fp32_loss"] = "loss" not in components


def _resharding(parallelism: Mapping[str, Any], stated: Stated) -> None:
    """By itself torchtitan keeps weights gathered after a forward in pipelines alone, which is what a stack counts."""
    policy = str(parallelism.get("fsdp_reshard_after_forward", "default"))
    if policy not in ("default", "always", "never"):
        raise TrimaranError(f"fsdp_reshard_after_forward is {quoted(policy)}: it is one of default, always, never")
    if policy == ("never" if stated.layout["pp"] == 1 else "always"):
        usual = "dropped" if policy == "never" else "kept"
        stated.uncounted.append(
            f"fsdp_reshard_after_forward {policy}: gathered weights are counted as {usual} after a forward"
        )


def _context(parallelism: Mapping[str, Any], cp: int, stated: Stated) -> None:
    if cp > 1:
        words = {word: kind for kind, word in ROTATE_METHODS.items()}
        method = str(parallelism.get("context_parallel_rotate_method", ROTATE_METHODS["all_gather"]))
        if method not in words:
            raise TrimaranError(f"context_parallel_rotate_method is {quoted(method)}: it is one of {', '.join(words)}")
        stated.layout |= {"cp": cp, "cp_kind": words[method]}


def _experts(parallelism: Mapping[str, Any], stated: Stated) -> None:
    """Experts without parallelism of their own are cut as the other weights are."""
    ep = _count(parallelism, "expert_parallel_degree", 1)
    if ep == 1:
        return
    words = {word: name for name, word in BACKENDS.items()}
    backend = str(parallelism.get("expert_parallel_comm_backend", BACKENDS["alltoall"]))
    if backend not in words:
        raise TrimaranError(f"expert_parallel_comm_backend is {quoted(backend)}: it is one of {', '.join(words)}")
    etp = _count(parallelism, "expert_tensor_parallel_degree", 1)
    stated.layout |= {"ep": ep, "dispatcher": words[backend]}
    if etp != stated.layout["tp"]:
        stated.layout["etp"] = etp


def _batch(training: Mapping[str, Any], parallelism: Mapping[str, Any], stated: Stated) -> None:
    """Sequences and their length; what comes after 0.3 counts tokens (torchtitan b5bcd76, config/configs.py)."""
    piped = stated.layout["pp"] != 1
    seq_len = _count(training, "max_context_length", 0) or _count(training, "seq_len", 2048)
    stated.workload["seq_len"] = seq_len
    tokens, batch = "num_tokens_per_microbatch_per_dp_rank", _count(training, "global_batch_size", -1, least=-1)
    if tokens in training:
        mbs = _whole_sequences(_count(training, tokens, 1), seq_len, tokens)
        local = mbs * (_count(parallelism, "num_pp_microbatches", 1) if piped else 1)
        step = _count(training, "num_tokens_per_train_step", -1, least=-1)
        batch = _whole_sequences(step, seq_len, "num_tokens_per_train_step") if step > 0 else -1
    else:
        local = _count(training, "local_batch_size", 8)
        mbs = _count(parallelism, "pipeline_parallel_microbatch_size", 1) if piped else local
    stated.layout["mbs"] = mbs
    stated.batch_per_replica = local
    if batch > 0:
        stated.workload["global_batch"] = batch


def _loss(loss: Mapping[str, Any], cp: int, stated: Stated) -> None:
    """A loss in chunks has the logits of one alone, and goes backward through each at once (components/loss.py).

    By b5bcd76, ChunkedLossWrapper, lines 513 to 520 and 544.
    """
    if loss:
        tokens = int(str(stated.layout["mbs"])) * int(str(stated.workload["seq_len"])) // cp
        chunk = max(1, -(-tokens // _count(loss, "num_chunks", 8)))
        stated.stack |= {"loss_chunk_gpu_tokens": chunk, "loss_chunk_cpu_tokens": chunk, "loss_makes_gradients": True}


def _whole_sequences(tokens: int, seq_len: int, name: str) -> int:
    if tokens % seq_len:
        raise TrimaranError(f"{name} is {tokens}, not a whole number of sequences of {seq_len} tokens")
    return tokens // seq_len


def _recompute(recompute: Mapping[str, Any], stated: Stated) -> None:
    mode, option = str(recompute.get("mode", "selective")), str(recompute.get("selective_ac_option", "2"))
    if mode not in ("none", "full", "selective"):
        raise TrimaranError(
            f"activation_checkpoint.mode is {quoted(mode)}: only none, full and selective can be said here"
        )
    every = mode == "selective" and option != "op"
    if every and not whole(option):
        raise TrimaranError(f"selective_ac_option is {quoted(option)}, expected op or a number of layers")
    stated.layout["recompute"] = "full" if every else mode
    if every:
        stated.layout["recompute_every"] = whole(option)


def _pipeline(parallelism: Mapping[str, Any], stated: Stated) -> None:
    if stated.layout["pp"] == 1:
        return
    words = {word: schedule for schedule, word in SCHEDULES.items()}
    word = str(parallelism.get("pipeline_parallel_schedule", "1F1B"))
    if word not in words:
        raise TrimaranError(f"pipeline_parallel_schedule is {quoted(word)}: only {', '.join(words)} can be said here")
    schedule = words[word]
    stated.layout["schedule"] = schedule
    if schedule == "dualpipev" and stated.layout.get("ep", 1) != 1 and parallelism.get(OVERLAPS, True) is not False:
        stated.layout["ep_overlap"] = "batch"
    stated.ends_less = (_count(parallelism, LESS[0], 1, least=0), _count(parallelism, LESS[1], 1, least=0))
    parts = parallelism.get("module_fqns_per_model_part")
    if isinstance(parts, list) and parts and all(isinstance(part, list) for part in parts):
        split = tuple(sum(str(name).startswith("layers.") for name in part) for part in parts)
        stated.layout |= {"stage_split": split, "vpp": max(1, len(split) // int(str(stated.layout["pp"])))}
        return
    stated.chunk = _count(parallelism, "pipeline_parallel_layers_per_stage", 0, least=0) or None
    if stated.chunk is None:
        stated.layout["vpp"] = USUAL_CHUNKS[schedule]


def _table(sections: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = sections.get(name, {})
    if not isinstance(found, dict):
        raise TrimaranError(f"{name} is not a section: write it as [{name}]")
    return found


def _count(table: Mapping[str, Any], name: str, usual: int, least: int = 1) -> int:
    value = table.get(name, usual)
    if value is None:
        return usual
    if not isinstance(value, int) or isinstance(value, bool) or (value < least and value != usual):
        raise TrimaranError(f"{name} is {quoted(str(value))}, expected a whole number from {least} on")
    return value


def sections_of_module(source: str, what: str) -> Sections:
    """What the one function of a Python module that sets a layout sets to plain values. Raises TrimaranError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of a file that is read, not run
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else "it cannot be parsed"
        raise TrimaranError(f"{what} is not valid Python: {reason}") from None
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    found = [(function.name, _set_in(function)) for function in functions]
    telling = [(name, sections) for name, sections in found if "parallelism" in sections or "training" in sections]
    if len(telling) != 1:
        names = ", ".join(name for name, _ in telling) or "none"
        raise TrimaranError(
            f"{what} has {len(telling)} functions that set training or parallelism ({names}): leave one"
        )
    sections = telling[0][1]
    sections.setdefault("parallelism", {}).setdefault(OVERLAPS, False)  # which 0.3 no longer has
    # trainer.py of b5bcd76, lines 108 to 110: SelectiveAC, by operator
    sections.setdefault("activation_checkpoint", {"mode": "selective", "selective_ac_option": "op"})
    return sections


def _set_in(function: ast.FunctionDef) -> Sections:
    sections: Sections = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            path = ast.unparse(node.targets[0]).split(".")
            if len(path) == 3 and path[1] in _SECTIONS:
                sections.setdefault(path[1], {})[path[2]] = _plain(node.value)
            elif path[1:] == ["activation_checkpoint"]:
                sections["activation_checkpoint"] = _policy(node.value)
        elif isinstance(node, ast.Call):
            _call(node, function.name, sections)
    return sections


def _call(node: ast.Call, function: str, sections: Sections) -> None:
    """What a call in a function of the registry sets, added to the sections."""
    called = ast.unparse(node.func).split(".")
    keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    if called[-1] in _CLASSES:
        plain = {name: _plain(value) for name, value in keywords.items()}
        sections.setdefault(_CLASSES[called[-1]], {}).update(plain)
    elif called[0] in _CONVERTERS:
        sections.setdefault("model", {}).setdefault("converters", []).append(_CONVERTERS[called[0]])
        recipe = _plain(keywords["recipe_name"]) if "recipe_name" in keywords else "rowwise"
        sections.setdefault("quantize", {})["linear"] = {"float8": {"recipe_name": recipe}}
    elif called[0] == "ChunkedLossWrapper":
        sections["loss"] = {"num_chunks": _plain(keywords["num_chunks"]) if "num_chunks" in keywords else 8}
    elif called[0].endswith("Converter"):
        sections.setdefault("quantize", {})[called[0]] = True  # told as not read
    elif "moe_comm_backend" in keywords:
        backend = _plain(keywords["moe_comm_backend"])
        sections.setdefault("parallelism", {})["expert_parallel_comm_backend"] = backend
    elif called[-1] in _FUNCTIONS:
        name, flavor = _FUNCTIONS[called[-1]]
        sections.setdefault("model", {}).update({"name": name, "flavor": flavor})
    if called[-1] == "model_registry" and node.args:
        size = _plain(node.args[0])
        model = sections.setdefault("model", {})
        model |= {"name": _family(function) or model.get("name"), "flavor": size}
    if "activation_checkpoint" in keywords:
        sections["activation_checkpoint"] = _policy(keywords["activation_checkpoint"])


def _family(function: str) -> str | None:
    """The folder of models of a function of its registry, which is called as `llama3_70b` there."""
    return next((flavor.name for flavor in FLAVORS if function.startswith(f"{flavor.name}_")), None)


def _policy(value: ast.expr) -> dict[str, Any]:
    word = ast.unparse(value).partition(".")[0]
    mode = "none" if word == "None" else _RECOMPUTE.get(word, word)
    return {"mode": mode, "selective_ac_option": "op"}


def _plain(value: ast.expr) -> Any:
    """A literal, or a product of whole numbers as `8 * 2048`; else its source, which no setting takes."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        factors = _plain(value.left), _plain(value.right)
        if all(isinstance(factor, int) and abs(factor) < 10**9 for factor in factors):
            return factors[0] * factors[1]
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return ast.unparse(value)
