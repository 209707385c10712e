"""Mixtures of experts, latent attention and their axes in Megatron-LM's arguments."""

from __future__ import annotations

import re
from typing import Any

from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import quoted
from trimaran.planner.configs.flags import Flags, whole
from trimaran.planner.configs.megatron.yarn import yarn
from trimaran.planner.configs.stated import Stated
from trimaran.planner.export.megatron_mixtures import (
    CAPACITY,
    CONTEXT_KINDS,
    DISPATCHER_TYPE,
    DISPATCHERS,
    EXPERT_BIAS,
    EXPERT_GROUPS,
    EXPERT_SIZES,
    FLEX_BACKEND,
    LATENT,
    LATENT_SIZES,
    LAYER_KINDS,
    OLD_FLEX,
    OVERLAPS,
    SCORE_SCALE,
    SCORES,
    SHARED_GATE,
    SHARED_WIDTH,
    SOFTMAX_OVER_ALL,
)
from trimaran.planner.export.megatron_yarn import YARN

# What Megatron-LM takes where nothing is said (megatron/training/arguments.py, _add_mla_args, and
# transformer_config.py, moe_router_topk and moe_token_dispatcher_type, at core_v0.19.0).
_LATENT_USUAL = {"query_rank": 0, "kv_rank": 32, "plain_dim": 128, "rotary_dim": 64, "value_dim": 128}
_USUAL_TOP_K = 2
# Further spellings of a kind of context parallelism.
_CONTEXT_WORDS = {word: kind for kind, word in CONTEXT_KINDS.items()} | {"allgather": "all_gather"}
_RUN = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d{1,6}))?")
# Runs of layers, and how often they come.
_TURNS = re.compile(r"\(?([^()]+)\)?(?:(?<=\))\*(\d{1,6}))?")
_MOST_LAYERS = 100_000


