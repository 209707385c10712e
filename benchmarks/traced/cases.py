"""Layers of other software, and of Trimaran, at full size: each makes a layer, runs it forward, and names its parts."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import MagicMock

sys.path.append(str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn
from torch.nn import functional
from tracer import Saved, fake_mode

from _peers import need_peers
from trimaran.files.catalogue import load_model, load_stack
from trimaran.nouns.model import Model
from trimaran.nouns.stack import Stack
from trimaran.train.programs.tracing import as_on_cuda

need_peers()
# torch's own eager operators, as a plain model of Hugging Face runs them
EAGER = Stack(name="eager PyTorch", flash_attention=True, rms_norm="eager", native_gelu=True)


@dataclass(frozen=True)
class Traced:
    """What one layer kept: the stack and model whose operators are laid beside it, and which module is which part.

    `operations` are those of its products forward, where they were counted; `only` says which part of a layer it is.
    """

    software: str
    model: Model
    stack: Stack
    mbs: int
    seq_len: int
    dtype: torch.dtype
    saved: Saved
    parts: dict[str, str]
    tp: int = 1
    on_cpu: bool = False
    operations: float = 0.0
    only: Literal["", "mixture"] = ""

    def by_part(self) -> dict[str, int]:
        """Bytes by part of the layer."""
        found: dict[str, int] = {}
        for kept in self.saved.kept:
            part = self.parts[kept.module]
            found[part] = found.get(part, 0) + (0 if part in ("ends", "unfused") else kept.size)
        return found


def _kept(layer: nn.Module, run: Callable[[Tensor], Any], x: Tensor, known: tuple[Tensor, ...] = ()) -> Saved:
    with Saved(layer, known) as saved:
        run(x)
    return saved


LLAMA_PARTS = {
    "attention_norm": "norms", "ffn_norm": "norms", "attention.wq": "qkv", "attention.wk": "qkv", "attention.wv": "qkv",
    "attention": "attention", "attention.inner_attention": "attention", "attention.wo": "projection", "": "residual",
    "feed_forward.w1": "up", "feed_forward.w3": "up", "feed_forward": "activation", "feed_forward.w2": "down",
}  # fmt: skip


def torchtitan(name: str, mbs: int, seq_len: int, dtype: torch.dtype, *, fused: bool) -> Traced:
    """The Llama block of torchtitan 0.2.2; `fused`: PyTorch's RMS norm is one kernel, as on a GPU from 2.9 on."""
    import torch._inductor.compile_fx  # before the shim below stands in for Triton

    torch._utils._get_available_device_type = lambda: "cpu"
    sys.modules.setdefault("torchtitan.models.moe.kernels", MagicMock())
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import TransformerBlock, precompute_freqs_cis

    model = load_model(name)
    arguments = TransformerModelArgs(
        dim=model.hidden, n_layers=model.layers, n_heads=model.heads, n_kv_heads=model.kv_heads, multiple_of=1024,
        ffn_dim_multiplier=model.ffn_hidden * 3 / (8 * model.hidden), max_seq_len=seq_len,
    )  # fmt: skip
    with fake_mode(dtype), as_on_cuda(fused_rms_norm=fused):
        layer = TransformerBlock(0, arguments)
        angles = precompute_freqs_cis(model.head_dim, seq_len)
        x = torch.empty(mbs, seq_len, model.hidden, dtype=dtype, requires_grad=True)
        saved = _kept(layer, lambda hidden: layer(hidden, angles, None), x, (angles,))
    stack = load_stack("torchtitan-0.2").model_copy(update={"rms_norm": "fused" if fused else "composite"})
    norm = "fused" if fused else "composite"
    return Traced(f"torchtitan 0.2.2, {norm} norms", model, stack, mbs, seq_len, dtype, saved, LLAMA_PARTS)


def torchtitan_over_tp(name: str, mbs: int, seq_len: int, dtype: torch.dtype, tp: int) -> Traced:
    """The same under torchtitan's own tensor and sequence parallelism, on a fake process group."""
    import torch._inductor.compile_fx
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch._utils._get_available_device_type = lambda: "cpu"
    sys.modules.setdefault("torchtitan.models.moe.kernels", MagicMock())
    from torchtitan.models.llama3.infra.parallelize import apply_tp
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    model = load_model(name)
    arguments = TransformerModelArgs(
        dim=model.hidden, n_layers=1, n_heads=model.heads, n_kv_heads=model.kv_heads, multiple_of=1024,
        ffn_dim_multiplier=model.ffn_hidden * 3 / (8 * model.hidden), max_seq_len=seq_len, vocab_size=model.vocab,
    )  # fmt: skip
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    try:
        mesh = init_device_mesh("cpu", (tp,))
        with fake_mode(dtype), as_on_cuda(fused_rms_norm=False):
            whole = Transformer(arguments)
            apply_tp(whole, mesh, loss_parallel=True, enable_float8_tensorwise_tp=False)
            with Saved(whole) as saved:
                whole(torch.zeros(mbs, seq_len, dtype=torch.int64))
    finally:
        dist.destroy_process_group()
    stack = load_stack("torchtitan-0.2").model_copy(update={"rms_norm": "composite"})
    ends = {"tok_embeddings": "ends", "norm": "ends", "output": "ends"}
    parts = {f"layers.0.{module}".rstrip("."): part for module, part in LLAMA_PARTS.items()} | ends
    return Traced(f"torchtitan 0.2.2, TP {tp}", model, stack, mbs, seq_len, dtype, saved, parts | {"": "ends"}, tp)


