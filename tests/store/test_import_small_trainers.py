"""Logs of trainers that print little of what ran: times are those of steps alone, and the user states the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimaran.nouns.measurement import Measurement
from trimaran.store.importers.formats import Asked, import_file
from trimaran.store.importers.profile import typed_cells

SHAPE: dict[str, str | int | float] = {"layers": 12, "hidden": 768, "heads": 12, "vocab": 50304}
NANOGPT = """Overriding config with config/train_gpt2.py:
# config for training
wandb_log = True
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8

Overriding: n_layer = 6
Overriding: n_head = 6
Overriding: n_embd = 384
Overriding: dtype = bfloat16
tokens per iteration will be: 491,520
found vocab_size = 65 (inside data/shakespeare_char/meta.pkl)
number of parameters: 10.65M
step 0: train loss 4.2874, val loss 4.2823
iter 0: loss 4.2654, time 9371.81ms, mfu -100.00%
iter 10: loss 3.1462, time 250.00ms, mfu 16.68%
iter 20: loss 2.7320, time 260.00ms, mfu 16.67%
step 30: train loss 2.5, val loss 2.6
saving checkpoint to out
iter 30: loss 2.4321, time 35392.33ms, mfu 13.85%
iter 40: loss nan, time 255.00ms, mfu 14.12%
"""


def rows(tmp_path: Path, text: str, form: str, **given: str | int | float) -> tuple[Measurement, ...]:
    path = tmp_path / "train.log"
    path.write_text(text)
    found = import_file(path, Asked(given=typed_cells(given)))
    assert (found.refused, found.format) == ((), form)
    return found.rows


def test_a_log_of_nanogpt_gives_times_without_those_of_evaluations(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, NANOGPT, "nanogpt")
    assert row.step_times_s == (0.25, 0.26, 0.255) and row.sec_per_it == 0.2575
    assert row.losses == (4.2654, 3.1462, 2.732, 2.4321) and "1 of 5 logged losses" in (row.notes or "")
    assert (row.layers, row.heads, row.hidden, row.seq_len, row.vocab) == (6, 6, 384, 1024, 65)
    assert (row.mbs, row.gbs, row.precision, row.tp, row.dp) == (12, 480, "bf16", None, None)
    assert "mean of" not in (row.notes or ""), "each time is that of one iteration"


def test_a_training_of_nanogpt_that_goes_on_in_the_same_log_is_one_and_another_is_its_own(tmp_path: Path) -> None:
    again = NANOGPT.replace("iter 20:", "iter 28:").replace("iter 0:", "iter 20:").replace("iter 10:", "iter 25:")
    (row,) = rows(tmp_path, NANOGPT + again, "nanogpt")
    assert row.step_times_s == (0.25, 0.26, 0.255, 0.25, 0.26, 0.255) and "started again" in (row.notes or "")
    other = NANOGPT.replace("n_layer = 6", "n_layer = 8")
    assert [row.layers for row in rows(tmp_path, NANOGPT + other, "nanogpt")] == [6, 8]


def test_a_log_of_build_nanogpt_is_read_alike(tmp_path: Path) -> None:
    step = "step {:5d} | loss: {:.6f} | lr 6.0000e-05 | norm: 15.3426 | dt: {}ms | tok/sec: 6969.21\n"
    text = "total desired batch size: 524288\n=> calculated gradient accumulation steps: 32\nvalidation loss: 10.9499\n"
    text += step.format(0, 10.9, 75229.21) + step.format(1, 10.8, 2890.5) + step.format(2, 10.7, 2891.5)
    text += "validation loss: 10.1\nHellaSwag accuracy: 2504/10042=0.2494\n" + step.format(3, 10.6, 9000.0)
    (row,) = rows(tmp_path, text, "nanogpt", **SHAPE, seq_len=1024, mbs=16)
    assert (row.step_times_s, row.gbs, len(row.losses)) == ((2.8905, 2.8915), 512, 4)


def test_a_time_that_is_none_is_left_out(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, NANOGPT.replace("time 260.00ms", "time 0.00ms"), "nanogpt")
    assert row.step_times_s == (0.25, 0.255) and row.sec_per_it == 0.255


COMPOSER = """max_seq_len: 2048
model:
  name: mpt_causal_lm
  d_model: 768
  n_heads: 12
  n_layers: 12
  expansion_ratio: 4
  vocab_size: 50368
optimizer:
  name: decoupled_adamw
precision: amp_bf16
fsdp_config:
  sharding_strategy: FULL_SHARD
  activation_checkpointing: false
num_gpus_per_node: 8
num_nodes: 2
"""
BATCH = """[{0}batch={1}/{2}]:
         Train time/batch: {3}
         Train time/sample: {4}
         Train memory/peak_reserved_mem: 21.4748
         Train trainer/device_train_microbatch_size: 8
         Train loss/train/total: {5}
         Train throughput/batches_per_sec: 0.0027
         Train throughput/samples_per_sec: {6}
         Train throughput/device/samples_per_sec: 0.1708
         Train time/train: 0.5249
