"""A run that trains adapters, or some of its weights alone, is no row of a run that trains all."""

from __future__ import annotations

from pathlib import Path

import pytest

from test_import_forms import HEADER, only, read
from test_import_megatron_bridge import STEPS, YAML

STEP = " 3%|#| 1/30 [00:11<05:00, 11.0s/it]\n{'loss': 9.1, 'epoch': 0.1}\n"
AUTOMODEL = (
    "2025-09-01 07:13:1{0} | INFO | root | step {0} | epoch 0 | loss 9.{0} | lr 1e-05 | mem 38.39 GiB | "
    "tps 100.00(50.00/gpu) | num_label_tokens 100\n"
)
PEFT = "trainable params: {} || all params: 8,043,892,736 || trainable%: 0.1695\n"
SWIFT = "[INFO:swift] model_parameter_info: PeftModel: 7626.1 M Params ({} M Trainable [{}%]), 0.0 M Buffers.\n"
SUMMARY = "2025-09-01 07:13:17 | INFO | root | Trainable parameters percentage: {}%\n"


@pytest.mark.parametrize(
    ("said", "whole", "steps", "form"),
    [
        (PEFT.format("13,631,488"), PEFT.format("8,043,892,736"), HEADER.format(30) + STEP, "hugging-face"),
        (PEFT.format("13631488"), "", STEP, "hugging-face"),
        (SWIFT.format(10.1, 0.1323), SWIFT.format(7626.1, 100.0), STEP, "hugging-face"),
        (SUMMARY.format(0.17), SUMMARY.format(100.0), AUTOMODEL.format(1) + AUTOMODEL.format(2), "nemo"),
    ],
)
def test_a_run_that_trains_some_weights_alone_gives_no_row(
    tmp_path: Path, said: str, whole: str, steps: str, form: str
) -> None:
    """It was stored as a run of all weights, with the model's gradients and states."""
    found = read(tmp_path, said + steps)
    assert (found.format, found.rows) == (form, ()) and "of its weights are trained" in found.refused[0]
    assert only(read(tmp_path, whole + steps), form).status == "ok"
    # a model that is loaded to be tried behind its training has no weights that are trained
    assert only(read(tmp_path, whole + steps + PEFT.format(0)), form).status == "ok"


def test_adapters_of_megatron_bridge_give_no_row(tmp_path: Path) -> None:
    adapters = YAML.replace("train:\n", "peft:\n  _target_: megatron.bridge.peft.lora.LoRA\n  dim: 32\ntrain:\n")
    (refused,) = read(tmp_path, adapters + STEPS).refused
    assert "peft is LoRA: no row can say that adapters alone are trained" in refused
    only(read(tmp_path, YAML.replace("train:\n", "peft: null\ntrain:\n") + STEPS), "megatron")
