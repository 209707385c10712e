"""Lines of trainers in other words than the usual ones: of other releases, units or figures that are no number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from test_import_forms import only, read
from test_import_logs import TITAN
from test_import_logs import only as only_row
from test_import_logs import read as read_bare
from test_import_small_trainers import BATCH, COMPOSER
from test_import_trainings import at_step, megatron

OLMO_STEP = (
    "2025-01-01 10:00:0{0}.123 host olmo_core.train INFO [step={0}/9,epoch=1]\n    train/CE loss={1}\n"
    "    throughput/device/BPS=0.5\n    throughput/device/TFLOPs_per_GPU=412.5\n"
    "    gpu_memory/GPU active mem (GiB)=3{0}.5\n"
)


def test_memory_and_tflops_of_todays_olmo_core_are_read(tmp_path: Path) -> None:
    """It calls the first `gpu_memory/` where it was `system/`, and both were left out."""
    row = only(read(tmp_path, OLMO_STEP.format(1, 9.1) + OLMO_STEP.format(2, 9.0)), "olmo-core")
    assert (row.mem_gib, row.tflops) == (32.5, 412.5)
    history = [
        {"_step": n, "_timestamp": float(n), "train/CE loss": 9.0, "throughput/device/BPS": 0.5,
         "throughput/device/TFLOPs_per_GPU": 412.5, "gpu_memory/GPU active mem (GiB)": 30.0 + n}
        for n in (1, 2, 3)
    ]  # fmt: skip
    row = only(read(tmp_path, "".join(json.dumps(point) + "\n" for point in history)), "wandb-history")
    assert (row.mem_gib, row.tflops) == (33.0, 412.5)


@pytest.mark.parametrize(
    ("form", "step"),
    [
        ("nanotron", "[INFO]: iteration: {0} / 9 | elapsed_time_per_iteration_ms: 412 | global_batch_size: 64 | "
                     "lm_loss: {1} | lr: 1e-05\n"),
        ("nemo", "Training epoch 0, iteration {0}/9 | global_batch_size: 64 | global_step: {0} | "
                 "reduced_train_loss: {1} | train_step_timing in s: 2.0\n"),
        ("nemo", "Epoch 0: : 2%|#| {0}/50 [00:22<00:00, reduced_train_loss={1}, global_step={0}.00, "
                 "train_step_timing in s=24.0]\n"),
        ("nemo", "2025-01-01 10:00:0{0} | INFO | step {0} | epoch 0 | loss {1} | grad_norm 1.0 | lr 1e-05 | "
                 "mem 38.39 GiB | tps 100.00(50.00/gpu) | num_label_tokens 100\n"),
        ("olmo-core", OLMO_STEP),
        ("deepspeed", "[Rank 0] steps: {0} loss: {1} iter time (s): 0.500 samples/sec: 10.0\n"),
        ("hugging-face", " {0}%|#| {0}/30 [00:2{0}<00:30, 2.0s/it]\n{{'loss': {1}, 'epoch': 0.1}}\n"),
    ],
)  # fmt: skip
def test_a_loss_that_is_no_number_is_told_of_every_trainer(tmp_path: Path, form: str, step: str) -> None:
    """Megatron's, torchtitan's and Composer's were, and the others' passed without a word."""
    lost = "nan.0" if "reduced_train_loss=" in step else "nan"  # a bar pads it as a number
    text = step.format(1, "9.5") + step.format(2, lost) + step.format(3, lost)
    found = read(tmp_path, text, form)
    assert found.refused == () and found.format == form
    assert "2 of 3 logged losses are not finite" in (found.rows[-1].notes or "")
    assert found.rows[-1].losses in ((9.5,), (9.5, 9.5))


@pytest.mark.parametrize("said", ["[token={0}/900]:", "[sample={0}/900]:", "[epoch=1][batch={0}]:"])
def test_a_training_of_composer_that_goes_by_tokens_or_without_an_end_is_read(tmp_path: Path, said: str) -> None:
    """Its progress is in the unit of its duration, and such a log was of no format."""
    text = COMPOSER
    for n in (1, 2, 3):
        batch = BATCH.format("", n, 9, n - 1, 64 * (n - 1), 5.0, 32)
        text += batch.replace(f"[batch={n}/9]:", said.format(n if "batch" in said else 100 * n))
    row = only(read(tmp_path, text), "composer")
    assert (row.step_times_s, row.losses, row.status) == ((2.0,) * 3, (5.0,) * 3, "ok")
    assert "mean of" not in (row.notes or "")


def test_degrees_of_a_world_without_a_comma_are_those_of_the_decoder(tmp_path: Path) -> None:
    """As releases of Megatron-Core that know encoders print them; TP and PP were 0, the encoder's."""
    world = (
        "using world size: 8, data-parallel size: 1, context-parallel size: 1, hierarchical context-parallel sizes: "
        "Nonetensor-model-parallel size: 4, encoder-tensor-model-parallel size: 0, pipeline-model-parallel size: 2, "
        "encoder-pipeline-model-parallel size: 0\n"
    )
    given = {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 32000, "seq_len": 4096, "mbs": 1}
    row = only_row(read_bare(tmp_path, world + at_step(1, 9.0) + at_step(2, 2.0), **given))
    assert (row.devices, row.dp, row.tp, row.pp, row.cp) == (8, 1, 4, 2, 1)


