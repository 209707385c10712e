"""Attention in blocks of queries is the attention of the reference formula."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from trimaran.train.model.block_attention import BLOCK, causal_attention


@pytest.mark.parametrize("length", [1, 7, BLOCK, BLOCK + 1, 2 * BLOCK + 40])
def test_blocks_give_what_whole_attention_gives(length: int) -> None:
    torch.manual_seed(length)
    packed = torch.randn(2, length, 3, 3, 16)
    dy = torch.randn(2, 3, length, 16)
    found = []
    for attend in (causal_attention, lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True)):
        leaf = packed.clone().requires_grad_()
        y = attend(*(leaf[:, :, :, part].transpose(1, 2) for part in range(3)))
        y.backward(dy)
        found.append((y.detach(), leaf.grad))
    for in_blocks, whole in zip(*found, strict=True):
        torch.testing.assert_close(in_blocks, whole, rtol=1e-5, atol=1e-5)