"""


@pytest.mark.parametrize("prefix", ["", "0: ", "[default0]:", "[1,0]<stdout>:"])
def test_a_log_of_composer_is_timed_by_samples_where_batches_a_second_have_two_digits(
    tmp_path: Path, prefix: str
) -> None:
    text = COMPOSER + "".join(BATCH.format("", n + 1, 9, n, 1024 * n, 9.5 - n, 2.733) for n in (1, 2, 3))
    (row,) = rows(tmp_path, "".join(prefix + line + "\n" for line in text.splitlines()), "composer")
    assert row.sec_per_it == pytest.approx(1024 / 2.733) and row.losses == (8.5, 7.5, 6.5)
    assert (row.gbs, row.mbs, row.devices, row.nodes, row.mem_gib) == (1024, 8, 16, 2, pytest.approx(20.0, rel=1e-4))
    assert (row.layers, row.hidden, row.ffn_hidden, row.heads, row.vocab) == (12, 768, 3072, 12, 50368)
    assert (row.precision, row.zero_stage, row.recompute, row.optimizer) == ("bf16", 3, "none", "adam")
    assert (row.tp, row.pp) == (None, None) and "window of the speed monitor" in (row.notes or "")


@pytest.mark.parametrize(
    ("said", "shares"),
    [
        ("HYBRID_SHARD\nnum_gpus_per_node: 8", (3, "fully_sharded", 8)),
        ("HYBRID_SHARD\ndata_parallel_shard_degree: 4", (3, "fully_sharded", 4)),
        ("_HYBRID_SHARD_ZERO2\nnum_gpus_per_node: 8", (2, "fully_sharded", 8)),
        ("HYBRID_SHARD", (None, None, None)),
    ],
)
def test_replicas_of_composer_that_share_within_a_node_are_stored_so(
    tmp_path: Path, said: str, shares: tuple[int | None, str | None, int | None]
) -> None:
    """What they share was left open; where nothing says how many share it, it still is."""
    text = COMPOSER.replace("num_gpus_per_node: 8\n", "").replace("FULL_SHARD", said)
    text += "".join(BATCH.format("", n + 1, 9, n, 1024 * n, 9.5 - n, 2.733) for n in (1, 2, 3))
    (row,) = rows(tmp_path, text, "composer")
    assert (row.zero_stage, row.dp_kind, row.shard) == shares


def test_epochs_of_composer_are_one_training_and_batches_that_come_again_a_further_start(tmp_path: Path) -> None:
    epochs = [("epoch=1][", 2, 3, 1), ("epoch=1][", 3, 3, 2), ("epoch=2][", 1, 3, 3), ("epoch=2][", 2, 3, 4)]
    text = COMPOSER + "".join(BATCH.format(e, n, of, done, 64 * done, 5.0, 32) for e, n, of, done in epochs)
    (row,) = rows(tmp_path, text, "composer")
    assert row.step_times_s == (2.0,) * 4 and "started again" not in (row.notes or "")
    again = text.replace("throughput/samples_per_sec: 32", "throughput/samples_per_sec: 16")
    (row,) = rows(tmp_path, text + again, "composer")
    assert row.step_times_s == (2.0,) * 4 + (4.0,) * 3 and "started again before iteration 2" in (row.notes or "")


def test_composers_own_time_of_a_step_goes_before_its_mean(tmp_path: Path) -> None:
    batches = [
        BATCH.format("", n, 9, n, 64 * n, 5.0, 32) + f"         Train time/secs_per_step: 1.{n}\n" for n in (1, 2, 3)
    ]
    (row,) = rows(tmp_path, COMPOSER + "".join(batches), "composer")
    assert row.step_times_s == (1.1, 1.2, 1.3) and "window" not in (row.notes or "")


def test_another_configuration_in_the_same_log_of_composer_is_another_training(tmp_path: Path) -> None:
    batches = "".join(BATCH.format("", n, 9, n, 64 * n, 5.0, 32) for n in (1, 2))
    found = rows(tmp_path, COMPOSER + batches + COMPOSER.replace("n_layers: 12", "n_layers: 6") + batches, "composer")
    assert [row.layers for row in found] == [12, 6]


def test_batches_of_composer_that_change_tell_no_time_by_samples(tmp_path: Path) -> None:
    text = COMPOSER + "".join(BATCH.format("", n + 1, 9, n, done, 5.0, 32) for n, done in ((1, 64), (2, 128), (3, 256)))
    (row,) = rows(tmp_path, text, "composer", gbs=128)
    assert row.sec_per_it is None and "other numbers of samples" in (row.notes or "")


def test_a_document_that_quotes_a_log_of_composer_is_a_document(tmp_path: Path) -> None:
    table = "| MBS | GBS | Sec/it |\n|--|--|--|\n| 1 | 8 | 2.0 |\n"
    rows(tmp_path, table + BATCH.format("", 1, 9, 1, 64, 5.0, 32), "markdown", **SHAPE, seq_len=1024)