def hugging_face_llama(name: str, mbs: int, seq_len: int, dtype: torch.dtype) -> Traced:
    """Transformers' Llama layer with scaled_dot_product_attention."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    model = load_model(name)
    config = LlamaConfig(
        hidden_size=model.hidden, intermediate_size=model.ffn_hidden, num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads, num_hidden_layers=1, attn_implementation="sdpa",
        max_position_embeddings=seq_len,
    )  # fmt: skip
    with fake_mode(dtype), as_on_cuda(fused_rms_norm=True):
        layer = LlamaDecoderLayer(config, 0)
        x = torch.empty(mbs, seq_len, model.hidden, dtype=dtype, requires_grad=True)
        angles = LlamaRotaryEmbedding(config)(x, torch.arange(seq_len)[None])
        saved = _kept(layer, lambda hidden: layer(hidden, position_embeddings=angles), x, angles)
    parts = {
        "input_layernorm": "norms", "post_attention_layernorm": "norms", "self_attn.q_proj": "qkv",
        "self_attn.k_proj": "qkv", "self_attn.v_proj": "qkv", "self_attn": "attention",
        "self_attn.o_proj": "projection",
        "mlp.gate_proj": "up", "mlp.up_proj": "up", "mlp.act_fn": "activation", "mlp": "activation",
        "mlp.down_proj": "down", "": "residual",
    }  # fmt: skip
    return Traced("Hugging Face Llama", model, EAGER, mbs, seq_len, dtype, saved, parts)


def hugging_face_gpt2(name: str, mbs: int, seq_len: int, dtype: torch.dtype) -> Traced:
    """Transformers' GPT-2 layer, dropout off, PyTorch's own GELU."""
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    model = load_model(name)
    config = GPT2Config(
        n_embd=model.hidden, n_head=model.heads, n_positions=seq_len, n_inner=model.ffn_hidden, n_layer=1,
        activation_function="gelu", attn_implementation="sdpa", resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0,
    )  # fmt: skip
    with fake_mode(dtype), as_on_cuda(fused_rms_norm=True):
        layer = GPT2Block(config, 0)
        x = torch.empty(mbs, seq_len, model.hidden, dtype=dtype, requires_grad=True)
        saved = _kept(layer, layer, x)
    parts = {
        "ln_1": "norms", "ln_2": "norms", "attn.c_attn": "qkv", "attn": "attention", "attn.c_proj": "projection",
        "mlp.c_fc": "up", "mlp.act": "activation", "mlp.c_proj": "down", "": "residual",
        "attn.resid_dropout": "residual", "mlp.dropout": "residual",
    }  # fmt: skip
    return Traced("Hugging Face GPT-2", model, EAGER, mbs, seq_len, dtype, saved, parts)


TRIMARAN_PARTS = {
    "attention_norm": "norms", "mlp_norm": "norms", "attention.qkv": "qkv", "attention": "attention",
    "attention.projection": "projection", "mlp.gate_up": "up", "mlp.up": "up", "mlp": "activation", "mlp.down": "down",
    "": "residual",
}  # fmt: skip


def trimaran(model: Model, mbs: int, seq_len: int, dtype: torch.dtype, *, on_cpu: bool = False) -> Traced:
    """Trimaran's own layer, as on a GPU or as on a CPU."""
    from trimaran.train.comm.mesh import lone_mesh
    from trimaran.train.model.gpt import Layer
    from trimaran.train.model.positions import Positions
    from trimaran.train.model.weight import Weight

    mesh = lone_mesh()
    kernels = contextlib.nullcontext() if on_cpu else as_on_cuda(fused_rms_norm=True)
    with fake_mode(dtype), kernels:
        layer = Layer(model, mesh, Positions(model, mesh.tp, mesh.sequence), 0)
        for module in layer.modules():
            for weight, declared in module._parameters.items():
                if declared is not None:
                    placed = Weight(torch.empty(declared.shape))
                    placed.eight_bit = False  # under the fake mode it is a fake tensor, without what its class has
                    module._parameters[weight] = placed
        x = torch.empty(mbs, seq_len, model.hidden, dtype=dtype, requires_grad=True)
        saved = _kept(layer, layer, x)
    where = "CPU" if on_cpu else "GPU"
    stack = load_stack("trimaran")
    return Traced(f"Trimaran on a {where}", model, stack, mbs, seq_len, dtype, saved, TRIMARAN_PARTS, on_cpu=on_cpu)


