"""Which kind of device kernels are chosen for."""

from __future__ import annotations

import torch


def on_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU. The meta device stands for one: a dry run traces GPUs there."""
    return device.type in ("cuda", "meta")
