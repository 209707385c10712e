"""Typed entry to autograd functions of our own."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """`function.apply(*arguments)`, which torch leaves untyped, for a function of one result."""
    return cast(Tensor, function.apply(*arguments))  # type: ignore[no-untyped-call]
