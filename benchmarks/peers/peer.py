"""What all peers share: the job that Trimaran's worker reads too, the same text in the same order, and the result.

A peer sets its model up in its framework's own way and gives `Peer.train` one function, which makes a step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trimaran.protocol.job import TrainJob
from trimaran.train.engine.learning_rate import Position, learning_rate
from trimaran.train.run.memory import memory_record
from trimaran.train.text.sampler import Sampler
from trimaran.train.text.tokens import Tokens


class Peer:
    """One rank of a peer; the job's file is the first argument."""

    def __init__(self) -> None:
        self.job = TrainJob.model_validate_json(Path(sys.argv[1]).read_text())
        self.model = self.job.workload.model
        self.layout = self.job.layout
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.dtype = torch.bfloat16 if self.layout.precision == "bf16_pure" else torch.float32
        self.device = torch.device(self.job.device)
        torch.set_num_threads(self.job.threads_per_rank)
        torch.manual_seed(self.job.train.seed)

    def micro_batches(self, text: Tensor) -> Tensor:
        """(own sequences, s + 1) as (micro-batches, micro-batch, s + 1)."""
        return text.view(-1, self.layout.mbs, text.shape[1])

    def adamw(self, parameters: Sequence[Tensor]) -> torch.optim.AdamW:
        """The job's optimizer."""
        return torch.optim.AdamW(parameters, betas=(self.job.train.beta1, self.job.train.beta2), fused=True)

    def train(self, step: Callable[[Tensor], float], optimizer: torch.optim.Optimizer, *, reports: bool) -> None:
        """Time the job's steps. `step` gets this replica's text and returns its mean loss.

        The rank that `reports` writes `result.json` with `sec_per_it`, `losses` and its own `mem_gib_per_rank`.
        """
        job, batch = self.job, self.job.workload.global_batch
        sampler = Sampler(Tokens(Path(job.data_dir)), job.workload.seq_len, job.train.seed)
        own = batch // self.layout.dp
        replica = self.rank if self.layout.dp > 1 else 0
        seconds, losses = [], []
        for number in range(job.steps):
            begin = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(job.train, Position(number, 0, 0, 0))
            text = torch.from_numpy(sampler.batch(number * batch + replica * own, own))
            losses.append(step(text.to(self.device)))
            seconds.append(time.perf_counter() - begin)
        if reports:
            peak = memory_record(self.device, 0.0)["peak"]
            figures = {"sec_per_it": seconds, "losses": losses, "mem_gib_per_rank": [peak]}
            (Path(job.out_dir) / "result.json").write_text(json.dumps(figures))
