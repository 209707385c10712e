"""How long a host takes for the operators of a layer: what a GPU waits for where its kernels are shorter.

    python benchmarks/host_time.py

Needs `make peers`. Layers of others' software run here on so few elements that nothing but Python, PyTorch's dispatch
and autograd takes time; processor time of one thread. "made again" is a layer under PyTorch's reentrant
checkpoint, as Megatron's and DeepSpeed's are: forward, forward again and backward. `operators` is how many the cost
model counts forward, from which comes the time of one: `op_us` of a stack.
Writes benchmarks/results/host_time.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest.mock import MagicMock

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent / "traced"))

from cases import megatron_core_layer

from _others import others_since
from trimaran.files.catalogue import load_stack
from trimaran.nouns.model import Model
from trimaran.operators.layer import layer_operators
from trimaran.operators.operator import Part
from trimaran.protocol.host import Work, processor_name

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "host_time.md"
TOKENS, HIDDEN, HEADS, KV_HEADS = 8, 64, 8, 2
RUNS, CALLS, PAUSE_S = 12, 30, 0.2
DTYPE = torch.bfloat16
GPT = Model(layers=1, hidden=HIDDEN, heads=HEADS, vocab=256, max_positions=TOKENS)
LLAMA = Model(
    layers=1, hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS, vocab=256, mlp="swiglu", norm="rmsnorm",
    positions="rotary", bias=False, tied_embedding=False,
)  # fmt: skip

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Timed:
    """Microseconds of one layer; `operators` are counted of its forward."""

    software: str
    stack: str
    operators: float
    forward: float
    backward: float
    again: float

    @property
    def op_us(self) -> float:
        """Host time of one operator."""
        return self.forward / self.operators

    def line(self) -> str:
        """The table's row."""
        return (
            f"| {self.software} | {self.stack} | {self.operators:.0f} | {self.forward:.0f} | {self.backward:.0f} | "
            f"{self.again:.0f} | {self.op_us:.0f} | {self.backward / self.forward:.2f} |"
        )


def microseconds(call: Callable[[], object]) -> float:
    """Processor time of a call: the least of the medians of several runs, between which other programs come and go."""
    medians = []
    for _ in range(RUNS):
        times = []
        for _ in range(CALLS):
            begin = time.thread_time()
            call()
            times.append(time.thread_time() - begin)
        medians.append(median(times))
        time.sleep(PAUSE_S)
    return min(medians) * 1e6


def counted(model: Model, stack: str) -> float:
    """Operators that the cost model counts of a layer's forward."""
    part = Part(model, TOKENS, load_stack(stack), False, 1.0, 1.0, False, 2.0, 2.0)
    return sum(float(operator.launches) for operator in layer_operators(part))


def timed(software: str, stack: str, model: Model, layer: Layer, *, sequence_first: bool = False) -> Timed:
    """One layer's times."""
    shape = (TOKENS, 1, HIDDEN) if sequence_first else (1, TOKENS, HIDDEN)
    x = torch.randn(shape, dtype=DTYPE).requires_grad_()
    gradient = torch.ones(shape, dtype=DTYPE)
    forward = microseconds(lambda: layer(x))
    both = microseconds(lambda: torch.autograd.backward(layer(x), gradient))
    again = microseconds(lambda: torch.autograd.backward(checkpoint(layer, x, use_reentrant=True), gradient))
    return Timed(software, stack, counted(model, stack), forward, both - forward, again)


def megatron_core() -> Timed:
    """Megatron-Core's local layer, whose softmax is unfused here, as the operators that are counted."""
    with megatron_core_layer(GPT, dropout=0.1) as build:
        layer, mask = build().to(DTYPE), torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.bool)
        for parameter in layer.parameters():
            parameter.data.normal_(std=0.02)
        return timed(
            "Megatron-Core 0.16.1, local", "megatron-deepspeed", GPT,
            lambda x: layer(x, attention_mask=mask)[0], sequence_first=True,
        )  # fmt: skip


def hugging_face() -> Iterator[Timed]:
    """Transformers' GPT-2 and Llama layers."""
    from transformers import GPT2Config, LlamaConfig
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    gpt = GPT2Config.from_dict({"n_embd": HIDDEN, "n_head": HEADS, "n_layer": 1, "attn_implementation": "sdpa"})
    block = GPT2Block(gpt, layer_idx=0).to(DTYPE)
    yield timed("transformers, GPT-2", "torch-fsdp", GPT, lambda x: first(block(x)))
    llama = LlamaConfig.from_dict({
        "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "num_hidden_layers": 1, "attn_implementation": "sdpa",
    })  # fmt: skip
    decoder = LlamaDecoderLayer(llama, 0).to(DTYPE)
    angles = LlamaRotaryEmbedding(llama)(torch.zeros(1, dtype=DTYPE), torch.arange(TOKENS)[None])
    yield timed("transformers, Llama", "torch-fsdp", LLAMA, lambda x: first(decoder(x, position_embeddings=angles)))


def first(given: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The hidden state of what a layer gives."""
    return given[0] if isinstance(given, tuple) else given


def torchtitan() -> Iterator[Timed]:
    """The Llama block of torchtitan, eager and compiled."""
    import torch._inductor.compile_fx

    torch._utils._get_available_device_type = lambda: "cpu"
    sys.modules.setdefault("torchtitan.models.moe.kernels", MagicMock())
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import TransformerBlock, precompute_freqs_cis

    arguments = TransformerModelArgs(
        dim=HIDDEN, n_layers=1, n_heads=HEADS, n_kv_heads=KV_HEADS, max_seq_len=TOKENS, vocab_size=256
    )
    angles = precompute_freqs_cis(HIDDEN // HEADS, TOKENS)
    block = TransformerBlock(0, arguments).to(DTYPE)
    yield timed("torchtitan 0.2.2, eager", "torchtitan", LLAMA, lambda x: block(x, angles, None))
    block.compile(fullgraph=True)
    yield timed("torchtitan 0.2.2, compiled", "torchtitan-compiled", LLAMA, lambda x: block(x, angles, None))


def main() -> None:
    """Time all layers and write the page."""
    torch.set_num_threads(1)
    began = Work.so_far()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        layers = [megatron_core(), *hugging_face(), *torchtitan()]
    others = others_since(began)
    lines = [
        "# Host time of a layer",
        f"`python benchmarks/host_time.py` on {processor_name()}, PyTorch {torch.__version__.split('+')[0]}: layers of "
        f"{TOKENS} tokens and {HIDDEN} features, so that only the host's work takes time. Microseconds of one thread, "
        f"the least of {RUNS} medians of {CALLS}. {others}",
        "",
        "| layer | counted as | operators | forward | backward | made again | an operator | backward over forward |",
        "| --- | --- | --: | --: | --: | --: | --: | --: |",
        *(layer.line() for layer in layers),
    ]
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
