"""The device that a rank computes on."""

from __future__ import annotations

import os

import torch

from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.precision import PRECISIONS, PrecisionName
from trimaran.protocol.environment import LOCAL_RANK
from trimaran.protocol.job import TrainJob
from trimaran.train.comm.device_kind import EIGHT_BIT_CAPABILITY, lacks_eight_bit


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
    _check_precision(job.layout.precision, device)
    torch.cuda.set_device(device)
    return device


def _check_precision(precision: PrecisionName, device: torch.device) -> None:
    """Raise TrimaranError where the device has no products of the precision's 8-bit format."""
    lacks = lacks_eight_bit(device) if PRECISIONS[precision].narrow is not None else None
    if lacks is not None:
        least = ".".join(map(str, EIGHT_BIT_CAPABILITY))
        raise TrimaranError(
            f"precision {precision} needs an NVIDIA device of compute capability {least} or later, but {device} is "
            f"{lacks}: set precision to bf16"
        )
