"""Precision: a number format to train in, and what it makes of weights, activations, gradients and states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

PrecisionName = Literal["fp32", "fp16", "bf16", "bf16_pure"]
# Formats of products that a device has a rate for.
Rate = Literal["fp32", "bf16", "fp16"]
RATES: tuple[Rate, ...] = get_args(Rate)


@dataclass(frozen=True)
class Precision:
    """One way to train. Bytes are of one parameter or one element.

    `rate` is the format of the products and `dtype` PyTorch's name of it; `cpu_product_bytes` are an operand's on a
    CPU, which makes fp16 products in fp32 (trimaran.train.model.product). `gradient_bytes` are those a gradient is
    kept and travels in, unless the stack accumulates this precision wider (Stack.wide_gradients). `moment_bytes` are
    those of each of Adam's moments. Where there is a `master` copy of the weights, the stack says of how many bytes.
    `loss_scaling` keeps small gradients within what the format can say.
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


# Every precision by its name, in the order of their indexes in a grid of layouts.
PRECISIONS: Mapping[PrecisionName, Precision] = {
    precision.name: precision
    for precision in (
        Precision("fp32", "fp32", "float32", 4.0, 4.0, 4.0, 4.0, cpu_product_bytes=4.0),
        Precision("fp16", "fp16", "float16", 2.0, 2.0, 2.0, 4.0, master=True, loss_scaling=True, cpu_product_bytes=4.0),
        Precision("bf16", "bf16", "bfloat16", 2.0, 2.0, 2.0, 4.0, master=True),
        Precision("bf16_pure", "bf16", "bfloat16", 2.0, 2.0, 2.0, 2.0),
    )
}
