"""Rows as the tests of the store make them, and what they ask of an error."""

from __future__ import annotations

import pytest

from trimaran.layout.notation import parse_layout
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.workload import Workload

LLAMA = Model(
    name="a llama of our own", layers=8, hidden=96, heads=6, kv_heads=2, head_dim=32, ffn_hidden=200, vocab=1000,
    max_positions=64, positions="rotary", rotary_theta=500_000.0, norm="rmsnorm", norm_epsilon=1e-6, mlp="swiglu",
    bias=False, tied_embedding=False,
)  # fmt: skip
LAYOUT = parse_layout("dp2,tp2,pp2,mbs1,sp,recompute-full2,bf16,split3-5,place-tp-pp-dp")
WORKLOAD = Workload(model=LLAMA, seq_len=64, global_batch=16, optimizer="sgd")


def row_of(key: str | None = "k", **fields: object) -> Measurement:
    stated = {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 32, "vocab": 256, "mbs": 1, "gbs": 8}
    return Measurement.model_validate({**stated, "trial_key": key, **fields})


def one_line(error: pytest.ExceptionInfo[TrimaranError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message