def test_layers_that_megatron_deals_out_unevenly_are_noted(tmp_path: Path) -> None:
    for name in ("decoder_first_pipeline_num_layers", "account_for_loss_in_pipeline_split"):
        row = read_bare(tmp_path, megatron(**{name: "3"})).rows[0]
        assert f"{name} is 3: stages have unlike numbers of layers" in (row.notes or "")
    row = read_bare(tmp_path, megatron(decoder_last_pipeline_num_layers="None")).rows[0]
    assert "unlike" not in (row.notes or "")


def test_a_compiled_training_of_torchtitan_that_goes_on_the_next_day_is_one(tmp_path: Path) -> None:
    """The day is no setting: it became a second row."""
    built = (
        "[rank0]:[titan] 2026-02-2{} 19:46:02,500 - root - INFO - Compiling each TransformerBlock with torch.compile\n"
    )
    start = "[rank0]:[titan] 2026-02-2{} 19:46:02,400 - root - INFO - Building llama3 8B with TransformerModelArgs("
    start += "dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, vocab_size=128256, multiple_of=1024)\n"
    first = start.format(4) + built.format(4) + TITAN
    again = start.format(5) + built.format(5)
    again += TITAN[TITAN.index("[rank0]:[titan] 2026-02-24 19:46:02,000") :]
    for number in (3, 2, 1):
        again = again.replace(f"step:  {number} ", f"step:  {number + 3} ")
    row = only_row(read_bare(tmp_path, first + again.replace("2026-02-24", "2026-02-25")))
    assert row.date == "2026-02-24" and "started again before iteration 4" in (row.notes or "")


def test_a_summary_has_what_its_trainer_tracked_of_the_last_step(tmp_path: Path) -> None:
    """Its time was the mean over all of the run, start-up and evaluations included."""
    summary = {
        "lm loss": 2.5, "iteration-time": 5.25, "throughput": 412.5, "batch-size": 512,
        "mem-max-allocated-bytes": 2**35, "_runtime": 9000.0, "_step": 1000, "_wandb": {"runtime": 9000},
    }  # fmt: skip
    given = {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 32000, "seq_len": 4096, "mbs": 1}
    row = only_row(read_bare(tmp_path, json.dumps(summary), **given))
    assert (row.sec_per_it, row.tflops, row.gbs, row.mem_gib, row.losses) == (5.25, 412.5, 512, 32.0, (2.5,))
    assert "the time of the last step that was tracked" in (row.notes or "")
