"""What a probe measures: shapes, sizes, repeats. No torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trimaran.nouns.model import Model, padded_vocab
from trimaran.nouns.noun import Noun
from trimaran.nouns.precision import RATES, Rate

# Which operand is transposed: x W^T (forward), dy W (gradient of the input), dy^T x (of the weight).
Orientation = Literal["forward", "input_gradient", "weight_gradient"]

KIB, MIB = 1024, 1024 * 1024
_SQUARES = (256, 512, 1024, 2048)
_SQUARES_QUICK = (256, 512, 1024)
_SQUARES_GPU = (1024, 2048, 4096, 8192)
# m, n, k with one side small, as tensor parallelism and small micro-batches make them
_SKINNY = ((64, 1024, 1024), (1024, 64, 1024), (1024, 1024, 64), (256, 2048, 512), (4096, 256, 256))


class ProbedProduct(Noun):
    """One matrix product to measure: m x k times k x n."""

    m: int = Field(gt=0)
    n: int = Field(gt=0)
    k: int = Field(gt=0)
    orientation: Orientation = "forward"


class AttentionShape(Noun):
    """One causal attention to measure, forward and backward."""

    batch_heads: int = Field(gt=0)
    seq_len: int = Field(gt=0)
    head_dim: int = Field(gt=0)


class ProbeSettings(Noun):
    """All that the ranks of one probe need; written as JSON and read by every rank.

    `groups` are the numbers of ranks that collectives and contention are measured with, besides 1.
    """

    device: Literal["cpu", "cuda"]
    ranks: int = Field(gt=0)
    threads_per_rank: int = Field(gt=0)
    groups: tuple[int, ...]
    precisions: tuple[Rate, ...]
    products: tuple[ProbedProduct, ...]
    attention: tuple[AttentionShape, ...]
    collective_bytes: tuple[int, ...]
    stream_mib: int = Field(gt=0, description="size of each of the three arrays of the bandwidth test")
    rounds: int = Field(gt=0)
    window_s: float = Field(gt=0, description="how long one look at contention lasts")
    quick: bool


def probe_settings(
    *,
    device: Literal["cpu", "cuda"],
    slots: int,
    threads_per_rank: int,
    model: Model | None,
    seq_len: int | None,
    mbs: tuple[int, ...],
    quick: bool,
) -> ProbeSettings:
    """Settings for a node of `slots` slots; with a model, its own products and attention too."""
    degrees = tuple(2**n for n in range(slots.bit_length()) if 2**n <= slots)
    on_cpu = device == "cpu"
    squares = (_SQUARES_QUICK if quick else _SQUARES) if on_cpu else _SQUARES_GPU
    products = [ProbedProduct(m=n, n=n, k=n) for n in squares] + [ProbedProduct(m=m, n=n, k=k) for m, n, k in _SKINNY]
    attention = [] if quick and model else [AttentionShape(batch_heads=8, seq_len=s, head_dim=64) for s in (256, 1024)]
    if model is not None:
        sequence = seq_len or model.max_positions
        for tp in degrees:
            products += model_products(model, sequence, mbs, tp)
            attention += model_attention(model, sequence, mbs, tp)
    top = 4 * MIB if quick and on_cpu else 64 * MIB
    sizes = [4 * KIB * 4**n for n in range(20) if 4 * KIB * 4**n <= top]
    return ProbeSettings(
        device=device,
        ranks=slots,
        threads_per_rank=threads_per_rank,
        groups=tuple(sorted({*degrees[1:], slots} - {1})),
        precisions=("fp32", "bf16") if on_cpu else RATES,
        products=tuple(dict.fromkeys(products)),
        attention=tuple(dict.fromkeys(attention)),
        collective_bytes=tuple(sorted({*sizes, top})),
        stream_mib=64 if on_cpu else 512,
        rounds=7 if quick else 15,
        window_s=0.1 if quick else 0.25,
        quick=quick,
    )


def model_products(model: Model, seq_len: int, mbs: tuple[int, ...], tp: int) -> list[ProbedProduct]:
    """Every product of one layer and of the head on one of `tp` ranks, forward and backward.

    None where `tp` does not divide the model.
    """
    if model.kv_heads % tp or model.ffn_hidden % tp:
        return []
    h = model.hidden
    weights = [
        ((model.attention_hidden + 2 * model.kv_hidden) // tp, h),
        (h, model.attention_hidden // tp),
        (model.ffn_hidden * (model.mlp_matrices - 1) // tp, h),
        (h, model.ffn_hidden // tp),
    ]
    if model.head == "vocabulary":
        weights.append((padded_vocab(model.vocab, tp) // tp, h))
    products = []
    for b in mbs:
        tokens = b * seq_len
        for out, into in weights:
            products += [
                ProbedProduct(m=tokens, n=out, k=into),
                ProbedProduct(m=tokens, n=into, k=out, orientation="input_gradient"),
                ProbedProduct(m=out, n=into, k=tokens, orientation="weight_gradient"),
            ]
    return products


def model_attention(model: Model, seq_len: int, mbs: tuple[int, ...], tp: int) -> list[AttentionShape]:
    """The attention of one layer on one of `tp` ranks; none where `tp` does not divide the heads."""
    if model.heads % tp:
        return []
    return [AttentionShape(batch_heads=b * model.heads // tp, seq_len=seq_len, head_dim=model.head_dim) for b in mbs]
