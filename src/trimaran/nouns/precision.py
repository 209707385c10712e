"""Precision: a number format to train in, and what it makes of weights, activations, gradients and states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

PrecisionName = Literal["fp32", "fp16", "bf16", "bf16_pure", "fp8", "fp8_rowwise", "mxfp8", "nvfp4"]
# Formats of products that PyTorch has a type for, and a probe measures.
ProbedRate = Literal["fp32", "bf16", "fp16"]
PROBED_RATES: tuple[ProbedRate, ...] = get_args(ProbedRate)
# Formats of products that a device has a rate for.
Rate = Literal["fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]


@dataclass(frozen=True)
class NarrowFormat:
    """What the layers' linear products read, where that is narrower than 16 bit: both operands, forward and backward.

    They are cast to it from 16 bit and leave 16 bit. `element_bytes` are of one element, `scale_bytes` of the scales
    beside it, which one scale a tensor does not count. Where `tensor_scale` the largest value of a whole tensor has
    to be known before it is cast. Where elements of `one_direction` share a scale, the copy that the forward reads is
    not the one that the backward reads, whatever the device; `row_scale` says that those are whole rows. `gathers`:
    software can shard and gather weights in it; `gathers_inputs`: sequence parallelism gathers in it what a product
    reads.
    """

    element_bytes: float
    scale_bytes: float = 0.0
    tensor_scale: bool = False
    one_direction: bool = False
    row_scale: bool = False
    gathers: bool = True
    gathers_inputs: bool = True


@dataclass(frozen=True)
class Precision:
    """One way to train. Bytes are of one parameter or one element.

    `rate` is the format of the products and `dtype` PyTorch's name of the one that everything else is in;
    `cpu_product_bytes` are an operand's on a CPU, which makes fp16 products in fp32 (trimaran.train.model.product).
    `gradient_bytes` are those a gradient is kept and travels in, unless the stack accumulates this precision wider
    (Stack.wide_gradients). `moment_bytes` are those of each of Adam's moments. Where there is a `master` copy of the
    weights, the stack says of how many bytes. `loss_scaling` keeps small gradients within what the format can say.
    `narrow` is the format of the layers' linear products alone: attention, head, embedding, norms and all that is
    kept and sent by default is then as in the precision `like`.
    """

    name: PrecisionName
    rate: Rate
    dtype: str
    weight_bytes: float
    activation_bytes: float
    gradient_bytes: float
    moment_bytes: float
    master: bool = False
    loss_scaling: bool = False
    cpu_product_bytes: float = 2.0
    narrow: NarrowFormat | None = None
    like: PrecisionName | None = None

    @property
    def wide(self) -> PrecisionName:
        """The precision of everything but the layers' linear products."""
        return self.like or self.name


def _narrow(name: PrecisionName, rate: Literal["fp8", "mxfp8", "nvfp4"], narrow: NarrowFormat) -> Precision:
    """Linear products of layers in a narrow format, all else as in bf16 (arXiv 2209.05433; 2506.08027; 2509.25149)."""
    return Precision(name, rate, "bfloat16", 2.0, 2.0, 2.0, 4.0, master=True, narrow=narrow, like="bf16")


# Every precision by its name, in the order of their indexes in a grid of layouts.
PRECISIONS: Mapping[PrecisionName, Precision] = {
    precision.name: precision
    for precision in (
        Precision("fp32", "fp32", "float32", 4.0, 4.0, 4.0, 4.0, cpu_product_bytes=4.0),
        Precision("fp16", "fp16", "float16", 2.0, 2.0, 2.0, 4.0, master=True, loss_scaling=True, cpu_product_bytes=4.0),
        Precision("bf16", "bf16", "bfloat16", 2.0, 2.0, 2.0, 4.0, master=True),
        Precision("bf16_pure", "bf16", "bfloat16", 2.0, 2.0, 2.0, 2.0),
        # E4M3 forward, E5M2 backward; the stack says how scales are found (Stack.fp8_scaling).
        _narrow("fp8", "fp8", NarrowFormat(1.0, tensor_scale=True)),
        # One scale a row of each operand, found as the row is cast. FSDP and sequence parallelism gather 16 bit, since
        # torchtitan has float8 gathers for one scale a tensor alone (docs/float8.md; llama3/infra/parallelize.py).
        _narrow(
            "fp8_rowwise",
            "fp8",
            NarrowFormat(1.0, one_direction=True, row_scale=True, gathers=False, gathers_inputs=False),
        ),
        # One byte of exponent for 32 elements (OCP Microscaling Formats 1.0, section 5.1).
        _narrow("mxfp8", "mxfp8", NarrowFormat(1.0, scale_bytes=1.0 / 32.0, one_direction=True)),
        # One byte for 16 elements of half a byte each, under one scale of the tensor.
        _narrow("nvfp4", "nvfp4", NarrowFormat(0.5, 1.0 / 16.0, tensor_scale=True, one_direction=True, gathers=False)),
    )
}
# Those whose products are in what all else is in, by PyTorch's name of it, as software states them.
BY_DTYPE: Mapping[str, PrecisionName] = {PRECISIONS[rate].dtype: rate for rate in sorted(PROBED_RATES)}