@contextlib.contextmanager
def megatron_core_layer(model: Model, *, dropout: float) -> Iterator[Callable[[], nn.Module]]:
    """What builds Megatron-Core's local layer in bf16 with its softmax unfused, on a fake process group of one rank.

    Its fused softmax wants CUDA. Random numbers are the CPU's.
    """
    import megatron.core.transformer.dot_product_attention as core
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch._dynamo.config.disable = True
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        config = TransformerConfig(
            num_layers=1, hidden_size=model.hidden, num_attention_heads=model.heads, ffn_hidden_size=model.ffn_hidden,
            bf16=True, params_dtype=torch.bfloat16, use_cpu_initialization=True, perform_initialization=False,
            hidden_dropout=dropout, attention_dropout=dropout, bias_activation_fusion=True,
            gradient_accumulation_fusion=False, masked_softmax_fusion=False,
        )  # fmt: skip
        core.tensor_parallel.get_cuda_rng_tracker = lambda *_: NoTracker()
        yield lambda: build_module(get_gpt_layer_local_spec(), config=config, layer_number=1)
    finally:
        torch._dynamo.config.disable = False
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class NoTracker:
    """Random numbers as they come: Megatron's tracker keeps states of a CUDA device."""

    def fork(self, *_: object) -> contextlib.AbstractContextManager[None]:
        """The numbers of nothing in particular."""
        return contextlib.nullcontext()


def megatron_core(name: str, mbs: int, seq_len: int) -> Traced:
    """Megatron-Core 0.16.1's local layer, dropout off; only what its fused softmax keeps of the scores is counted.

    That kernel wants CUDA, so the trace runs its fallback, whose fp32 copy counts apart (`unfused`).
    """
    model, dtype = load_model(name), torch.bfloat16
    with megatron_core_layer(model, dropout=0.0) as build, fake_mode(dtype):
        layer = build()
        x = torch.empty(seq_len, mbs, model.hidden, dtype=dtype, requires_grad=True)
        mask = torch.ones(1, 1, seq_len, seq_len, dtype=torch.bool)
        saved = _kept(layer, lambda hidden: layer(hidden, attention_mask=mask), x, (mask,))
    parts = {
        "input_layernorm": "norms", "pre_mlp_layernorm": "norms", "self_attention.linear_qkv": "qkv",
        "self_attention.core_attention": "attention", "self_attention.linear_proj": "projection", "": "residual",
        "self_attention.core_attention.scale_mask_softmax": "unfused", "mlp.linear_fc1": "up", "mlp": "activation",
        "self_attention.core_attention.attention_dropout": "attention", "mlp.linear_fc2": "down",
        "self_attention": "attention",
    }  # fmt: skip
    stack = load_stack("megatron").model_copy(update={"dropout": False})
    return Traced("Megatron-Core 0.16.1, local", model, stack, mbs, seq_len, dtype, saved, parts)


def _grouped_operations(rows: Sequence[int], weights: Sequence[int], *_: object, **__: object) -> int:
    """Of grouped products, which PyTorch's counter does not know: each row meets one expert's weights."""
    return 2 * rows[0] * rows[1] * weights[-1]


