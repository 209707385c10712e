"""Lines that trainers' older and newer releases print become rows of what they state."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimaran.nouns.measurement import Measurement
from trimaran.store.importers.formats import Asked, Imported, import_file
from trimaran.store.importers.profile import typed_cells

SHAPE: dict[str, str | int | float] = {"layers": 12, "hidden": 768, "heads": 12, "vocab": 50257, "seq_len": 1024}
BATCH: dict[str, str | int | float] = {"mbs": 4, "gbs": 64}
HEADER = """***** Running training *****
  Instantaneous batch size per device = 4
  Total train batch size (w. parallel, distributed & accumulation) = 64
  Gradient Accumulation steps = 4
  Total optimization steps = {0}
"""


def read(tmp_path: Path, text: str, form: str = "auto") -> Imported:
    path = tmp_path / "train.log"
    path.write_text(text)
    return import_file(path, Asked(given=typed_cells({**SHAPE, **BATCH})), form)


def only(found: Imported, form: str) -> Measurement:
    assert (found.refused, found.format) == ((), form)
    (row,) = found.rows
    return row


@pytest.mark.parametrize("bars", ["", " 90%|#| 902/1000 [00:20<16:20, 10.0s/it]\n"])
def test_a_trainer_that_goes_on_from_a_checkpoint_made_the_steps_behind_it_alone(tmp_path: Path, bars: str) -> None:
    resumed = HEADER.format(1000) + "  Continuing training from global step 900\n" + bars
    row = only(read(tmp_path, resumed + "{'train_runtime': 1000.0, 'train_steps_per_second': 1.0}\n"), "hugging-face")
    assert (row.sec_per_it, row.step_times_s) == (10.0, (10.0,))
    assert ("progress bar" if bars else "the mean over 100 steps") in (row.notes or "")


def test_figures_that_transformers_5_prints_as_words_are_numbers(tmp_path: Path) -> None:
    said = "{'loss': '0.5768', 'grad_norm': '15.18', 'learning_rate': '2.967e-06', 'epoch': '2.558'}\n"
    said += "{'train_runtime': '1032', 'train_samples_per_second': '18.15', 'train_steps_per_second': '1.137'}\n"
    row = only(read(tmp_path, HEADER.format(560) + said), "hugging-face")
    assert (row.status, row.losses) == ("ok", (0.5768,)) and row.sec_per_it == pytest.approx(1032 / 560)


def test_a_trainers_log_below_the_level_of_its_header_is_read_by_the_bar_that_its_losses_follow(tmp_path: Path) -> None:
    bare = """Loading checkpoint shards: 100%|##########| 3/3 [00:41<00:00, 13.90s/it]
  6%|6         | 1/16 [01:05<16:20, 65.36s/it]
{'loss': 2.2344, 'grad_norm': 17.139, 'learning_rate': 0.0, 'num_tokens': 51486.0, 'epoch': 0.06}
 12%|#2        | 2/16 [01:23<08:10, 35.06s/it]
{'loss': 2.1689, 'grad_norm': 16.724, 'learning_rate': 0.0002, 'num_tokens': 105023.0, 'epoch': 0.12}
 19%|##5       | 3/16 [01:34<03:03, 15.26s/it]
{'train_runtime': 298.36, 'train_samples_per_second': 3.352, 'train_steps_per_second': 0.054, 'train_loss': 2.086}
"""
    row = only(read(tmp_path, bare), "hugging-face")
    assert (row.step_times_s, row.sec_per_it, row.losses) == ((65.0, 18.0, 11.0), 14.5, (2.2344, 2.1689))
    without_bars = "\n".join(line for line in bare.splitlines() if "|" not in line)
    row = only(read(tmp_path, without_bars), "hugging-face")
    assert row.losses == (2.2344, 2.1689) and row.sec_per_it == pytest.approx(1 / 0.054)
    assert "the mean over 16 steps" in (row.notes or ""), "298.36 s at 0.054 steps a second"
    row = only(read(tmp_path, without_bars.replace("0.054", "0.004")), "hugging-face")
    assert row.sec_per_it is None, "a rate of one digit tells no time"


DEEPSPEED = """[INFO] [logging.py:96:log_dist] [Rank 0] step={0}, skipped=4, lr=[4.99e-05], mom=[(0.9, 0.95)]
[INFO] [timer.py:260:stop] {1}, RunningAvgSamplesPerSec=25.02, CurrSamplesPerSec={2}, MaxMemAllocated=38.49GB
"""


def test_deepspeeds_timer_is_read_with_a_batch_that_the_user_states_and_times_single_steps(tmp_path: Path) -> None:
    lines = [
        DEEPSPEED.format(n, f"epoch=0/micro_step={4 * n}/global_step={n}", rate) for n, rate in ((10, 32), (20, 64))
    ]
    row = only(read(tmp_path, "".join(lines)), "deepspeed")
    assert (row.step_times_s, row.gbs, row.mem_gib) == ((2.0, 1.0), 64, 38.49)
    assert "mean of" not in (row.notes or "")


@pytest.mark.parametrize(("seconds", "every"), [(0.4, 1), (1.4, 1), (3.3, 1), (3.3, 5), (13.7, 1)])
def test_whole_seconds_of_a_bar_tell_the_time_of_a_step_that_is_no_whole_second(
    tmp_path: Path, seconds: float, every: int
) -> None:
    clock = [(done, int(5 + seconds * done)) for done in range(every, 201, every)]
    bars = "".join(f"\r 1%|#| {done}/200 [{at // 60:02}:{at % 60:02}<10:00, 1.0s/it]" for done, at in clock)
    for log in (bars, bars[: bars.index(f"| {10 * every}/200")]):
        row = only(read(tmp_path, HEADER.format(4).replace("steps = 4", "steps = 200") + log + "\n"), "hugging-face")
        off = 0.05 if log == bars else 1 / (9 * seconds * every)
        assert row.sec_per_it == pytest.approx(seconds, rel=max(off, 0.05)), "to its whole seconds, where they are few"


def test_a_bar_that_was_started_again_without_a_header_tells_no_time_across_its_starts(tmp_path: Path) -> None:
    """Its clock begins anew: the steps until it had come as far again were counted with the few seconds behind that."""
    bar = " 1%|#| {}/90 [{}<10:00, 10.0s/it]\n{{'loss': 2.5, 'epoch': 0.1}}\n"
    first = [(1, "00:10"), (10, "01:40"), (20, "03:20")]
    again = [(30, "01:45"), (40, "03:25"), (50, "05:05")]  # from step 20 on
    row = only(read(tmp_path, "".join(bar.format(*each) for each in (*first, *again))), "hugging-face")
    assert row.step_times_s == (10.0,) * 5 and row.sec_per_it == 10.0


def test_llama_factorys_log_gives_steps_by_its_clock(tmp_path: Path) -> None:
    line = '{{"current_steps": {0}, "total_steps": 93, "loss": {1}, "lr": 1e-06, "epoch": 0.16, "percentage": 5.38, '
    line += '"elapsed_time": "{2}", "remaining_time": "0:36:15", "throughput": 13061.0, "total_tokens": 1614784}}\n'
    evaluated = '{"current_steps": 10, "total_steps": 93, "eval_loss": 4.0, "epoch": 0.3, "elapsed_time": "0:04:30"}\n'
    made = [line.format(5, 5.7013, "0:02:03"), line.format(10, 4.169, "0:04:03"), evaluated]
    row = only(read(tmp_path, "".join([*made, line.format(15, 1.2572, "1:00:03")])), "hugging-face")
    # the first has the start-up in it
    assert row.step_times_s == (123 / 5, 24.0, 672.0) and row.losses == (5.7013, 4.169, 1.2572)
    assert "progress bar" in (row.notes or "")
    # one that was started again from step 10 counts on, and its clock does not
    again = [line.format(15, 1.25, "0:02:03"), line.format(20, 1.0, "0:04:03"), line.format(25, 0.5, "0:06:03")]
    row = only(read(tmp_path, "".join([*made, *again])), "hugging-face")
    assert row.sec_per_it == 24.0 and row.losses == (5.7013, 4.169, 1.25, 1.0, 0.5)


def test_what_ms_swift_adds_to_a_trainers_figures_gives_steps_and_memory(tmp_path: Path) -> None:
    swift = (
        "{{'loss': 1.5, 'epoch': 0.1, '{}': '{}/94', 'percentage': '5%', 'elapsed_time': '{}', "
        "'remaining_time': '4m 28s', 'memory(GiB)': {}, 'train_speed(iter/s)': 0.46}}\n"
    )
    for name in ("global_step/max_steps", "iteration"):
        steps = [(1, "1h 0m 50s", 4.87), (5, "1h 1m 30s", 6.5), (9, "1h 2m 11s", 6.5), (13, "1h 2m 51s", 5.0)]
        row = only(read(tmp_path, "".join(swift.format(name, *step) for step in steps)), "hugging-face")
        assert (row.step_times_s, row.mem_gib) == ((3650.0, 10.0, 10.25, 10.0), 6.5)
        assert row.losses == (1.5,) * 4 and "had reserved" in (row.notes or "")


@pytest.mark.parametrize("name", ["'memory/max_active (GiB)': '{}'", "'memory/max_mem_active(gib)': {}"])
def test_memory_that_axolotl_adds_to_a_trainers_figures_is_read(tmp_path: Path, name: str) -> None:
    lines = "".join(f"{{'loss': 0.5, {name.format(gib)}, 'epoch': 0.1}}\n" for gib in (25.45, 34.89, 34.5))
    row = only(read(tmp_path, HEADER.format(3) + lines + "{'train_runtime': 9.0}\n"), "hugging-face")
    assert (row.mem_gib, row.sec_per_it) == (34.89, 3.0)


def test_trainings_of_other_batches_in_one_log_of_a_trainer_are_rows_of_their_own(tmp_path: Path) -> None:
    """A sweep's script prints them one after the other; the last one's batch was that of all of their steps."""
    bars = "".join(
        f" {n}0%|#| {n}/4 [00:{{0}}{n}<00:10, 1.0s/it]\n{{{{'loss': {5 - n}.5, 'epoch': 0.1}}}}\n" for n in (1, 2, 3)
    )
    first = HEADER.format(4) + bars.format(1)
    other = HEADER.format(4).replace("= 64", "= 32").replace("steps = 4\n  Total", "steps = 2\n  Total") + bars.format(
        3
    )
    rows = read(tmp_path, "PyTorch is here\n" + first + other).rows
    assert [(row.gbs, row.losses, row.step_times_s) for row in rows] == [
        (64, (4.5, 3.5, 2.5), (11.0, 1.0)), (32, (4.5, 3.5, 2.5), (31.0, 1.0))
    ]  # fmt: skip
    resumed = first.replace("steps = 4\n 1", "steps = 4\n  Continuing training from global step 0\n 1")
    (row,) = read(tmp_path, first + resumed).rows
    assert row.step_times_s == (11.0, 1.0, 1.0) and "started again" in (row.notes or "")


@pytest.mark.parametrize("form", ["nanotron", "olmo-core", "deepspeed"])
def test_the_first_step_of_a_further_start_tells_no_time_of_a_step(tmp_path: Path, form: str) -> None:
    olmo = "2025-01-01 10:{2:02d}:0{0}.123 host olmo_core.train INFO [step={0}/9,epoch=1]\n    train/CE loss=9.{0}\n"
    lines = {
        "nanotron": "iteration: {0} / 9 | elapsed_time_per_iteration_ms: {1}K | global_batch_size: 64 | lm_loss: 9 |\n",
        "olmo-core": olmo,
        "deepspeed": DEEPSPEED.replace("{1}", "epoch=0/micro_step={0}/global_step={0}").replace("{2}", "{3}"),
    }
    again = {"nanotron": "[Start training] again\n", "olmo-core": "TransformerConfig(\n", "deepspeed": ""}
    made = [(1, 9, 0, 8), (2, 2, 0, 32), (3, 2, 0, 32), (4, 2, 0, 32)]
    first = 3 if form == "deepspeed" else 5
    more = [(first, 8, 30, 4), (6, 2, 30, 32)]
    text = "".join(lines[form].format(*each) for each in made) + again[form]
    (row,) = read(tmp_path, text + "".join(lines[form].format(*each) for each in more)).rows
    slow = [seconds for seconds in row.step_times_s if seconds > 2.5]
    assert slow in ([9.0], [8.0], []) and "started again before iteration" in (row.notes or "")


# A line of a configuration by a degree and a batch, and lines of a step by its number, its seconds and the batch.
JOBS = {
    "nanotron": (
        "parallelism=ParallelismArgs(dp=1, pp=1, tp={0},\n",
        "iteration: {0} / 9 | elapsed_time_per_iteration_ms: {1}K | global_batch_size: {2} | lm_loss: 9.{0} |\n",
    ),
    "nemo": (
        "  tensor_model_parallel_size: {0}\n",
        "Training epoch 0, iteration {0}/9 | global_batch_size: {2} | reduced_train_loss: 9.{0} | "
        "train_step_timing in s: {1}.0\n",
    ),
    "olmo-core": (
        "olmo_core.train INFO TransformerConfig(d_model=768,\n  sequence_length=1024,\n  global_batch_size={2},\n"
        "  tp_config=TransformerTensorParallelConfig(degree={0}, loss_parallel=True)\n",
        "olmo_core.train INFO [step={0}/9,epoch=1]\n    throughput/device/BPS={3}\n    train/CE loss=9.{0}\n",
    ),
    "deepspeed": (
        "[INFO] [config.py:9:print]   train_batch_size ............. {1}\n",
        DEEPSPEED.replace("{1}", "epoch=0/micro_step={0}/global_step={0}").replace("{2}", "{4}"),
    ),
}


@pytest.mark.parametrize("form", JOBS)
def test_jobs_of_other_settings_in_one_log_are_rows_of_their_own(tmp_path: Path, form: str) -> None:
    """The steps that the second made beyond those of the first were taken for steps of the first one's settings."""
    config, step = JOBS[form]

    def job(tp: int, gbs: int, *seconds: int) -> str:
        steps = (step.format(n, each, gbs, 1 / each, gbs / each) for n, each in enumerate(seconds, start=1))
        return config.format(tp, gbs, 1024 * gbs) + "".join(steps)

    first, second = read(tmp_path, job(2, 64, 9, 2, 2) + "srun: done\n" + job(4, 32, 8, 4, 4, 4, 4)).rows
    assert (first.gbs, first.step_times_s) == (64, (9.0, 2.0, 2.0))
    assert (second.gbs, second.step_times_s) == (32, (8.0, 4.0, 4.0, 4.0, 4.0))
    assert form == "deepspeed" or (first.tp, second.tp) == (2, 4)
    # started again alike it goes on, and its first step has the start-up once more
    (row,) = read(tmp_path, job(2, 64, 9, 2, 2) + job(2, 64, 8, 2)).rows
    assert row.step_times_s == (9.0, 2.0, 2.0, 2.0) and "started again before iteration 1" in (row.notes or "")


