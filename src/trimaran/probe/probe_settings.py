"""What a probe measures: shapes, sizes, repeats. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from trimaran.files.catalogue import load_stack
from trimaran.layout.rules import trait_it_lacks
from trimaran.nouns.model import Model, padded_vocab
from trimaran.nouns.noun import Noun, TrimaranError
from trimaran.nouns.precision import PROBED_RATES, ProbedRate
from trimaran.nouns.probed_model import PartName
from trimaran.nouns.stack import Stack

# Which operand is transposed: x W^T (forward), dy W (gradient of the input), dy^T x (of the weight).
Orientation = Literal["forward", "input_gradient", "weight_gradient"]

KIB, MIB = 1024, 1024 * 1024
_SQUARES = (256, 512, 1024, 2048)
_SQUARES_QUICK = (256, 512, 1024)
_SQUARES_GPU = (1024, 2048, 4096, 8192)
# Heads in all, sequence, dimensions of a head: a causal kernel passes over more of what is masked the longer sequences
# are, and what it does a score weighs more the smaller heads are.
_ATTENTION = ((8, 256, 32), (8, 256, 64), (8, 1024, 64), (4, 1024, 128), (2, 4096, 64))
# Tokens, outputs and inputs with one side small, as tensor parallelism and small micro-batches make them.
_SKINNY = ((64, 1024, 1024), (1024, 64, 1024), (1024, 1024, 64), (256, 2048, 512), (4096, 256, 256))

# Beyond these seconds no further sample is taken of the products, of attention, and of a model's parts, each.
LIMIT_S, QUICK_LIMIT_S = 60.0, 8.0
# Ranks between which tensor parallelism is of use on GPUs: those on one node's fast link.
GPUS_OF_A_NODE = 8


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


class PartCase(Noun):
    """One part of the model to measure whole, forward and backward: the share of one of `tp` ranks."""

    part: PartName
    tp: int = Field(gt=0)
    mbs: int = Field(gt=0)
    seq_len: int = Field(gt=0)


class ProbeSettings(Noun):
    """All that the ranks of one probe need; written as JSON and read by every rank.

    `groups` are the numbers of ranks that collectives and contention are measured with, besides 1. `limit_s` bounds
    the time of the products, of attention and of the model's `parts`, each.
    """

    device: Literal["cpu", "cuda"]
    ranks: int = Field(gt=0)
    threads_per_rank: int = Field(gt=0)
    groups: tuple[int, ...]
    precisions: tuple[ProbedRate, ...]
    products: tuple[ProbedProduct, ...]
    attention: tuple[AttentionShape, ...]
    model: Model | None = None
    stack: str = ""
    plain_products: bool = Field(default=False, description="products as PyTorch makes them, not Trimaran's trainer")
    parts: tuple[PartCase, ...] = ()
    limit_s: float = Field(default=60.0, gt=0)
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
    stack: Stack | None = None,
) -> ProbeSettings:
    """Settings for a node of `slots` slots; with a model, its own products, attention and parts too.

    They are those of a rank of `stack`, or of Trimaran's own trainer. Raises TrimaranError where the model has learned
    fewer positions than the sequence has.
    """
    degrees = _powers_of_two(slots)
    on_cpu = device == "cpu"
    squares = (_SQUARES_QUICK if quick else _SQUARES) if on_cpu else _SQUARES_GPU
    shapes = [(n, n, n) for n in squares] + list(_SKINNY)
    products = [each for tokens, out, into in shapes for each in _products(tokens, out, into)]
    asked = () if quick and model else _ATTENTION[:3] if quick else _ATTENTION
    attention = [AttentionShape(batch_heads=heads, seq_len=s, head_dim=dim) for heads, s, dim in asked]
    parts: list[PartCase] = []
    if model is not None:
        stack = stack or load_stack("trimaran")
        sequence = seq_len or model.max_positions
        if model.positions == "learned" and sequence > model.max_positions:
            raise TrimaranError(
                f"--seq-len {sequence} exceeds the {model.max_positions} max_positions of model "
                f"{model.name or 'given'}: ask for at most {model.max_positions}"
            )
        # A node of GPUs has eight, and one of them tells about all.
        wanted = degrees if on_cpu else _powers_of_two(max(slots, GPUS_OF_A_NODE))
        shares = [tp for tp in wanted if _divides(tp, model) and (tp == 1 or stack.tensor_parallel)]
        for tp in shares:
            products += model_products(model, sequence, mbs, tp, pads_vocab=stack.pads_vocab)
            attention += model_attention(model, sequence, mbs, tp) if stack.flash_attention else []
        if not_measured_whole(model, stack) is None:
            # ranks of TP have experts of their own, which a rank alone has no tokens for
            parts = model_parts(model, sequence, mbs, [1] if model.experts else shares)
    top = 4 * MIB if quick and on_cpu else 64 * MIB
    sizes = [4 * KIB * 4**n for n in range(20) if 4 * KIB * 4**n <= top]
    return ProbeSettings(
        device=device,
        ranks=slots,
        threads_per_rank=threads_per_rank,
        groups=tuple(sorted({*degrees[1:], slots} - {1})),
        precisions=("fp32", "bf16") if on_cpu else PROBED_RATES,
        products=tuple(dict.fromkeys(products)),
        attention=tuple(dict.fromkeys(attention)),
        model=model if parts else None,
        stack=stack.name if stack and parts else "",
        plain_products=stack is not None and stack.framework != "trimaran",
        parts=tuple(parts),
        limit_s=QUICK_LIMIT_S if quick else LIMIT_S,
        collective_bytes=tuple(sorted({*sizes, top})),
        stream_mib=64 if on_cpu else 512,
        rounds=7 if quick else 15,
        window_s=0.1 if quick else 0.25,
        quick=quick,
    )


def not_measured_whole(model: Model, stack: Stack) -> str | None:
    """Why layers of the model cannot be measured whole for this stack, in one sentence; None where they can."""
    if stack.framework != "trimaran":
        return (
            f"layers of stack {stack.name} run in software that is not here: its products"
            f"{' and attention' if stack.flash_attention else ''} are measured, whole layers for --stack trimaran alone"
        )
    if not stack.name:
        return "the stack has no name by which predictions could find its layers: its products are measured; state name"
    if model.dropout:
        return (
            f"model.dropout is {model.dropout:g}, and {stack.name} trains without: its products are measured; set it "
            f"to 0 for whole layers"
        )
    if trait := trait_it_lacks(model, stack):
        return f"{trait}, and {stack.name} trains no such model: its products are measured, and no layers whole"
    return None


def _powers_of_two(most: int) -> tuple[int, ...]:
    return tuple(2**n for n in range(most.bit_length()) if 2**n <= most)


def _divides(tp: int, model: Model) -> bool:
    return not (model.heads % tp or model.kv_heads % tp or model.ffn_hidden % tp)


def model_products(
    model: Model, seq_len: int, mbs: tuple[int, ...], tp: int, *, pads_vocab: bool = True
) -> list[ProbedProduct]:
    """Every product of one layer and of the head on one of `tp` ranks, forward and backward.

    None where `tp` does not divide the model.
    """
    if not _divides(tp, model):
        return []
    h = model.hidden
    weights = _attention_weights(model, tp)
    if model.main_kind == "dense" or model.dense_layers:
        weights += _mlp(model, model.ffn_hidden, tp)
    if model.shared_experts:
        weights += _mlp(model, model.shared_experts * model.moe_ffn_hidden, tp)
    if model.head == "vocabulary":
        weights.append(((padded_vocab(model.vocab, tp) if pads_vocab else model.vocab) // tp, h))
    products = []
    for b in mbs:
        tokens = b * seq_len
        products += [product for out, into in weights for product in _products(tokens, out, into)]
        if model.experts:
            each = max(1, tokens * model.top_k // model.experts)
            experts = _mlp(model, model.moe_ffn_hidden, 1)
            products += [product for out, into in experts for product in _products(each, out, into)]
    return products


def _attention_weights(model: Model, tp: int) -> list[tuple[int, int]]:
    """(out, in) of the matrices of attention on one of `tp` ranks."""
    h, latent, projection = model.hidden, model.latent_attention, (model.hidden, model.context_hidden // tp)
    if latent is None:
        return [((model.attention_hidden + 2 * model.kv_hidden) // tp, h), projection]
    keys_values = model.heads * (latent.plain_dim + latent.value_dim)
    return [
        (latent.query_rank + latent.kv_rank + latent.rotary_dim, h),
        (model.attention_hidden // tp, latent.query_rank or h),
        (keys_values // tp, latent.kv_rank),
        projection,
    ]


def _mlp(model: Model, width: int, tp: int) -> list[tuple[int, int]]:
    """(out, in) of the matrices of an MLP of an inner `width`."""
    return [(width * (model.mlp_matrices - 1) // tp, model.hidden), (model.hidden, width // tp)]


def _products(tokens: int, out: int, into: int) -> tuple[ProbedProduct, ...]:
    """The products of one matrix (out, in): forward, and backward for its input and for itself."""
    return (
        ProbedProduct(m=tokens, n=out, k=into),
        ProbedProduct(m=tokens, n=into, k=out, orientation="input_gradient"),
        ProbedProduct(m=out, n=into, k=tokens, orientation="weight_gradient"),
    )


def model_attention(model: Model, seq_len: int, mbs: tuple[int, ...], tp: int) -> list[AttentionShape]:
    """The attention of one layer on one of `tp` ranks; none where `tp` does not divide the heads."""
    if not _divides(tp, model):
        return []
    return [AttentionShape(batch_heads=b * model.heads // tp, seq_len=seq_len, head_dim=model.head_dim) for b in mbs]


def model_parts(model: Model, seq_len: int, mbs: tuple[int, ...], shares: Sequence[int]) -> list[PartCase]:
    """A layer, and the head where the model has one, under each share of TP: the smallest share first."""
    names: tuple[PartName, ...] = ("layer", "head") if model.head == "vocabulary" else ("layer",)
    return [
        PartCase(part=name, tp=tp, mbs=b, seq_len=seq_len)
        for name in names
        for tp in sorted(shares, reverse=True)
        for b in sorted(mbs)
    ]
