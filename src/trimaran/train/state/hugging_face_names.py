"""The weights of each Hugging Face family by our names: one entry of `DENSE` a family, mixtures apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trimaran.nouns.model import Model


@dataclass(frozen=True)
class Entry:
    """A weight of ours and the tensors of theirs that hold the same numbers.

    `join` makes our weight from their tensors, `split` their tensors from our weight.
    """

    theirs: tuple[str, ...]
    join: Callable[[Model, list[Tensor]], Tensor] = lambda model, parts: parts[0]
    split: Callable[[Model, Tensor], list[Tensor]] = lambda model, ours: [ours]

    def prefixed(self, prefix: str) -> Entry:
        """The entry with a prefix before their names."""
        return Entry(tuple(prefix + name for name in self.theirs), self.join, self.split)


Entries = dict[str, Entry]


@dataclass(frozen=True)
class Family:
    """How a family names its weights: those outside of layers, those of one layer, and what stands before both.

    `prefix` stands before all but the head's, and `prefix` + `layers` + a number before those of a layer. The first
    layers of a mixture of experts may be `dense` ones.
    """

    prefix: str
    layers: str
    outer: Callable[[Model], Entries]
    layer: Callable[[Model], Entries]
    head: str = "lm_head.weight"
    dense: Callable[[Model], Entries] | None = None

    def of_layer(self, model: Model, number: int) -> Entries:
        """The weights of the layer of that number."""
        return self.dense(model) if self.dense is not None and number < model.dense_layers else self.layer(model)


def _same(name: str) -> Entry:
    return Entry((name,))


def _parts(ours: str, theirs: str, *, biased: bool, entry: Callable[[str], Entry] = _same) -> Entries:
    """A weight, and its bias where it has one."""
    return {f"{ours}.{part}": entry(f"{theirs}.{part}") for part in (("weight", "bias") if biased else ("weight",))}


def _transposed(name: str) -> Entry:
    """GPT-2 keeps matrices as (in, out)."""
    return Entry((name,), lambda model, parts: parts[0].T, lambda model, ours: [ours.T])


def _by_head(parts: list[Tensor], model: Model) -> Tensor:
    """Queries, keys and values of separate matrices (or biases) to (kv heads, queries + 2, head_dim, ..)."""
    per_kv = [part.reshape(model.kv_heads, -1, model.head_dim, *part.shape[1:]) for part in parts]
    return torch.cat(per_kv, dim=1)


def _by_kind(ours: Tensor) -> list[Tensor]:
    """The inverse: all queries, all keys, all values."""
    queries = ours.shape[1] - 2
    return [part.flatten(0, 2) for part in torch.split(ours, [queries, 1, 1], dim=1)]


def _joined_qkv(name: str, *, transposed: bool = False) -> Entry:
    """All queries, then all keys, then all values, in one matrix (or bias)."""

    def join(model: Model, parts: list[Tensor]) -> Tensor:
        rows = parts[0].T if transposed else parts[0]
        widths = [model.attention_hidden, model.kv_hidden, model.kv_hidden]
        return _by_head(list(torch.split(rows, widths)), model)

    def split(model: Model, ours: Tensor) -> list[Tensor]:
        rows = torch.cat(_by_kind(ours))
        return [rows.T if transposed else rows]

    return Entry((name,), join, split)


def _qkv_of_each_head(name: str) -> Entry:
    """Queries, keys and values of one head after another, in one matrix (or bias)."""
    return Entry(
        (name,),
        lambda model, parts: parts[0].reshape(model.heads, 3, model.head_dim, *parts[0].shape[1:]),
        lambda model, ours: [ours.flatten(0, 2)],
    )


def _separate_qkv(name: str) -> Entry:
    """A matrix (or bias) each; their names differ in the letter that `*` stands for."""
    return Entry(
        tuple(name.replace("*", one) for one in "qkv"),
        lambda model, parts: _by_head(parts, model),
        lambda model, ours: _by_kind(ours),
    )


def _separate_gate_up(name: str) -> Entry:
    """A matrix (or bias) each; their names differ in the word that `*` stands for."""
    return Entry(
        tuple(name.replace("*", one) for one in ("gate", "up")),
        lambda model, parts: torch.stack(parts),
        lambda model, ours: list(ours),
    )


def _joined_gate_up(name: str) -> Entry:
    """The whole gate, then the other half, in one matrix."""
    return Entry(
        (name,),
        lambda model, parts: parts[0].reshape(2, -1, *parts[0].shape[1:]),
        lambda model, ours: [ours.flatten(0, 1)],
    )


def _around_one(name: str) -> Entry:
    """Gemma keeps by how much a norm's weight is above 1."""
    return Entry((name,), lambda model, parts: parts[0].float() + 1.0, lambda model, ours: [ours.float() - 1.0])


def _of_heads(name: str) -> Entry:
    """Weights of the features of all heads, by key-value head."""
    return Entry(
        (name,),
        lambda model, parts: parts[0].reshape(model.kv_heads, -1, model.head_dim),
        lambda model, ours: [ours.flatten()],
    )


def _gpt2_outer(model: Model) -> Entries:
    ends = {"embedding.tokens": Entry(("wte.weight",)), "embedding.positions": Entry(("wpe.weight",))}
    return ends | _parts("norm", "ln_f", biased=True)


