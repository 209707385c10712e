"""Casts: operands of the layers' linear products made narrower than 16 bit: bytes that move and bytes that stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimaran.nouns.hardware.device import Device
from trimaran.nouns.precision import Precision
from trimaran.nouns.stack import Stack

Floats = NDArray[np.floating[Any]]
Number = Floats | float
# Bytes of a scale in fp32 and the elements that it serves where blocks of fp8 have one each (arXiv 2412.19437,
# section 3.3.2: 1 x 128 of an activation).
BLOCK_SCALE_BYTES, BLOCK = 4.0, 128.0
# Bytes an element that a cast of PyTorch's eager operators moves beyond those of one kernel: absolute value, largest
# value, product with the scale in fp32, clamp (torchao 0.7, torchao/float8/float8_utils.py and float8_tensor.py).
EAGER_CAST_BYTES = 28.0
WIDE_BYTES = 2.0
# How many times longer compiled kernels take that write what they cast turned: 1.4 TB/s on H100 where others that cast
# reach 2.2 (pytorch/pytorch issue 133242, comment of 2024-08-12).
TURNING = 2.2 / 1.4


@dataclass(frozen=True)
class Casts:
    """How operands of the layers' products are cast: numbers, or arrays over layouts.

    `element` are the bytes of one as cast, its scales among them; 0 where products read what is there. `read` are the
    bytes that a cast reads of it: 2, and 2 more where a tensor's largest value is looked for first. `orders` are the
    copies that the three products of a layer need: 2 where the backward reads another one than the forward.
    `gathered` is 1 where sharded weights are cast before they are gathered. `by_row` is 1 where rows have a scale each:
    the other copy is of columns, whose largest values a pass of their own finds, and the backward's products leave
    results that a pass of its own scales, since those with scales of rows are slow where they add up exactly
    (pytorch/ao, issue 2184; torchao 0.11, float8/float8_ops.py, lines 50 to 52).
    """

    element: Number = 0.0
    read: Number = 0.0
    orders: Number = 1.0
    gathered: Number = 0.0
    sliced: Number = 1.0
    by_row: Number = 0.0

    @property
    def gathered_share(self) -> Number:
        """Bytes of an element that sequence parallelism gathers for a product over those of its 16 bit."""
        return np.where(np.asarray(self.sliced) > 0, self.share, 1.0)

    @property
    def gathered_as_read(self) -> NDArray[np.bool_]:
        """Whether a product reads what sequence parallelism gathered for it as it is."""
        return (np.asarray(self.element) <= 0) | (np.asarray(self.sliced) > 0)

    @property
    def share(self) -> Number:
        """Bytes of an element as cast over those of its 16 bit; 1 where it is not cast."""
        return np.where(np.asarray(self.element) > 0, np.asarray(self.element) / WIDE_BYTES, 1.0)


UNCAST = Casts()


def casts_of(precision: Precision, stack: Stack, device: Device) -> Casts:
    """The casts of one precision under a stack on a device.

    Blocks that share a scale lie along one direction, so the other product's operand is cast anew from 16 bit; where
    a tensor has one scale, the device says whether it reads operands in any order.
    """
    narrow = precision.narrow
    if narrow is None:
        return UNCAST
    by_block = precision.name == "fp8" and stack.fp8_scaling == "blockwise"
    scale = BLOCK_SCALE_BYTES / BLOCK if by_block else narrow.scale_bytes
    scans = narrow.tensor_scale and not (precision.name == "fp8" and stack.fp8_scaling != "current")
    both = narrow.one_direction or by_block or device.transposes_fp8
    read, orders = WIDE_BYTES * (2.0 if scans else 1.0), 2.0 if both else 1.0
    gathered = float(stack.gathers_casts and narrow.gathers)
    sliced = float(stack.slices_casts and narrow.gathers_inputs)
    by_row = float(narrow.row_scale and not stack.keeps_casts)
    return Casts(narrow.element_bytes + scale, read, orders, gathered, sliced, by_row)


@dataclass(frozen=True)
class Operands:
    """Elements of one linear layer's operands on a rank: weights; input and gradient, and those of them it casts.

    Sequence parallelism casts what it then gathers, so of a gathered operand a rank casts its slice.
    """

    weights: Number
    inputs: Number
    gradients: Number
    cast_inputs: Number
    cast_gradients: Number


def cast_bytes(casts: Casts, stack: Stack, operands: Operands, *, eager: bool) -> tuple[Number, Number]:
    """Bytes that casts of one linear layer's operands move in a micro-batch, (forward, backward).

    Forward the input and the weights are cast, backward the gradient. A stack that keeps what it cast (Transformer
    Engine) makes both orders at once; one that keeps 16 bit (torchao) casts the input again in the backward and turns
    the weights that it has. What was gathered is turned whole.
    """
    if casts is UNCAST:
        return 0.0, 0.0
    element, turned = casts.element, (casts.orders - 1.0) * casts.element
    cast = casts.read + element + (EAGER_CAST_BYTES if eager else 0.0)
    kept_order = turned if stack.keeps_casts else 0.0
    weights_forward = np.where(_weights_once(casts, stack), 0.0, cast + kept_order)
    forward = operands.cast_inputs * cast + operands.inputs * kept_order + operands.weights * weights_forward
    by_row = np.asarray(casts.by_row) > 0
    columns, scaled = WIDE_BYTES + TURNING * (WIDE_BYTES + element), 2.0 * WIDE_BYTES
    again = 0.0 if stack.keeps_casts else np.where(by_row, columns + scaled, WIDE_BYTES + element)
    turned_weights = 0.0 if stack.keeps_casts else np.where(by_row, columns + scaled, 2.0 * turned)
    backward = operands.cast_gradients * cast + operands.gradients * np.where(by_row, columns, turned)
    backward = backward + operands.inputs * again + operands.weights * turned_weights
    is_cast = np.asarray(element) > 0
    return np.where(is_cast, forward, 0.0), np.where(is_cast, backward, 0.0)


def weight_cast_bytes(casts: Casts, stack: Stack) -> Number:
    """Bytes a weight that an iteration moves to cast it, where that is done once and not every micro-batch."""
    if casts is UNCAST:
        return 0.0
    is_once = _weights_once(casts, stack) & (np.asarray(casts.element) > 0)
    return np.where(is_once, casts.read + casts.element * casts.orders, 0.0)


def kept_weight_bytes(casts: Casts, stack: Stack) -> Number:
    """Bytes a weight of a layer has beside its 16 bit, from forward to backward; below 0 where it has no 16 bit.

    Transformer Engine keeps the copies that its products read. Parameters that are gathered as cast and not kept in
    16 bit (Megatron's --fp8-param-gather) have those copies alone.
    """
    if casts is UNCAST or not stack.keeps_casts:
        return 0.0
    without = WIDE_BYTES * np.asarray(casts.gathered)
    return np.where(np.asarray(casts.element) > 0, casts.element * casts.orders - without, 0.0)


def _weights_once(casts: Casts, stack: Stack) -> NDArray[np.bool_]:
    """Where weights are cast once an iteration: the stack keeps their casts, or gathers them."""
    return np.asarray((np.asarray(casts.gathered) > 0) | stack.casts_weights_once)
