"""A GPT as one would write it in plain PyTorch (after nanoGPT): alone, or sharded as the layout says.

    python benchmarks/peers/plain_pytorch.py JOB.json [--compile]

DistributedDataParallel; with ZeRO 1 ZeroRedundancyOptimizer over it; with ZeRO 3 fully_shard, over a part of the
replicas where the layout says so. With CP DistributedDataParallel over the ranks of a sequence, with the attention of
PyTorch's own context parallelism, which knows kernels of GPUs alone and is given the CPU's here. It does DP or CP.
bf16 is autocast over fp32 weights, bf16_pure all in bf16.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from peer import Peer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from trimaran.nouns.model import Model, padded_vocab


class Ring(torch.autograd.Function):
    """The two passes of torch.distributed.tensor.experimental.context_parallel, without its DTensors."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(b, heads, s / CP, d) each."""
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        y, sums, *_ = context_parallel._templated_ring_attention(dist.group.WORLD, 2, kernel, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, y, sums)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        """Gradients of queries, keys and values."""
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return context_parallel._templated_ring_attention_backward(
            dist.group.WORLD, 2, kernel, dy, "grad_out", *ctx.saved_tensors, is_causal=True, dropout_p=0.0
        )[:3]


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, model: Model, *, in_ring: bool) -> None:
        super().__init__()
        h = model.hidden
        self.heads, self.in_ring = model.heads, in_ring
        self.norm_1, self.norm_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.projection = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, model.ffn_hidden), nn.Linear(model.ffn_hidden, h)

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h) -> (b, s, h)."""
        b, s, h = x.shape
        q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm_1(x)).split(h, dim=2))
        y = Ring.apply(q, k, v) if self.in_ring else functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).reshape(b, s, h))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """Embedding, layers, norm, tied head, and the loss; of a sequence that ranks share, an early and a late chunk."""

    def __init__(self, model: Model, cp: int, rank: int) -> None:
        super().__init__()
        self.chunks = (2 * cp, rank, 2 * cp - 1 - rank) if cp > 1 else (1, 0)
        self.tokens = nn.Embedding(padded_vocab(model.vocab, 1), model.hidden)
        self.positions = nn.Embedding(model.max_positions, model.hidden)
        self.layers = nn.ModuleList(Block(model, in_ring=cp > 1) for _ in range(model.layers))
        self.norm = nn.LayerNorm(model.hidden)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """(b, s) and (b, s) -> mean loss of this rank's tokens."""
        count, *own = self.chunks
        places = self.positions.weight[: tokens.shape[1]]
        tokens, targets, places = (
            torch.cat([x.chunk(count, dim)[chunk] for chunk in own], dim)
            for x, dim in ((tokens, 1), (targets, 1), (places, 0))
        )
        x = self.tokens(tokens) + places
        for layer in self.layers:
            x = layer(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parallel(peer: Peer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model over the layout's replicas, and its optimizer."""
    model: nn.Module = Gpt(peer.model, peer.layout.cp, peer.rank).to(peer.device, peer.dtype)
    if "--compile" in sys.argv:
        model.compile()
    if peer.world_size == 1:
        return model, peer.adamw(list(model.parameters()))
    dist.init_process_group("gloo")
    if peer.layout.zero_stage == 3:
        assert isinstance(model, Gpt)
        shape = tuple(ranks for ranks in (peer.layout.size("replicate"), peer.layout.size("shard")) if ranks > 1)
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh(peer.device.type, shape, mesh_dim_names=names)
        for module in (*model.layers, model):
            # gloo has sums alone: the mean is taken apart from them
            fully_shard(module, mesh=mesh).set_force_sum_reduction_for_comms(True)
        return model, peer.adamw(list(model.parameters()))
    model = DistributedDataParallel(model)
    if peer.layout.zero_stage == 1:
        betas = (peer.job.train.beta1, peer.job.train.beta2)
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, betas=betas, fused=True)
    return model, peer.adamw(list(model.parameters()))


def main() -> None:
    peer = Peer()
    model, optimizer = parallel(peer)
    autocast = torch.autocast(peer.device.type, torch.bfloat16, enabled=peer.layout.precision == "bf16")

    def step(text: Tensor) -> float:
        total, parts = 0.0, peer.micro_batches(text)
        for i, part in enumerate(parts):
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = i == len(parts) - 1
            with autocast:
                loss = model(part[:, :-1], part[:, 1:]) / len(parts)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), peer.job.train.clip_grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    peer.train(step, optimizer, reports=peer.rank == 0)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()  # its threads end before the interpreter does
