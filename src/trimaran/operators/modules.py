"""Modules: which operators each module that recompute may name covers, and what of a layer is then kept.

Megatron-Core (megatron/core/transformer/transformer_config.py, recompute_modules) checkpoints core_attn, mlp, moe and
shared_experts as wholes, whose input stays; of layernorm, moe_act and mla_up_proj it discards the output, which what
comes next would keep (megatron/core/tensor_parallel/random.py, CheckpointWithoutOutput).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimaran.nouns.model import Model
from trimaran.nouns.recompute import modules_of
from trimaran.nouns.stack import Stack
from trimaran.operators.casts import Number
from trimaran.operators.operator import BY_WEIGHTS, Operator


@dataclass(frozen=True)
class Module:
    """Operators that run again together, by name; with `discards_output` each alone, and its output is not kept."""

    operators: tuple[str, ...] = ()
    discards_output: bool = False


MODULES: Mapping[str, Module] = {
    "core_attn": Module(("attention",)),
    "layernorm": Module(
        ("attention norm", "MLP norm", "latent attention norm", "experts norm"), discards_output=True
    ),
    "mla_up_proj": Module(("queries up", "keys and values up", "latent angles"), discards_output=True),
    "mlp": Module(("up", "activation", "down")),
    "moe": Module(
        (
            "router", "shared up", "shared activation", "shared down", "shared gate", "dispatch", "experts up",
            "experts activation", "experts down", "combine",
        )
    ),
    "moe_act": Module(("experts activation",), discards_output=True),
    "shared_experts": Module(("shared up", "shared activation", "shared down", "shared gate")),
}  # fmt: skip


def covers(module: str, model: Model) -> bool:
    """Whether a module that recompute may name covers anything in a layer of the model."""
    if module == "shared_experts":
        return bool(model.shared_experts)
    if module in ("moe", "moe_act"):
        return bool(model.experts)
    if module == "mlp":
        return "dense" in model.kinds
    return module != "mla_up_proj" or model.latent_attention is not None


def module_of(name: str, stack: Stack) -> Module:
    """What a module covers in the software at hand, where its layers are made of other parts."""
    for stated in stack.recompute_modules:
        if stated.name == name:
            return replace(MODULES[name], operators=stated.operators)
    return MODULES[name]


def shares_again(word: str, operators: Sequence[Operator], stack: Stack) -> list[Number]:
    """Share of each operator's forward that runs again under a partial recompute."""
    if word == "selective":
        return [operator.made_again(stack) for operator in operators]
    covered = {name for module in modules_of(word) for name in module_of(module, stack).operators}
    return [float(operator.name in covered) for operator in operators]


def kept_under(word: str, operators: Sequence[Operator], stack: Stack, layer_input: Number) -> Number:
    """Bytes that a layer keeps for the backward under a partial recompute, `layer_input` being those of its input."""
    if word == "selective" and stack.selective_keeps:
        left = [tensor for operator in operators for tensor in (*operator.outputs, *operator.arrivals)]
        kept_ones = (tensor.size for tensor in left if tensor.name in stack.selective_keeps)
        return layer_input + sum(kept_ones, np.float64(0.0))
    without_inputs, without_inside = _left_out(word, operators, stack)
    kept: Number = 0.0
    for index, operator in enumerate(operators):
        again, goes = index in without_inside, index in without_inputs
        for tensor in operator.inputs:
            kept = kept + tensor.size * (1.0 if not goes else 0.0 if again else tensor.copied)
        for tensor in () if again else operator.inside:
            kept = kept + tensor.size
    return kept


def factors_of(operators: Sequence[Operator], element: Number) -> Number:
    """Bytes of the factors of a layer's weights' gradients, which a schedule that puts these off keeps.

    Those are what its products by weights keep of their inputs, and the gradients of what they give: of a product whose
    input is cut over TP that is whole on each rank.
    """
    factors: Number = np.float64(0.0)
    for operator in operators:
        if operator.forward and operator.kernel in BY_WEIGHTS:
            given = sum((made.m * made.n * made.batch for made in operator.forward), np.float64(0.0))
            factors = factors + sum((tensor.size for tensor in operator.inputs), given * element)
    return factors


def _left_out(word: str, operators: Sequence[Operator], stack: Stack) -> tuple[set[int], set[int]]:
    """The operators whose inputs, and those whose inside, is made again instead of kept, by their place."""
    modules = [module_of(name, stack) for name in modules_of(word)] or [Module(stack.selective)]
    without_inputs, without_inside = set[int](), set[int]()
    for index, operator in enumerate(operators):
        for module in modules:
            if operator.name not in module.operators:
                continue
            without_inside.add(index)
            if module.discards_output:
                without_inputs.add(index + 1)
            elif index and operators[index - 1].name in module.operators:
                # of a run that is made again the first one's input stays, from which the others' follow
                without_inputs.add(index)
    return without_inputs, without_inside