ALL: dict[str, str | int | float] = {
    "dp": 4, "tp": 1, "pp": 1, "zero_stage": 0, "recompute": "none", "precision": "bf16", "optimizer": "adam",
}  # fmt: skip
CLOCKED = """[2023-11-07 02:13:{0:02d},415] [INFO] [logging.py:96:log_dist] [Rank 0] step={1}, skipped=4, lr=[5.1e-07]
[2023-11-07 02:13:{0:02d},417] [INFO] [timer.py:260:stop] epoch=0/micro_step={1}/global_step={1}, \
RunningAvgSamplesPerSec=25.72, CurrSamplesPerSec=25.6, MemAllocated=4.32GB, MaxMemAllocated=38.49GB
"""


@pytest.mark.parametrize(("gbs", "quality"), [(64, "ok"), (70, "ok"), (512, None), (16, "suspect")])
def test_a_batch_that_deepspeeds_clock_contradicts_makes_no_times(
    tmp_path: Path, gbs: int, quality: str | None
) -> None:
    path = tmp_path / "train.log"
    path.write_text("".join(CLOCKED.format(5 + 25 * n, 440 + 10 * n) for n in range(3)).replace("\\\n", ""))
    found = import_file(path, Asked(given=typed_cells({**SHAPE, **ALL, "mbs": 4, "gbs": gbs})))
    if quality is None:
        (said,) = found.refused
        assert found.rows == () and f"gbs is {gbs}" in said and "has about 64: correct --set gbs" in said
        return
    (row,) = found.rows
    assert (row.quality, row.sec_per_it) == (quality, gbs / 25.6)
    assert ("has about 64" in (row.notes or "")) is (quality == "suspect")


