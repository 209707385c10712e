"""Which kind of device kernels are chosen for, and which it has."""

from __future__ import annotations

import torch

# Of the first devices with tensor cores for 8 bit, Ada and Hopper: torch 2.13.0, aten/src/ATen/native/cuda/
# ScaledBlas.cpp, refuses others. AMD's MI300 multiplies 8-bit formats that are not those of the trainer's casts.
EIGHT_BIT_CAPABILITY = (8, 9)


def on_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU. The meta device stands for one: a dry run traces GPUs there."""
    return device.type in ("cuda", "meta")


def lacks_eight_bit(device: torch.device) -> str | None:
    """What a CUDA device is, in words, where it has no products of the 8-bit formats that the trainer casts to."""
    if torch.version.hip is not None:
        return "an AMD device"
    major, minor = torch.cuda.get_device_capability(device)
    return None if (major, minor) >= EIGHT_BIT_CAPABILITY else f"of compute capability {major}.{minor}"
