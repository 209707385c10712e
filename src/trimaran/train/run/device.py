"""The device that a rank computes on."""

from __future__ import annotations

import os

import torch

from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.environment import LOCAL_RANK
from trimaran.protocol.job import TrainJob


def choose_device(job: TrainJob) -> torch.device:
    """The device of this rank, made ready for computing. Raises TrimaranError where there is none for it."""
    torch.set_num_threads(job.threads_per_rank)
    # subnormal numbers cost a CPU a hundred times an ordinary one and teach nothing
    torch.set_flush_denormal(True)
    if job.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TrimaranError("device cuda is asked for, but PyTorch finds none here: set device to cpu")
    local_rank, count = int(os.environ.get(LOCAL_RANK, "0")), torch.cuda.device_count()
    if count > 1 and local_rank >= count:
        raise TrimaranError(
            f"local rank {local_rank} has no CUDA device, this node shows {count}: start at most {count} ranks a node"
        )
    # a scheduler may show every rank its own device alone (srun --gpus-per-task=1)
    device = torch.device("cuda", local_rank if count > 1 else 0)
    torch.cuda.set_device(device)
    return device
