"""A GPT as one would write it in plain PyTorch (after nanoGPT), alone or under DistributedDataParallel.

    python benchmarks/peers/plain_pytorch.py JOB.json [--compile]

Reads the same job file as Trimaran's worker and trains the same model on the same tokens with the
same optimizer, at the micro-batch that the layout states; writes `result.json` with `sec_per_it`,
`losses` and `mem_gib_per_rank`. bf16 is autocast over fp32 weights, bf16_pure all in bf16. It does DP only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from trimaran.model import Model, padded_vocab
from trimaran.recipe import TrainJob
from trimaran.train.learning_rate import Position, learning_rate
from trimaran.train.memory import memory_record
from trimaran.train.sampler import Sampler
from trimaran.train.tokens import Tokens


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        h = model.hidden
        self.heads = model.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.projection = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, model.ffn_hidden), nn.Linear(model.ffn_hidden, h)

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h) -> (b, s, h)."""
        b, s, h = x.shape
        q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm_1(x)).split(h, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).reshape(b, s, h))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """Embedding, layers, norm, tied head, and the loss."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.tokens = nn.Embedding(padded_vocab(model.vocab, 1), model.hidden)
        self.positions = nn.Embedding(model.max_positions, model.hidden)
        self.layers = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = nn.LayerNorm(model.hidden)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """(b, s) and (b, s) -> mean loss."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    job = TrainJob.model_validate_json(Path(sys.argv[1]).read_text())
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(job.threads_per_rank)
    torch.manual_seed(job.train.seed)
    dtype = torch.bfloat16 if job.layout.precision == "bf16_pure" else torch.float32
    device = torch.device(job.device)
    model: nn.Module = Gpt(job.workload.model).to(device, dtype)
    if "--compile" in sys.argv:
        model.compile()
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=job.layout.precision == "bf16")
    if world_size > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(job.train.beta1, job.train.beta2), fused=True)
    sampler = Sampler(Tokens(Path(job.data_dir)), job.workload.seq_len, job.train.seed)
    batch = job.workload.global_batch
    own, mbs = batch // world_size, job.layout.mbs
    seconds, losses = [], []
    for step in range(job.steps):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(job.train, Position(step, 0, 0, 0))
        text = torch.from_numpy(sampler.batch(step * batch + rank * own, own)).to(device).view(own // mbs, mbs, -1)
        total = 0.0
        for i, part in enumerate(text):
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = i == len(text) - 1
            with autocast:
                loss = model(part[:, :-1], part[:, 1:]) / len(text)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), job.train.clip_grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - begin)
        losses.append(total)
    if rank == 0:
        peak = memory_record(device, 0.0)["peak"]
        figures = {"sec_per_it": seconds, "losses": losses, "mem_gib_per_rank": [peak]}
        (Path(job.out_dir) / "result.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
