"""Attention in blocks of queries is the attention of the reference formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trimaran.train.model import product
from trimaran.train.model.block_attention import BLOCK, GPU_BLOCK, Scores, causal_attention
from trimaran.train.programs.tracing import Trace


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scores: Scores, mask: Tensor | None) -> Tensor:
    """The formula, with all scores at once."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    found = q @ k.transpose(2, 3) * scores.scale
    if scores.cap:
        found = scores.cap * torch.tanh(found / scores.cap)
    distance = torch.arange(q.shape[2]).unsqueeze(1) - torch.arange(q.shape[2])
    allowed = (distance >= 0) & (distance < (scores.window or q.shape[2]))
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        found = found + mask
    return found.masked_fill(~allowed, -torch.inf).softmax(3) @ v


@pytest.mark.parametrize("length", [1, 7, BLOCK, BLOCK + 1, 2 * BLOCK + 40])
def test_blocks_give_what_whole_attention_gives(length: int) -> None:
    torch.manual_seed(length)
    packed = torch.randn(2, length, 3, 3, 16)
    dy = torch.randn(2, 3, length, 16)
    found = []
    scores = Scores(16**-0.5)
    for attend in (
        lambda q, k, v: causal_attention(q, k, v, scores),
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
    ):
        leaf = packed.clone().requires_grad_()
        y = attend(*(leaf[:, :, :, part].transpose(1, 2) for part in range(3)))
        y.backward(dy)
        found.append((y.detach(), leaf.grad))
    for in_blocks, whole in zip(*found, strict=True):
        torch.testing.assert_close(in_blocks, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [0, 1, 5, BLOCK, BLOCK + 30, 1000])
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("masked", ["", "documents", "bias"])
def test_windows_caps_and_masks_are_those_of_the_formula(window: int, cap: float, masked: str) -> None:
    generator = torch.Generator().manual_seed(window)
    length, scores = 2 * BLOCK + 40, Scores(0.3, cap, window)
    q = torch.randn(2, 6, length, 8, generator=generator)
    k, v = torch.randn(2, 2, 2, length, 8, generator=generator)
    dy = torch.randn(q.shape, generator=generator)
    documents = torch.randint(2, (2, length), generator=generator).cumsum(1) // 40
    masks = {
        "": None,
        "documents": (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1),
        "bias": torch.randn(1, 6, length, length, generator=generator),
    }
    found = []
    for attend in (causal_attention, plain_attention):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        y = attend(*leaves, scores, masks[masked])
        y.backward(dy)
        found.append((y.detach(), *(leaf.grad for leaf in leaves)))
    for in_blocks, whole in zip(*found, strict=True):
        torch.testing.assert_close(in_blocks, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("cap", "copies"), [(0.0, 3.0), (50.0, 4.0)])
def test_scores_of_one_block_alone_are_there_at_a_time(cap: float, copies: float) -> None:
    """On shapes, which stand for a GPU: probabilities, their gradients and those of scores; tanh of capped ones."""
    heads, tokens, width = 4, 8 * GPU_BLOCK, 16
    x = torch.empty(1, heads, tokens, width, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with Trace({}, {}) as trace:
        causal_attention(x, x, x, Scores(1.0, cap)).sum().backward()
    a_block = 2.0 * heads * GPU_BLOCK * tokens
    assert copies * a_block < trace.held.peak < (copies + 0.5) * a_block


def test_what_a_processor_has_no_products_in_is_attended_to_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded where it is given back alone: nearer to the formula than bf16 itself, and kept in bf16."""
    monkeypatch.setattr(product, "LACKS_BF16", True)
    torch.manual_seed(1)
    leaves = [torch.randn(2, 3, BLOCK + 9, 16).bfloat16().requires_grad_() for _ in range(3)]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    dy, scores = torch.randn(leaves[0].shape).bfloat16(), Scores(0.25)
    kept: list[torch.dtype] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.dtype) or x, lambda x: x):
        y = causal_attention(*leaves, scores)
    expected = plain_attention(*wide, scores, None)
    y.backward(dy)
    expected.backward(dy.double())
    assert set(kept) == {torch.bfloat16}
    for ours, true in zip((y, *(leaf.grad for leaf in leaves)), (expected, *(leaf.grad for leaf in wide)), strict=True):
        assert ours is not None and true is not None and ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), true, rtol=2.0**-8, atol=1e-4)
