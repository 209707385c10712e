"""PyTorch's fused attention as two passes by themselves: what attention to parts of the keys is put together from.

`scaled_dot_product_attention` hides the logarithm of each query's sum of exponentials, by which such parts are added up
(Dao et al., arXiv 2205.14135).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from trimaran.train.comm.device_kind import on_gpu

_aten = torch.ops.aten
# The kernel of GPUs that has masks and fp32 wants rows of biases to begin at multiples of 16 bytes, and gives
# logarithms of rows up to a multiple of these.
_ROWS = 32


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention and the logarithms of its sums: (b, heads, n, d) over (b, kv_heads, m, d) -> (b, heads, n, d), and
    (b, heads, n) in fp32. Values may be of another width than keys, and so is the result.

    `mask` is added to the scores and broadcasts over (b, heads, n, m). A query that it leaves no key gets zeros, and
    -inf.
    """
    if not on_gpu(q.device):
        forward = _aten._scaled_dot_product_flash_attention_for_cpu
        y, sums = forward(*_as_wide(q, k, v), 0.0, causal, attn_mask=mask, scale=q.shape[-1] ** -0.5)
        if v.shape[-1] < q.shape[-1]:
            y = y[..., : v.shape[-1]].transpose(1, 2).contiguous().transpose(1, 2)
    elif _takes_flash(q, v, mask):
        y, sums, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    else:
        k, v = (_repeated(x, q) for x in (k, v))
        y, sums, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, _aligned(mask, q, k), True, 0.0, causal)
        sums = sums[..., : q.shape[2]]
    if mask is not None:
        sums = sums.masked_fill(mask.isneginf().all(-1), -torch.inf)
    return y, sums


def attend_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, *, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. `y` and `sums` are those over all keys, of which `k` and `v` may be a part."""
    if not on_gpu(q.device):
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        wide = _as_wide(dy, q, k, v, y)
        dq, dk, dv = backward(*wide, sums, 0.0, causal, attn_mask=mask, scale=q.shape[-1] ** -0.5)
        return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]
    nothing = torch.zeros((), dtype=torch.int64, device=q.device)  # state of a dropout that there is not
    if _takes_flash(q, v, mask):
        lengths = q.shape[2], k.shape[2]
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            dy, q, k, v, y, sums, None, None, *lengths, 0.0, causal, nothing, nothing
        )
        return dq, dk, dv
    kv_heads = k.shape[1]
    k, v = (_repeated(x, q) for x in (k, v))
    padding = -sums.shape[-1] % _ROWS
    whole_rows = pad(sums, (0, padding), value=torch.inf)
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        dy, q, k, v, _aligned(mask, q, k), y, whole_rows, nothing, nothing, 0.0, (True, True, True, False), causal
    )
    return dq, _summed(dk, kv_heads), _summed(dv, kv_heads)


def _takes_flash(q: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether a GPU's flash kernel takes them; the other one has masks, fp32 and values of another width."""
    return mask is None and q.dtype != torch.float32 and q.shape[-1] == v.shape[-1]


def _as_wide(*tensors: Tensor) -> list[Tensor]:
    """Zeros behind the narrower ones: a CPU's kernel wants queries, keys and values of one width."""
    width = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in tensors]


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values for every query head."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _summed(dx: Tensor, kv_heads: int) -> Tensor:
    """Gradients of the repeated, of what was repeated."""
    return dx if dx.shape[1] == kv_heads else dx.reshape(dx.shape[0], kv_heads, -1, *dx.shape[2:]).sum(2)


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Any:
    """The mask for every head, in memory whose rows begin where that kernel wants them to."""
    if mask is None:
        return None
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    room = torch.empty(*shape[:3], -(-shape[3] // 16) * 16, dtype=q.dtype, device=q.device)
    return room[..., : shape[3]].copy_(mask)