@pytest.mark.parametrize(("micro_steps", "times"), [(1, (2.0, 1.0)), (4, ())])
def test_deepspeeds_timer_of_2022_counts_micro_steps(
    tmp_path: Path, micro_steps: int, times: tuple[float, ...]
) -> None:
    lines = [DEEPSPEED.format(n, f"0/{micro_steps * n}", rate) for n, rate in ((10, 32.0), (20, 64.0))]
    row = only(read(tmp_path, "".join(lines)), "deepspeed")
    assert (row.step_times_s, row.mem_gib) == (times, 38.49)


@pytest.mark.parametrize("prefix", ["    ", "(pretraining, pid=4112) "])
def test_steps_of_nemo_2_are_read_with_the_batch_that_they_name(tmp_path: Path, prefix: str) -> None:
    step = "Training epoch {0}, iteration 0/999 | lr: 2.999e-06 | global_batch_size: 512 | global_step: {1} | "
    step += "reduced_train_loss: 11.0{0} | train_step_timing in s: 46.8{0}{2}\n"
    text = prefix + step.format(0, 9, "") + prefix + step.format(1, 19, " | consumed_samples: 10240")
    row = only(read(tmp_path, text), "nemo")
    assert (row.gbs, row.step_times_s, row.losses) == (512, (46.80, 46.81), (11.00, 11.01))
    assert "mean of" not in (row.notes or ""), "NeMo times single steps"


