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
from trimaran.nouns.recompute import modules_of
from trimaran.nouns.stack import ContextParallelKind, Stack
from trimaran.operators.layer import layer_operators
from trimaran.operators.modules import kept_under
from trimaran.operators.operator import Context, Part
from trimaran.train.comm.group import Group
from trimaran.train.comm.mesh import lone_mesh
from trimaran.train.comm.sequence_share import SequenceShare
from trimaran.train.model.gpt import Layer
from trimaran.train.model.positions import Positions
from trimaran.train.model.weight import Weight
from trimaran.train.programs.tracing import Trace

MBS, SEQ_LEN, HIDDEN = 4, 256, 512
GPT = {"layers": 1, "hidden": HIDDEN, "heads": 8, "vocab": 1000}
LLAMA = GPT | {"kv_heads": 2, "mlp": "swiglu", "norm": "rmsnorm", "positions": "rotary", "bias": False}
DTYPES = [torch.float32, torch.bfloat16]
# What the trainer's layer is measured with: each trait of a family, and several of them together.
TRAITS: dict[str, dict[str, Any]] = {
    "gpt": GPT,
    "llama": LLAMA,
    "llama, a key a query": LLAMA | {"kv_heads": 8},
    "mistral": LLAMA | {"sliding_window": 64},
    "qwen2": LLAMA | {"attention_bias": "qkv"},
    "qwen3": LLAMA | {"qk_norm": "head", "head_dim": 32},
    "olmo2": LLAMA | {"qk_norm": "all_heads", "norm_placement": "after"},
    "phi3": LLAMA | {"rotary_share": 0.5},
    "gemma2": LLAMA
    | {"mlp": "geglu", "norm_placement": "both", "sliding_window": 64, "attention_softcap": 50.0, "query_scale": 99.0},
    "gpt_neox": GPT | {"positions": "rotary", "rotary_share": 0.25, "parallel_residual": True},
}


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


def kept_bytes(
    model: Model, stack: Stack, dtype: torch.dtype, context: Context | None = None, *, recompute: str = "none"
) -> float:
    """Bytes that the operators of one layer keep on a CPU, of so many tokens on each rank of a sequence."""
    width = float(dtype.itemsize)
    tokens = SEQ_LEN * (1 if context is None else int(context.ranks))
    part = Part(model, tokens, stack, True, 1.0, float(MBS), False, width, width, context=context)
    operators = layer_operators(part)
    if recompute != "none":
        return float(kept_under(recompute, operators, stack, MBS * SEQ_LEN * HIDDEN * width))
    return sum(float(tensor.size) for one in operators for tensor in (*one.inputs, *one.inside))


def layer_of(model: Model, dtype: torch.dtype, *recompute: str, sequence: SequenceShare | None = None) -> Layer:
    """A layer of the trainer, alone, or one that shares sequences."""
    mesh = lone_mesh()
    layer = Layer(model, mesh, Positions(model, mesh.tp, sequence or mesh.sequence), 0, recompute=recompute)
    for module in layer.modules():
        for name, declared in module._parameters.items():
            if declared is not None:
                module._parameters[name] = Weight(torch.randn(declared.shape, dtype=dtype))
    return layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", TRAITS.values(), ids=TRAITS)
def test_the_trainers_layer_keeps_what_its_operators_say(shape: dict[str, Any], dtype: torch.dtype) -> None:
    model = Model(**shape)
    layer = layer_of(model, dtype)
    saved = saved_bytes(layer, layer, dtype)
    assert kept_bytes(model, load_stack("trimaran"), dtype) == pytest.approx(saved, rel=0.03)


WORDS = ("core_attn", "layernorm", "mlp", "core_attn+layernorm+mlp")


@pytest.mark.parametrize("shape", TRAITS.values(), ids=TRAITS)
def test_of_what_is_made_again_the_trainers_layer_holds_what_its_operators_say(shape: dict[str, Any]) -> None:
    model, dtype = Model(**shape), torch.bfloat16
    leaf = torch.randn(MBS, SEQ_LEN, HIDDEN, dtype=dtype).requires_grad_()
    for word in WORDS:
        layer = layer_of(model, dtype, *modules_of(word))
        with (trace := Trace({}, {})):
            first = layer(leaf.clone())  # makes what all layers share, such as masks and angles
            before = trace.held.now
            second = layer(leaf.clone())  # which goes where the layer keeps a wider copy
        assert first.shape == second.shape
        held = trace.held.now - before - second.untyped_storage().nbytes()
        kept = kept_bytes(model, load_stack("trimaran"), dtype, recompute=word)
        assert kept == pytest.approx(held, rel=0.03), word
    plain = layer_of(model, dtype)
    assert held < 0.7 * saved_bytes(plain, plain, dtype)


class Alone(Group):
    """Ranks of which this one alone exists: what others send is like its own."""

    def begin_shift(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """What this rank sends."""
        return tensor.clone(), lambda: None

    def all_gather_into(self, whole: Tensor, shard: Tensor) -> None:
        """This rank's shard in place of each."""
        whole.copy_(shard)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """What this rank sends."""
        return tensor.clone()


@pytest.mark.parametrize("kind", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_the_trainers_layer_keeps_what_its_operators_say_of_shared_sequences(
    shape: dict[str, Any], kind: ContextParallelKind
) -> None:
    model, dtype = Model(**shape), torch.float32
    layer = layer_of(model, dtype, sequence=SequenceShare(Alone((0, 1), 0, None), kind))
    saved = saved_bytes(layer, layer, dtype)
    context = Context(2.0, *(float(kind == each) for each in ("ring", "all_gather", "ulysses")))
    assert kept_bytes(model, load_stack("trimaran"), dtype, context) == pytest.approx(saved, rel=0.03)


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
