"""The weights of Hugging Face's mixtures of experts by our names, beside those of `hugging_face_names`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trimaran.nouns.model import Model
from trimaran.train.state.hugging_face_latent_names import latent_attention
from trimaran.train.state.hugging_face_names import Entries, Entry, Family, llama_layer, llama_outer, qwen3_layer


def _mixture(model: Model, block: str, gate: str, up: str, down: str) -> Entries:
    """A router, and experts each in tensors of its own, which we hold as one of all."""
    experts = [f"{block}.experts.{expert}" for expert in range(model.experts)]
    return {
        "mlp.router.weight": Entry((f"{block}.gate.weight",)),
        "mlp.experts.up": Entry(
            tuple(f"{expert}.{part}.weight" for expert in experts for part in (gate, up)),
            lambda model, parts: torch.stack(parts).view(model.experts, 2, *parts[0].shape),
            lambda model, ours: list(ours.flatten(0, 1)),
        ),
        "mlp.experts.down": Entry(
            tuple(f"{expert}.{down}.weight" for expert in experts),
            lambda model, parts: torch.stack(parts),
            lambda model, ours: list(ours),
        ),
    }


def _without_mlp(layer: Entries) -> Entries:
    return {name: entry for name, entry in layer.items() if not name.startswith("mlp.")}


def _mixtral_layer(model: Model) -> Entries:
    return _without_mlp(llama_layer(model)) | _mixture(model, "block_sparse_moe", "w1", "w3", "w2")


def _qwen3_moe_layer(model: Model) -> Entries:
    return _without_mlp(qwen3_layer(model)) | _mixture(model, "mlp", "gate_proj", "up_proj", "down_proj")


def _deepseek_dense_layer(model: Model) -> Entries:
    layer = {name: entry for name, entry in llama_layer(model).items() if not name.startswith("attention.")}
    return layer | latent_attention(model)


def _deepseek_layer(model: Model) -> Entries:
    """Beside the routed experts an MLP of the shared ones, and biases of routers that have them."""
    layer = _without_mlp(_deepseek_dense_layer(model)) | _mixture(model, "mlp", "gate_proj", "up_proj", "down_proj")
    if model.router.bias:
        layer["mlp.router.bias"] = Entry(("mlp.gate.e_score_correction_bias",))
    if model.shared_experts:
        shared = {name: entry for name, entry in llama_layer(model).items() if name.startswith("mlp.")}
        for name, entry in shared.items():
            theirs = tuple(one.replace("mlp.", "mlp.shared_experts.") for one in entry.theirs)
            layer[name.replace("mlp.", "mlp.shared.")] = Entry(theirs, entry.join, entry.split)
    return layer


MIXTURES: Mapping[str, Family] = {
    "mixtral": Family("model.", "layers.", llama_outer, _mixtral_layer),
    "qwen3_moe": Family("model.", "layers.", llama_outer, _qwen3_moe_layer, dense=qwen3_layer),
    "deepseek_v3": Family("model.", "layers.", llama_outer, _deepseek_layer, dense=_deepseek_dense_layer),
    "deepseek_v2": Family("model.", "layers.", llama_outer, _deepseek_layer, dense=_deepseek_dense_layer),
}