def mixture(flags: Flags, stated: Stated) -> None:
    """What the model's layers hold beside an MLP and plain attention."""
    model = stated.model
    if flags.has(LATENT):
        given = {field: flags.count(flag) for flag, field in LATENT_SIZES.items()}
        sizes = {field: _LATENT_USUAL[field] if size is None else size for field, size in given.items()}
        model["latent_attention"] = sizes
        model["head_dim"] = sizes["plain_dim"] + sizes["rotary_dim"]
        # the switch of queries' and keys' norms is that of the norms between the ways down and up
        model.pop("qk_norm", None)
        model["positions"] = "rotary"
        if (flags.word("--rope-type", ("rope", YARN)) or YARN) == YARN:
            yarn(flags, stated, latent=True)
    experts = {field: flags.count(flag) for flag, field in EXPERT_SIZES.items()}
    if (experts["experts"] or 0) <= 1:  # Megatron-DeepSpeed's word for a dense model
        return
    flags.has("--moe-grouped-gemm")
    model["experts"] = experts["experts"]
    model["top_k"] = _USUAL_TOP_K if experts["top_k"] is None else experts["top_k"]
    width = experts["moe_ffn_hidden"] or model.get("ffn_hidden")
    if not isinstance(width, int):
        return  # without the hidden size, which is then named as missing
    model["moe_ffn_hidden"] = width
    model.update({field: groups for flag, field in EXPERT_GROUPS.items() if (groups := flags.count(flag))})
    _router(flags, model)
    if shared := flags.count(SHARED_WIDTH):
        if shared % width:
            raise TrimaranError(f"{SHARED_WIDTH} is {shared}, not a multiple of an expert's width {width}")
        model |= {"shared_experts": shared // width, "shared_gate": flags.has(SHARED_GATE)}
    if kinds := flags.word(LAYER_KINDS):
        model |= _without_experts(kinds)
    if (capacity := flags.number(CAPACITY)) is not None:
        stated.workload["capacity_factor"] = capacity


def _router(flags: Flags, model: dict[str, Any]) -> None:
    """How tokens' weights are made of scores; a group's score is that of top_k / top_groups of its experts."""
    scores = flags.word(SCORES, ("softmax", "sigmoid"))
    over_all, bias, scale = flags.has(SOFTMAX_OVER_ALL), flags.has(EXPERT_BIAS), flags.number(SCORE_SCALE)
    router: dict[str, Any] = {"scores": scores or "softmax", "bias": bias}
    if router["scores"] == "softmax":
        router["normalised"] = not over_all
    if scale is not None:
        router["scale"] = scale
    if groups := model.get("top_groups"):
        router["group_best"] = max(1, model["top_k"] // groups)
    model["router"] = router


def further_degrees(flags: Flags, stated: Stated) -> None:
    """Context parallelism, groups of the distributed optimizer, and how experts are laid out."""
    layout = stated.layout
    if (cp := flags.degree("--context-parallel-size")) != 1:
        layout["cp"] = cp
    kinds = set(flags.words("--cp-comm-type")) or {CONTEXT_KINDS["ring"]}
    if cp != 1:
        if len(kinds) > 1 or not kinds <= _CONTEXT_WORDS.keys():
            words = ", ".join(sorted(CONTEXT_KINDS.values()))
            raise TrimaranError(f"--cp-comm-type is {quoted(' '.join(sorted(kinds)))}: one of {words} can be said here")
        layout["cp_kind"] = _CONTEXT_WORDS[kinds.pop()]
    stated.replicate = flags.degree("--num-distributed-optimizer-instances")
    ep, etp = flags.degree("--expert-model-parallel-size"), flags.count("--expert-tensor-parallel-size")
    kind = flags.word(DISPATCHER_TYPE, ("allgather", "alltoall", "flex")) or "allgather"
    backend = flags.word(FLEX_BACKEND, ("deepep", "hybridep")) or "deepep"
    flags.has(OLD_FLEX)
    # Of experts that the file leaves to a model by name, Megatron-LM wants some where EP is above 1 (validate_args).
    if "experts" not in stated.model and ep == 1:
        return
    names = {words: name for name, words in DISPATCHERS.items()}
    hidden = next((word for word, words in OVERLAPS.items() if words and flags.has(words[0])), "none")
    if hidden != "none":
        layout["ep_overlap"] = hidden
    layout |= {"ep": ep, "dispatcher": names[kind, backend if kind == "flex" else ""]}
    if etp is not None and etp != layout["tp"]:
        layout["etp"] = etp


def _without_experts(kinds: str) -> dict[str, int]:
    """Which layers have none: the first of `([0]*3+[1]*58)`, or those between where every n-th one has (moe_freq_type).

    Megatron-LM's number n means the first of each n layers (transformer_block_submodules, moe_layer_pattern), which
    costs what the last of each does.
    """
    if (number := whole(kinds)) is not None and 0 < number <= _MOST_LAYERS:
        return {"experts_every": number}
    turns = _TURNS.fullmatch(kinds.replace(" ", ""))
    runs, times = (turns[1].split("+"), int(turns[2] or 1)) if turns else ([], 1)
    matches = [match for run in runs if (match := _RUN.fullmatch(run)) is not None]
    counted = [(match[1].replace(",", ""), int(match[2] or 1)) for match in matches]
    if runs and len(counted) == len(runs) and times * sum(len(bits) * n for bits, n in counted) <= _MOST_LAYERS:
        layers = times * "".join(bits * n for bits, n in counted)
        if "10" not in layers:
            return {"dense_layers": layers.count("0")}
        every = layers.find("1") + 1 if layers.startswith("0") else (layers + "1").find("1", 1)
        if layers in ((len(layers) // every) * turn for turn in ("0" * (every - 1) + "1", "1" + "0" * (every - 1))):
            return {"experts_every": every}
    raise TrimaranError(
        f"{LAYER_KINDS} is {quoted(kinds)}: only layers without experts that come first, or experts in one of so many, "
        f"can be said here"
    )