@pytest.mark.parametrize("name", ["max_memory_reserved", "peak_memory_usage"])
def test_memory_that_nemo_2_logs_is_the_most_that_the_rank_had_reserved(tmp_path: Path, name: str) -> None:
    step = (
        " 0: Training epoch 0, iteration {0}/29 | lr: 5e-06 | global_batch_size: 512 | global_step: {0} | "
        f"{name}: {{1}} | memory_allocated: 53930270720 | reduced_train_loss: 9.924 | "
        "train_step_timing in s: 26.93 | consumed_samples: 6144 | TFLOPS_per_GPU: 85.8\n"
    )
    row = only(read(tmp_path, step.format(10, 57466159104) + " 0: \n" + step.format(11, 57675874304)), "nemo")
    assert row.mem_gib == pytest.approx(57675874304 / 2**30)
    assert (row.gbs, row.sec_per_it, row.tflops) == (512, 26.93, 85.8)


def test_tokens_without_a_label_make_automodels_times_doubtful(tmp_path: Path) -> None:
    """It counts a prompt's tokens a second, which num_label_tokens leaves out; and those of a replica as of a GPU."""
    line = (
        "2025-09-01 07:13:{0:02d} | INFO | root | step {1} | epoch 0 | loss 1.5 | grad_norm 1.0 | lr 6.1e-05 | "
        "mem 38.63 GiB | tps 1000.00(500.00/gpu) | num_label_tokens {2}\n"
    )
    log = "2025-09-01 07:13:00 | INFO | root | World size: 8\n  tp_size: 4\n  pp_size: 1\n"
    path, given = tmp_path / "train.log", typed_cells({**SHAPE, **BATCH, **ALL, "dp": 2})
    rows = []
    for labels in (4000, 2000):
        path.write_text(log + "".join(line.format(4 * n, n, labels + n) for n in range(1, 9)))
        rows += import_file(path, Asked(given=given)).rows
    whole, masked = rows
    assert (whole.quality, whole.sec_per_it, whole.tokens_per_s_per_gpu) == ("ok", pytest.approx(4.0, rel=0.01), 125.0)
    assert masked.quality == "suspect" and "6 steps took 24 s and by num_label_tokens 12" in (masked.notes or "")


@pytest.mark.parametrize(
    ("bar", "seconds"),
    [
        ("795/77225 [9:07:58<878:01:48, 41.36s/it, loss=3.1, v_num=, ", 32878 / 795),
        ("795/77225 [9:07:58<878:01:48, 82.72s/it, loss=3.1, v_num=, ", 32878 / 397),
        ("795/77225 [05:18<8:29:32, 2.50it/s, ", 0.4),
    ],
)
def test_a_bar_of_nemo_without_a_steps_time_gives_its_own(tmp_path: Path, bar: str, seconds: float) -> None:
    fields = "reduced_train_loss=3.090, global_step=794.0, consumed_samples=1.63e+6]\n"
    row = only(read(tmp_path, "Epoch 0:   1%|          | " + bar + fields), "nemo")
    assert row.losses == (3.09,) and row.sec_per_it == pytest.approx(seconds, rel=2e-3)
    assert "progress bar" in (row.notes or "")
