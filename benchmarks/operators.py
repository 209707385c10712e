"""What one layer of benchmarks/training.py costs by its parts, on one thread.

    python benchmarks/operators.py

Milliseconds of processor time (the best of several calls, so that other programs on the machine count little) of a
layer with 8 sequences of 256 tokens, forward and backward. The limit is what the MFU of a step would be if it were
the layers' products and attention alone. The second table is of that layer whole, a part of which is made again in the
backward: by the trainer, and by PyTorch's own checkpoints, of which the selective one keeps what products and attention
give and makes the norms and the rest again; MiB are what the layer then keeps. Writes benchmarks/results/operators.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import checkpoint

from peers.matmul import gflops
from trimaran.nouns.model import Model
from trimaran.protocol.host import processor_name
from trimaran.train.comm.mesh import lone_mesh
from trimaran.train.model.block_attention import Scores, causal_attention, is_faster_in_blocks
from trimaran.train.model.gpt import Layer
from trimaran.train.model.positions import Positions
from trimaran.train.model.product import add_product, linear, product
from trimaran.train.model.weight import Weight
from trimaran.train.programs.tracing import Trace

RESULTS = Path(__file__).parent / "results" / "operators.md"
CALLS = 8
BATCH, SEQ_LEN, HEADS, HEAD_DIM = 8, 256, 6, 64
TOKENS, HIDDEN = BATCH * SEQ_LEN, HEADS * HEAD_DIM
# (out, in) of the products of a layer
MATRICES = ((3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN))
PRODUCT_FLOPS = sum(3 * 2 * TOKENS * out * width for out, width in MATRICES)
ATTENTION_FLOPS = 3 * 2 * 2 * BATCH * HEADS * SEQ_LEN**2 * HEAD_DIM


def milliseconds(call: Callable[[], object]) -> float:
    call()
    best = float("inf")
    for _ in range(CALLS):
        begin = time.thread_time()
        call()
        best = min(best, time.thread_time() - begin)
    return best * 1e3


def products(dtype: torch.dtype, forward: Callable[..., Tensor], backward: Callable[..., Tensor]) -> float:
    """Forward, input gradient and weight gradient of all matrices."""
    total = 0.0
    for out, width in MATRICES:
        x, dy = torch.randn(TOKENS, width, dtype=dtype), torch.randn(TOKENS, out, dtype=dtype)
        weight, bias = torch.randn(out, width, dtype=dtype), torch.randn(out, dtype=dtype)
        grad = torch.zeros_like(weight)
        total += milliseconds(partial(forward, x, weight, bias))
        total += milliseconds(partial(backward, dy, weight))
        total += milliseconds(partial(add_product, grad, dy, x))
    return total


def attention(dtype: torch.dtype, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
    packed = torch.randn(BATCH, SEQ_LEN, HEADS, 3, HEAD_DIM, dtype=dtype, requires_grad=True)
    dy = torch.randn(BATCH, HEADS, SEQ_LEN, HEAD_DIM, dtype=dtype)

    def call() -> None:
        q, k, v = (packed[:, :, :, part].transpose(1, 2) for part in range(3))
        torch.autograd.grad(attend(q, k, v), (q, k, v), dy)

    return milliseconds(call)


def elementwise(dtype: torch.dtype) -> float:
    """GELU, two norms and two residual sums."""
    wide, x = (torch.randn(TOKENS, n * HIDDEN, dtype=dtype, requires_grad=True) for n in (4, 1))
    weight, bias = (torch.randn(HIDDEN, dtype=dtype, requires_grad=True) for _ in range(2))
    total = milliseconds(lambda: torch.autograd.grad(functional.gelu(wide), wide, wide))
    total += 2 * milliseconds(
        lambda: torch.autograd.grad(functional.layer_norm(x, (HIDDEN,), weight, bias), (x, weight, bias), x)
    )
    return total + 2 * milliseconds(lambda: x.detach() + x.detach())


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def in_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal_attention(q, k, v, Scores(HEAD_DIM**-0.5))


PRODUCTS = (
    "mm", "addmm", "bmm", "_linear_pointwise", "_unsafe_view", "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip


def keeps_products(
    context: object, operator: Any, *arguments: object, **settings: object
) -> checkpoint.CheckpointPolicy:
    """A policy of selective checkpointing: what products and attention give is kept."""
    policy, is_product = checkpoint.CheckpointPolicy, operator.overloadpacket.__name__ in PRODUCTS
    return policy.MUST_SAVE if is_product else policy.PREFER_RECOMPUTE


class Copy(nn.Module):
    """What PyTorch's selective checkpointing kept must not be written to, as the layer's sums do."""

    def forward(self, x: Tensor) -> Tensor:
        """A copy of `x`."""
        return x.clone()


def selectively(layer: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """PyTorch's selective checkpointing."""
    contexts = partial(checkpoint.create_selective_checkpoint_contexts, keeps_products)
    return cast(Tensor, checkpoint.checkpoint(layer, *inputs, use_reentrant=False, context_fn=contexts))


