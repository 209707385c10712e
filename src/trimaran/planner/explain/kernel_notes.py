"""Kernels: where a layout's shapes fall badly on the hardware, in sentences.

Names what the cost model's compute part charges for without saying: output tiles that are cut off, a
last wave that fills few multiprocessors, sizes off the tensor cores' alignment, fused kernels that the
shape is not eligible for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from trimaran.cost.kernels import ALIGNMENT
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.model import padded_vocab
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload

# The tile that GPU matrix libraries prefer for large products (NVIDIA, Matrix Multiplication Background).
TILE = 128
# Idle shares below this are not worth a sentence.
_WORTH_SAYING = 0.08


def kernel_notes(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> tuple[str, ...]:
    """What the shapes of this layout cost in tiles, waves, alignment and fused kernels; empty on a CPU."""
    if not cluster.device.multiprocessors:
        return ()
    return (
        *_softmax(layout, workload, stack),
        *_alignment(layout, workload),
        *_waves(layout, workload, cluster, stack),
    )


def _softmax(layout: Layout, workload: Workload, stack: Stack) -> Iterator[str]:
    if stack.flash_attention or not stack.fused_softmax:
        return
    if layout.precision == "fp32":
        yield "fused softmax is not eligible: it takes 16-bit scores, and precision is fp32"
    heads = workload.model.heads // layout.tp
    if heads * layout.mbs % 4:
        yield (
            f"fused softmax is not eligible: heads {workload.model.heads} / TP {layout.tp} x micro-batch {layout.mbs} "
            f"= {heads * layout.mbs} is not a multiple of 4"
        )
    if workload.seq_len > stack.fused_softmax_max_seq:
        yield f"fused softmax is not eligible: seq_len {workload.seq_len} exceeds {stack.fused_softmax_max_seq}"
    if workload.seq_len % 4 or workload.seq_len <= 16:
        yield f"fused softmax is not eligible: seq_len {workload.seq_len} is not a multiple of 4 above 16"


def _alignment(layout: Layout, workload: Workload) -> Iterator[str]:
    model = workload.model
    if layout.precision == "fp32":
        return
    sizes = {"head size": model.head_dim, "hidden": model.hidden}
    if "dense" in model.kinds:
        sizes["ffn_hidden / TP"] = model.ffn_hidden // layout.tp
    for name, size in sizes.items():
        if size % ALIGNMENT:
            yield f"{name} {size} is not a multiple of {ALIGNMENT}, which tensor cores want"


def _waves(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> Iterator[str]:
    """The layer's largest products and the head: tiles of the output in waves over the multiprocessors.

    A rank of context parallelism multiplies its share of the sequences alone. Nothing is said of experts, whose tokens
    are not known before they are sent, nor of latent attention's products.
    """
    model, t = workload.model, layout.tp
    tokens, sms = layout.mbs * workload.seq_len // layout.cp, cluster.device.multiprocessors
    products = {}
    if model.latent_attention is None:
        products["qkv"] = (model.attention_hidden + 2 * model.kv_hidden) // t
    if "dense" in model.kinds:
        products |= {"ffn up": model.ffn_hidden * (model.mlp_matrices - 1) // t, "ffn down": model.hidden}
    if model.head == "vocabulary":
        products["logits"] = (padded_vocab(model.vocab, t) if stack.pads_vocab else model.vocab) // t
    for name, columns in products.items():
        tiles = math.ceil(tokens / TILE) * math.ceil(columns / TILE)
        waves = math.ceil(tiles / sms)
        useful = tokens * columns / (waves * sms * TILE * TILE)
        if 1.0 - useful >= _WORTH_SAYING:
            yield (
                f"{name}: {tokens} x {columns} is {tiles} tiles of {TILE} x {TILE}, {tiles / sms:.2f} waves on {sms} "
                f"multiprocessors, {1.0 - useful:.0%} of them idle or cut off"
            )