def _gpt2_layer(model: Model) -> Entries:
    layer = _parts("attention_norm", "ln_1", biased=True) | _parts("mlp_norm", "ln_2", biased=True)
    layer["attention.qkv.weight"] = _joined_qkv("attn.c_attn.weight", transposed=True)
    layer["attention.qkv.bias"] = _joined_qkv("attn.c_attn.bias")
    for ours, theirs in (("attention.projection", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
        layer |= {f"{ours}.weight": _transposed(f"{theirs}.weight"), f"{ours}.bias": Entry((f"{theirs}.bias",))}
    return layer


def _bloom_outer(model: Model) -> Entries:
    norms = _parts("embedding_norm", "word_embeddings_layernorm", biased=True) | _parts("norm", "ln_f", biased=True)
    return {"embedding.tokens": Entry(("word_embeddings.weight",))} | norms


def _bloom_layer(model: Model) -> Entries:
    return _bloom_like_layer(model, "self_attention")


def _gpt_neox_outer(model: Model) -> Entries:
    return {"embedding.tokens": Entry(("embed_in.weight",))} | _parts("norm", "final_layer_norm", biased=True)


def _gpt_neox_layer(model: Model) -> Entries:
    return _bloom_like_layer(model, "attention")


def _bloom_like_layer(model: Model, attention: str) -> Entries:
    biased = model.biased_attention == "all"
    return {
        **_parts("attention_norm", "input_layernorm", biased=True),
        **_parts("mlp_norm", "post_attention_layernorm", biased=True),
        **_parts("attention.qkv", f"{attention}.query_key_value", biased=biased, entry=_qkv_of_each_head),
        **_parts("attention.projection", f"{attention}.dense", biased=biased),
        **_parts("mlp.up", "mlp.dense_h_to_4h", biased=True),
        **_parts("mlp.down", "mlp.dense_4h_to_h", biased=True),
    }


def llama_outer(model: Model) -> Entries:
    """Llama's own names of what stands outside of layers."""
    return {"embedding.tokens": Entry(("embed_tokens.weight",)), "norm.weight": Entry(("norm.weight",))}


def llama_layer(model: Model) -> Entries:
    """Llama's own names, which most families have; those of traits are there where the model has them."""
    of_attention = model.biased_attention
    return {
        "attention_norm.weight": Entry(("input_layernorm.weight",)),
        "mlp_norm.weight": Entry(("post_attention_layernorm.weight",)),
        **_parts("attention.qkv", "self_attn.*_proj", biased=of_attention != "none", entry=_separate_qkv),
        **_parts("attention.projection", "self_attn.o_proj", biased=of_attention == "all"),
        **_parts("mlp.gate_up", "mlp.*_proj", biased=model.bias, entry=_separate_gate_up),
        **_parts("mlp.down", "mlp.down_proj", biased=model.bias),
    }


def qwen3_layer(model: Model) -> Entries:
    """Llama's, and norms of queries and keys."""
    norms = {
        f"attention.query_key_norm.{ours}.weight": Entry((f"self_attn.{theirs}_norm.weight",))
        for ours, theirs in (("queries", "q"), ("keys", "k"))
    }
    return llama_layer(model) | norms


def _olmo2_layer(model: Model) -> Entries:
    layer = llama_layer(model)
    del layer["attention_norm.weight"], layer["mlp_norm.weight"]
    return layer | {
        "attention_output_norm.weight": Entry(("post_attention_layernorm.weight",)),
        "mlp_output_norm.weight": Entry(("post_feedforward_layernorm.weight",)),
        "attention.query_key_norm.queries": _of_heads("self_attn.q_norm.weight"),
        "attention.query_key_norm.keys": _of_heads("self_attn.k_norm.weight"),
    }


def _phi3_layer(model: Model) -> Entries:
    joined = {
        "attention.qkv.weight": _joined_qkv("self_attn.qkv_proj.weight"),
        "mlp.gate_up.weight": _joined_gate_up("mlp.gate_up_proj.weight"),
    }
    return llama_layer(model) | joined


def _gemma2_outer(model: Model) -> Entries:
    return llama_outer(model) | {"norm.weight": _around_one("norm.weight")}


def _gemma2_layer(model: Model) -> Entries:
    norms = {
        "attention_norm": "input_layernorm",
        "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }
    return llama_layer(model) | {f"{ours}.weight": _around_one(f"{theirs}.weight") for ours, theirs in norms.items()}


DENSE: Mapping[str, Family] = {
    "gpt2": Family("transformer.", "h.", _gpt2_outer, _gpt2_layer),
    "bloom": Family("transformer.", "h.", _bloom_outer, _bloom_layer),
    "llama": Family("model.", "layers.", llama_outer, llama_layer),
    "mistral": Family("model.", "layers.", llama_outer, llama_layer),
    "qwen2": Family("model.", "layers.", llama_outer, llama_layer),
    "qwen3": Family("model.", "layers.", llama_outer, qwen3_layer),
    "olmo2": Family("model.", "layers.", llama_outer, _olmo2_layer),
    "phi3": Family("model.", "layers.", llama_outer, _phi3_layer),
    "gemma2": Family("model.", "layers.", _gemma2_outer, _gemma2_layer),
    "gpt_neox": Family("gpt_neox.", "layers.", _gpt_neox_outer, _gpt_neox_layer, head="embed_out.weight"),
}
