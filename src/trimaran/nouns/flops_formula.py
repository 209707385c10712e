"""FLOPs formula: the names of the calculators by which tables, logs and Trimaran itself count operations."""

from __future__ import annotations

from typing import Literal

# What each of them counts: trimaran.layout.flops.
FlopsFormula = Literal[
    "megatron_eq3_k4", "megatron_eq3_k3", "bs_old_96BsLh2", "2kN_k4", "2kN_k3", "model_flops", "megatron_core"
]  # fmt: skip