def hugging_face_mixtral(name: str, mbs: int, seq_len: int, dtype: torch.dtype) -> Traced:
    """Transformers' Mixtral layer with its grouped products, all copies of tokens on one rank."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer, MixtralRotaryEmbedding

    model = load_model(name)
    config = MixtralConfig(
        hidden_size=model.hidden, intermediate_size=model.moe_ffn_hidden, num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads, num_local_experts=model.experts, num_experts_per_tok=model.top_k,
        num_hidden_layers=1, attn_implementation="sdpa",
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: _grouped_operations})
    with fake_mode(dtype), as_on_cuda(fused_rms_norm=True), counter:
        layer = MixtralDecoderLayer(config, 0)
        x = torch.empty(mbs, seq_len, model.hidden, dtype=dtype, requires_grad=True)
        angles = MixtralRotaryEmbedding(config)(x, torch.arange(seq_len)[None])
        saved = _kept(layer, lambda hidden: layer(hidden, position_embeddings=angles), x, angles)
    parts = {
        "input_layernorm": "norms", "post_attention_layernorm": "norms", "self_attn.q_proj": "qkv",
        "self_attn.k_proj": "qkv", "self_attn.v_proj": "qkv", "self_attn": "attention",
        "self_attn.o_proj": "projection", "": "residual", "mlp": "experts", "mlp.experts": "experts",
        "mlp.gate": "router",
    }  # fmt: skip
    stack = EAGER.model_copy(update={"weighs_results": True, "grouped_products": "one_kernel"})
    products = float(counter.get_total_flops())
    return Traced("Hugging Face Mixtral", model, stack, mbs, seq_len, dtype, saved, parts, operations=products)


def megatron_core_experts(name: str, tokens: int, hidden: int) -> Traced:
    """Megatron-Core 0.16.1's layer of experts as its local modules make it, in a smaller size: counts are of values.

    How many tokens an expert is sent is read from a tensor, which a fake one does not have. The router's weights are
    zero, so that tokens go to the same experts.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # without Transformer Engine its name is not there, which the router asks
    moe_utils.te_general_gemm = None
    large, dtype = load_model(name), torch.bfloat16
    width = large.moe_ffn_hidden * hidden // large.hidden
    model = large.model_copy(update={"hidden": hidden, "moe_ffn_hidden": width, "experts": 16})
    torch.cuda.current_device = lambda: torch.device("cpu")
    stream = MagicMock()  # on which counts of tokens go to the host
    torch.cuda.Stream = torch.cuda.current_stream = lambda *_: stream
    torch._dynamo.config.disable = True
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        config = TransformerConfig(
            num_layers=1, hidden_size=hidden, num_attention_heads=8, ffn_hidden_size=width, bf16=True,
            params_dtype=dtype, use_cpu_initialization=True, perform_initialization=False, add_bias_linear=False,
            gated_linear_unit=True, activation_func=functional.silu, bias_activation_fusion=True,
            gradient_accumulation_fusion=False, num_moe_experts=model.experts, moe_router_topk=model.top_k,
            moe_ffn_hidden_size=width, moe_token_dispatcher_type="alltoall", moe_router_dtype="fp32",
            moe_aux_loss_coeff=0.0, moe_router_load_balancing_type="none",
        )  # fmt: skip
        spec = get_moe_module_spec(use_te=False, num_experts=model.experts, moe_grouped_gemm=False)
        layer = build_module(spec, config=config).to(dtype)
        for parameter in layer.parameters():
            parameter.data.normal_(std=0.02)
        x = torch.randn(tokens, 1, hidden, dtype=dtype).requires_grad_()
        saved = _kept(layer, layer, x)
    finally:
        torch._dynamo.config.disable = False
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    parts = {entry.module: "router" if "router" in entry.module else "experts" for entry in saved.kept}
    stack = load_stack("megatron-core")
    return Traced("Megatron-Core 0.16.1, local experts", model, stack, 1, tokens, dtype, saved, parts, only="mixture")


def loss_peak(tokens: int, vocab: int, *, frees_logits: bool) -> int:
    """Peak bytes of torch's cross-entropy over bf16 logits cast to fp32, forward and backward."""
    from tracer import Live

    with fake_mode(), Live() as live:
        logits = torch.empty(tokens, vocab, dtype=torch.bfloat16, requires_grad=True)
        made = logits * 1.0
        loss = functional.cross_entropy(made.float(), torch.zeros(tokens, dtype=torch.int64))
        live.peak = live.now = live.now - logits.untyped_storage().nbytes()
        if frees_logits:
            del made
        loss.backward()
        return live.peak


def loss_peak_over_tp(tokens: int, vocab: int, tp: int) -> int:
    """Peak bytes of the cross-entropy that DTensor runs where `tp` ranks share the vocabulary, 16-bit logits let go."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import loss
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from tracer import Live

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    try:
        mesh = init_device_mesh("cpu", (tp,))
        whole, ignored, mean = torch.Size([tokens, vocab]), -100, 1
        with fake_mode(), Live() as live:
            target = torch.zeros(tokens, dtype=torch.int64)
            logits = torch.empty(tokens, vocab // tp, dtype=torch.bfloat16)
            likelihoods = loss._log_softmax(logits.float(), 1, False, mesh, 0)
            _, weight = loss._nll_loss_forward(likelihoods, target, None, None, mean, ignored, whole, 1, mesh, 0)
            del logits
            loss._nll_loss_and_log_softmax_backward(
                torch.ones(()), likelihoods, target, None, mean, ignored, weight, whole, 1, mesh, 0
            )
            return live.peak
    finally:
        dist.destroy_process_group()
