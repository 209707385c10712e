"""Offload: what layers keep for the backward lies in the host's memory until the backward asks for it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from trimaran.train.comm.device_kind import on_gpu


@dataclass(frozen=True)
class HostCopy:
    """A tensor's copy in the host's memory, and the device that it came from; a CPU's own are copies as well."""

    values: Tensor
    device: torch.device


def to_host(tensor: Tensor) -> HostCopy:
    """A copy of what an operator keeps, in page-locked memory where a GPU's link writes it."""
    pinned = on_gpu(tensor.device)
    values = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, device="cpu", pin_memory=pinned)
    values.copy_(tensor)
    return HostCopy(values, tensor.device)


def to_device(copy: HostCopy) -> Tensor:
    """What was copied, back on its device: behind what the device was given before, which is no copy on a CPU."""
    return copy.values.to(copy.device, non_blocking=on_gpu(copy.device))


def kept_on_host() -> AbstractContextManager[None]:
    """While it is entered, operators keep what they need for the backward in the host's memory.

    As `torch.autograd.graph.save_on_cpu`, whose two functions a dry run could not take the place of.
    """
    return torch.autograd.graph.saved_tensors_hooks(to_host, to_device)
