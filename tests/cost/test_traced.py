"""The bytes that operators keep for the backward are those that autograd saves in the code that they describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trimaran.files.catalogue import load_stack
from trimaran.files.hugging_face_config import model_from_config
from trimaran.nouns.model import Model
from trimaran.nouns.stack import Stack
from trimaran.operators.layer import layer_operators
from trimaran.operators.operator import Part
from trimaran.train.comm.group import Group
from trimaran.train.model.gpt import Layer
from trimaran.train.model.positions import Positions
from trimaran.train.model.weight import Weight

MBS, SEQ_LEN, HIDDEN = 4, 256, 512
GPT = {"layers": 1, "hidden": HIDDEN, "heads": 8, "vocab": 1000}
LLAMA = GPT | {"kv_heads": 2, "mlp": "swiglu", "norm": "rmsnorm", "positions": "rotary", "bias": False}
DTYPES = [torch.float32, torch.bfloat16]


def saved_bytes(layer: nn.Module, run: Callable[[Tensor], Any], dtype: torch.dtype, *known: Tensor) -> int:
    """Bytes of what autograd saves while `layer` runs forward, by storage, its weights and `known` left out."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    x = torch.randn(MBS, SEQ_LEN, HIDDEN, dtype=dtype).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(x)
    apart = {tensor.untyped_storage()._cdata for tensor in (*layer.parameters(), *known)}
    return sum(storage.nbytes() for key, storage in storages.items() if key not in apart)


def kept_bytes(model: Model, stack: Stack, dtype: torch.dtype) -> float:
    """Bytes that the operators of one layer keep on a CPU."""
    width = float(dtype.itemsize)
    part = Part(model, SEQ_LEN, stack, True, 1.0, float(MBS), False, width, width)
    operators = layer_operators(part)
    return sum(float(tensor.size) for one in operators for tensor in (*one.inputs, *one.inside))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_the_trainers_layer_keeps_what_its_operators_say(shape: dict[str, Any], dtype: torch.dtype) -> None:
    model, group = Model(**shape), Group((0,), 0, None)
    layer = Layer(model, group, Positions(model, group), recompute_attention=False)
    for module in layer.modules():
        for name, declared in module._parameters.items():
            if declared is not None:
                module._parameters[name] = Weight(torch.randn(declared.shape, dtype=dtype))
    saved = saved_bytes(layer, layer, dtype)
    assert kept_bytes(model, load_stack("trimaran"), dtype) == pytest.approx(saved, rel=0.03)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_eager_llama_keeps_what_its_operators_say(dtype: torch.dtype) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    model = Model(**LLAMA)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=model.ffn_hidden, num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads, num_hidden_layers=1, attn_implementation="sdpa",
    )  # fmt: skip
    layer = LlamaDecoderLayer(config, 0).to(dtype)
    angles = LlamaRotaryEmbedding(config)(torch.empty(1, dtype=dtype), torch.arange(SEQ_LEN)[None])
    saved = saved_bytes(layer, lambda x: layer(x, position_embeddings=angles), dtype, *angles)
    stack = Stack(flash_attention=True, rms_norm="eager")
    assert kept_bytes(model, stack, dtype) == pytest.approx(saved, rel=0.03)


# Their RMS norms multiply by the weight in fp32, as PyTorch's composite one does; Qwen's cast first.
FAMILIES: dict[str, tuple[dict[str, Any], Stack]] = {
    "qwen3": ({"head_dim": 64}, Stack(flash_attention=True, rms_norm="eager")),
    "olmo2": ({}, Stack(flash_attention=True, rms_norm="composite")),
    "phi3": ({"pad_token_id": 0}, Stack(flash_attention=True, rms_norm="eager", joint_qkv=True, copies_context=True)),
    "gemma2": ({"head_dim": 64}, Stack(rms_norm="composite", repeats_kv=True)),
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_familys_layer_keeps_what_its_operators_say(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    more, stack = FAMILIES[kind]
    sizes = {"num_hidden_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 8, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 4 * HIDDEN, "vocab_size": 256, "eos_token_id": 1} | more
    how = "sdpa" if stack.flash_attention else "eager"
    module: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), attn_implementation=how)
    inner, positions = module.to(torch.bfloat16).model, torch.arange(SEQ_LEN)[None]
    angles = inner.rotary_emb(torch.empty(1, dtype=torch.bfloat16), positions)
    given = {"position_embeddings": angles, "attention_mask": None, "position_ids": positions}
    saved = saved_bytes(inner.layers[0], lambda x: inner.layers[0](x, **given), torch.bfloat16, *angles)
    model = model_from_config(sizes | {"model_type": kind}, kind)
    assert kept_bytes(model, stack, torch.bfloat16) == pytest.approx(saved, rel=0.01)
