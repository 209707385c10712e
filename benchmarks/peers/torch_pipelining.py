"""The same GPT in PyTorch's native pipeline schedule (torch.distributed.pipelining), 1F1B over gloo.

    python benchmarks/peers/torch_pipelining.py JOB.json

Reads the same job file as Trimaran's worker, its stage split included; one rank a stage. The last stage
has an output matrix of its own, where Trimaran's is tied to the first stage's embedding: that spares this
program one exchange of gradients.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from peer import Peer
from plain_pytorch import Block
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from trimaran.nouns.model import Model, padded_vocab


class Stage(nn.Module):
    """The layers of one stage; the first embeds, the last gives logits."""

    def __init__(self, model: Model, layers: int, *, first: bool, last: bool) -> None:
        super().__init__()
        vocab = padded_vocab(model.vocab, 1)
        self.tokens = nn.Embedding(vocab, model.hidden) if first else None
        self.positions = nn.Embedding(model.max_positions, model.hidden) if first else None
        self.layers = nn.ModuleList(Block(model, in_ring=False) for _ in range(layers))
        self.norm = nn.LayerNorm(model.hidden) if last else None
        self.head = nn.Linear(model.hidden, vocab, bias=False) if last else None
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Token ids (b, s) on the first stage, else (b, s, h); logits on the last, else (b, s, h)."""
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def main() -> None:
    peer = Peer()
    dist.init_process_group("gloo")
    first, last = peer.rank == 0, peer.rank == peer.world_size - 1
    module = Stage(peer.model, peer.job.stage_split[peer.rank], first=first, last=last).to(peer.dtype)
    optimizer = peer.adamw(list(module.parameters()))
    stage = PipelineStage(module, peer.rank, peer.world_size, torch.device("cpu"))

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    micro_batches = peer.job.workload.global_batch // peer.layout.mbs
    schedule = Schedule1F1B(stage, n_microbatches=micro_batches, loss_fn=loss_of)

    def step(text: Tensor) -> float:
        found: list[Tensor] = []
        if first:
            schedule.step(text[:, :-1].contiguous())
        elif last:
            schedule.step(target=text[:, 1:].contiguous(), losses=found)
        else:
            schedule.step()
        squares = sum((p.grad.float().norm() ** 2 for p in module.parameters() if p.grad is not None), torch.zeros(()))
        dist.all_reduce(squares)
        scale = min(1.0, peer.job.train.clip_grad / (float(squares.sqrt()) + 1e-6))
        for p in module.parameters():
            if p.grad is not None:
                p.grad.mul_(scale)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(found).detach().mean()) if found else 0.0

    peer.train(step, optimizer, reports=last)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
