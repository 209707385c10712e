"""The same GPT in PyTorch's native pipeline schedule (torch.distributed.pipelining), 1F1B over gloo.

    python benchmarks/peers/torch_pipelining.py JOB.json

Reads the same job file as Trimaran's worker, its stage split included; one rank a stage. The last stage
has an output matrix of its own, where Trimaran's is tied to the first stage's embedding: that spares this
program one exchange of gradients. Writes `result.json` with `sec_per_it` and `losses`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from plain_pytorch import Block
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from trimaran.model import Model, padded_vocab
from trimaran.recipe import TrainJob
from trimaran.train.learning_rate import Position, learning_rate
from trimaran.train.sampler import Sampler
from trimaran.train.tokens import Tokens


class Stage(nn.Module):
    """The layers of one stage; the first embeds, the last gives logits."""

    def __init__(self, model: Model, layers: int, *, first: bool, last: bool) -> None:
        super().__init__()
        vocab = padded_vocab(model.vocab, 1)
        self.tokens = nn.Embedding(vocab, model.hidden) if first else None
        self.positions = nn.Embedding(model.max_positions, model.hidden) if first else None
        self.layers = nn.ModuleList(Block(model) for _ in range(layers))
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
    job = TrainJob.model_validate_json(Path(sys.argv[1]).read_text())
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(job.threads_per_rank)
    torch.manual_seed(job.train.seed + rank)
    dist.init_process_group("gloo")
    dtype = torch.bfloat16 if job.layout.precision == "bf16_pure" else torch.float32
    first, last = rank == 0, rank == world_size - 1
    module = Stage(job.workload.model, job.stage_split[rank], first=first, last=last).to(dtype)
    optimizer = torch.optim.AdamW(module.parameters(), betas=(job.train.beta1, job.train.beta2), fused=True)
    sampler = Sampler(Tokens(Path(job.data_dir)), job.workload.seq_len, job.train.seed)
    batch, mbs = job.workload.global_batch, job.layout.mbs
    stage = PipelineStage(module, rank, world_size, torch.device("cpu"))

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    schedule = Schedule1F1B(stage, n_microbatches=batch // mbs, loss_fn=loss_of)
    seconds, losses = [], []
    for step in range(job.steps):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(job.train, Position(step, 0, 0, 0))
        text = torch.from_numpy(sampler.batch(step * batch, batch))
        found: list[Tensor] = []
        if first:
            schedule.step(text[:, :-1].contiguous())
        elif last:
            schedule.step(target=text[:, 1:].contiguous(), losses=found)
        else:
            schedule.step()
        squares = sum((p.grad.float().norm() ** 2 for p in module.parameters() if p.grad is not None), torch.zeros(()))
        dist.all_reduce(squares)
        scale = min(1.0, job.train.clip_grad / (float(squares.sqrt()) + 1e-6))
        for p in module.parameters():
            if p.grad is not None:
                p.grad.mul_(scale)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - begin)
        losses.append(float(torch.stack(found).detach().mean()) if found else 0.0)
    if last:
        (Path(job.out_dir) / "result.json").write_text(json.dumps({"sec_per_it": seconds, "losses": losses}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