def made_again(dtype: torch.dtype, word: str) -> tuple[float, float]:
    """Milliseconds of a layer forward and backward, and the MiB that it keeps, where a part of it is made again."""
    model, mesh = Model(layers=1, hidden=HIDDEN, heads=HEADS, vocab=8192, activation="gelu"), lone_mesh()
    recompute = {"mlp": ("mlp",), "layernorm": ("layernorm",)}.get(word, ())
    layer = Layer(model, mesh, Positions(model, mesh.tp, mesh.sequence), 0, recompute=recompute)
    for module in layer.modules():
        for name, declared in module._parameters.items():
            if declared is not None:
                drawn = Weight(torch.randn(declared.shape, dtype=dtype) * 0.02)
                drawn.main_grad = torch.zeros(declared.shape, dtype=dtype)
                module._parameters[name] = drawn
    if word == "torch's checkpoint of the MLP":
        layer.mlp.forward = partial(checkpoint.checkpoint, layer.mlp.forward, use_reentrant=False)
    run: Callable[[Tensor], Tensor] = layer
    if word == "torch's selective one":
        for name in ("attention_output_norm", "mlp_output_norm"):
            setattr(layer, name, Copy())
        run = partial(selectively, layer)
    x = torch.randn(BATCH, SEQ_LEN, HIDDEN, dtype=dtype, requires_grad=True)
    trace = Trace({}, {})
    for weight in layer.parameters():
        trace.watch(weight, "weights")
    before = trace.held.now
    trace.watch(x, "input")
    with trace:
        y = run(x)
    kept = trace.held.now - before - y.untyped_storage().nbytes()
    return milliseconds(lambda: torch.autograd.grad(run(x), x, x.detach())), kept / 2**20


def column(dtype: torch.dtype) -> list[str]:
    """One precision's figures, in the order of the table's rows."""
    one = torch.empty(1, 1, 1, 1, dtype=dtype)
    own = in_blocks if is_faster_in_blocks(one, one, one, None) else flash
    ceiling = gflops(dtype, 1)
    in_products, in_attention = products(dtype, linear, product), attention(dtype, own)
    ideal = (PRODUCT_FLOPS + ATTENTION_FLOPS) / ceiling / 1e6
    parts = (
        products(dtype, functional.linear, torch.matmul),
        in_products,
        attention(dtype, flash),
        attention(dtype, in_blocks),
        elementwise(dtype),
    )
    return [
        f"{ceiling:.0f} GFLOP/s",
        *(f"{part:.1f} ms" for part in parts),
        f"{ideal / (in_products + in_attention):.0%}",
    ]


def main() -> None:
    torch.set_num_threads(1)
    rows = (
        "matmul ceiling of one core",
        "products as PyTorch does them",
        "products as the trainer does them",
        "attention: the flash kernel",
        "attention: blocks of queries",
        "GELU, norms, residuals",
        "limit of MFU by products and attention",
    )
    found = [column(dtype) for dtype in (torch.float32, torch.bfloat16)]
    lines = ["| a layer, one thread | fp32 | bf16 |", "| --- | --: | --: |"]
    lines += [f"| {name} | {fp32} | {bf16} |" for name, fp32, bf16 in zip(rows, *found, strict=True)]
    lines += ["", "| of the layer is made again | fp32 | bf16 |", "| --- | --: | --: |"]
    for word in ("nothing", "mlp", "torch's checkpoint of the MLP", "layernorm", "torch's selective one"):
        figures = [made_again(dtype, word) for dtype in (torch.float32, torch.bfloat16)]
        lines.append(f"| {word} | " + " | ".join(f"{ms:.1f} ms, {mib:.1f} MiB" for ms, mib in figures) + " |")
    text = (
        f"# A layer by its parts\n\nOn {processor_name()}.\n\n"
        + "\n\n".join(__doc__.strip().split("\n\n")[2:])
        + "\n\n"
        + "\n".join(lines)
        + "\n"
    )
    RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
