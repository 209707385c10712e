"""Logs and exports that others published become rows of what they state; what they do not state is blank and named."""

from __future__ import annotations

import itertools
import json
import sqlite3
from pathlib import Path

import pytest

from trimaran.files.row_nouns import nouns_of
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.store import Store, export_table
from trimaran.store.importers.formats import Asked, Imported, import_file
from trimaran.store.importers.profile import typed_cells
from trimaran.store.schema import APPLICATION_ID, MIGRATIONS

WILD = Path(__file__).parent / "logs" / "wild"
SHAPE: dict[str, str | int | float] = {"layers": 12, "hidden": 768, "heads": 12, "vocab": 50257, "seq_len": 1024}
BATCH: dict[str, str | int | float] = {"mbs": 4, "gbs": 8}


def read(name: str, **given: str | int | float) -> Imported:
    return import_file(WILD / name, Asked(given=typed_cells(given)))


def only(found: Imported, form: str) -> Measurement:
    assert (found.refused, found.format) == ((), form)
    (row,) = found.rows
    return row


def test_every_wild_log_is_of_a_format_and_named_with_its_source() -> None:
    files = {path.name for path in WILD.iterdir()} - {"README.md"}
    sources = (WILD / "README.md").read_text()
    assert len(files) >= 12
    assert all(f"`{name}`" in sources for name in files)
    assert len({read(name, **SHAPE, **BATCH).format for name in files}) >= 8


def test_a_dump_of_deepspeeds_configuration_does_not_override_megatrons_world() -> None:
    row = only(read("bigscience_megatron_deepspeed.txt"), "megatron")
    assert (row.stack, row.devices, row.dp, row.tp, row.pp) == ("megatron-deepspeed", 64, 1, 4, 16)
    assert (row.layers, row.hidden, row.ffn_hidden, row.heads, row.seq_len) == (64, 8192, 32768, 32, 1024)
    assert (row.precision, row.recompute, row.zero_stage, row.mbs, row.gbs) == ("fp16", "full", 0, 4, 1024)
    assert row.losses == (12.44238, 12.44502, 41.03157)
    assert (row.quality, row.sec_per_it) == ("ok", pytest.approx((141.0968 + 137.1384) / 2))


def test_a_log_of_deepspeed_zero_states_its_batches_shape_and_world() -> None:
    found = read("bigscience_deepspeed_zero3.txt")
    (refused,) = found.refused
    assert "seq_len is not stated" in refused and "mbs" not in refused, "the batches are there, the length is not"
    row = only(read("bigscience_deepspeed_zero3.txt", seq_len=1024), "hugging-face")
    assert (row.mbs, row.gbs, row.dp, row.devices, row.zero_stage, row.dp_kind) == (4, 64, 16, 16, 3, "fully_sharded")
    assert (row.layers, row.hidden, row.heads, row.vocab) == (40, 7168, 32, 50257), (
        "as the printed config is overridden"
    )
    assert (row.precision, row.optimizer, row.recompute, row.tp, row.pp) == ("fp16", "adam", "full", 1, 1)
    assert row.step_times_s == (58.0, 62.0, 60.0, 59.0) and "progress bar" in (row.notes or "")


def test_deepspeeds_own_log_gives_times_by_its_samples_a_second(tmp_path: Path) -> None:
    whole = (WILD / "bigscience_deepspeed_zero3.txt").read_text().splitlines()
    path = tmp_path / "engine.log"
    timer = "[INFO] [timer.py:215:stop] epoch=0/micro_step={0}/global_step={0}, RunningAvgSamplesPerSec=30.1, "
    timer += "CurrSamplesPerSec=32.0, MemAllocated=1.2GB, MaxMemAllocated=10.5GB"
    path.write_text("\n".join([*(line for line in whole if ":print]" in line), timer.format(1), timer.format(2)]))
    row = only(import_file(path, Asked(given=typed_cells(SHAPE))), "deepspeed")
    assert (row.sec_per_it, row.mem_gib, row.mbs, row.gbs, row.dp) == (2.0, 10.5, 4, 64, 16)
    assert (row.tp, row.pp) == (None, None) and "not stated: tp, pp" in (row.notes or "")


def test_the_shape_of_torchtitans_model_is_read_and_its_precision_is_not_made_up() -> None:
    row = only(read("auroragpt_torchtitan.txt"), "torchtitan")
    assert (row.layers, row.hidden, row.heads, row.kv_heads, row.vocab) == (6, 4096, 32, 32, 32000)
    assert row.ffn_hidden == 11008
    assert (row.dp, row.zero_stage, row.recompute, row.precision) == (24, 3, "selective", None)
    assert row.quality == "incomplete" and "not stated: precision, optimizer" in (row.notes or "")
    assert row.sec_per_it == pytest.approx((4096 / 6697 + 4096 / 6562) / 2)


def test_nanotron_without_a_precision_gets_none() -> None:
    row = only(read("tiny_llama_nanotron.txt"), "nanotron")
    assert (row.precision, row.recompute, row.optimizer, row.zero_stage) == ("bf16", "none", "adam", 0)
    bare = only(read("tiny_llama_nanotron_without_config.txt", **SHAPE), "nanotron")
    assert (bare.precision, bare.recompute, bare.zero_stage, bare.quality) == (None, None, None, "incomplete")
    assert (bare.mbs, bare.gbs, bare.seq_len, bare.tp, bare.dp) == (2, 2, 256, 1, 1), "one device, and what it says"
    stated = only(read("tiny_llama_nanotron_without_config.txt", **SHAPE, precision="bf16"), "nanotron")
    assert stated.precision == "bf16" and "precision" not in (stated.notes or "")


@pytest.mark.parametrize(
    ("name", "line", "trait"),
    [
        ("openseek_mixture.txt", "", "load_balancing_loss is logged"),
        (
            "bigscience_megatron_deepspeed.txt",
            "  num_experts ..................................... 8",
            "num_experts is 8",
        ),
        ("auroragpt_torchtitan.txt", "Building llama4 with MoEModelArgs(dim=256, num_experts=16)", "num_experts is 16"),
        ("tiny_llama_nanotron.txt", "expert_parallel_size=4,", "expert_parallel_size is 4"),
        ("nemo_automodel.txt", "  num_moe_experts: 8", "num_moe_experts is 8"),
        ("olmo_core_config.txt", "feed_forward_moe=MoEConfig(", "feed_forward_moe is MoEConfig"),
        ("olmo_core_config.txt", "routed_experts=RoutedExpertsConfig(", "routed_experts is RoutedExpertsConfig"),
        ("bigscience_deepspeed_zero3.txt", '  "num_local_experts": 8,', "num_local_experts is 8"),
    ],
)
def test_a_mixture_of_experts_is_refused_by_the_trait_that_tells(
    tmp_path: Path, name: str, line: str, trait: str
) -> None:
    path = tmp_path / name
    path.write_text(line + "\n" + (WILD / name).read_text().replace("feed_forward_moe=None", ""))
    found = import_file(path, Asked(given=typed_cells({**SHAPE, **BATCH})))
    assert found.rows == () and len(found.refused) == 1
    assert trait in found.refused[0] and "mixture of experts" in found.refused[0]


def test_nemos_automodel_gives_times_by_its_tokens() -> None:
    row = only(read("nemo_automodel.txt", layers=12, hidden=768, heads=12, vocab=50257), "nemo")
    assert (row.devices, row.mbs, row.gbs, row.seq_len, row.tp, row.optimizer) == (2, 32, 512, 1024, 1, "adam")
    assert row.step_times_s == pytest.approx((3.9717, 3.585, 3.61), rel=1e-3)
    assert (row.mem_gib, row.pp, row.dp, row.precision) == (38.63, None, None, None)


def test_the_bar_of_nemos_megatron_trainer_gives_times_and_the_batch_that_it_consumed(tmp_path: Path) -> None:
    bar = "Epoch 0: :  {0}%|#| {0}/50 [{0}:22<00:00, v_num=0, reduced_train_loss=0.18{0}, global_step={1}.00, "
    bar += "consumed_samples={2}.0, train_step_timing in s=24.{0}0, TFLOPS_per_GPU=85.80]"
    path = tmp_path / "nemo.out"
    path.write_text("\r".join(bar.format(n, n - 1, n * 1024) for n in (1, 2, 3)))
    row = only(import_file(path, Asked(given=typed_cells({**SHAPE, "mbs": 1}))), "nemo")
    assert (row.gbs, row.step_times_s, row.losses) == (1024, (24.1, 24.2, 24.3), (0.181, 0.182, 0.183))
    assert row.tflops == 85.8


def test_the_configuration_of_olmo_core_states_all_of_a_layout() -> None:
    row = only(read("olmo_core_config.txt"), "olmo-core")
    assert (row.layers, row.hidden, row.ffn_hidden, row.heads, row.vocab) == (32, 4096, 11008, 32, 100352)
    assert (row.devices, row.dp, row.tp, row.pp, row.mbs, row.gbs, row.seq_len) == (32, 16, 2, 1, 1, 256, 65536)
    assert (row.precision, row.recompute, row.dp_kind, row.optimizer) == ("bf16", "full", "fully_sharded", "adam")
    assert (row.status, row.sec_per_it) == ("not_run", None) and "no iteration is logged" in (row.notes or "")


def test_steps_of_olmo_core_in_the_wild_are_timed_by_their_clock() -> None:
    row = only(read("olmo3_sft_olmo_core_steps.txt", **SHAPE, **BATCH), "olmo-core")
    assert row.step_times_s == pytest.approx((16.7251, 16.7466, 16.6833))
    assert (row.sec_per_it, row.tokens_per_s_per_gpu) == (pytest.approx((16.7466 + 16.6833) / 2), 7855.0)
    assert (row.devices, row.tp, row.precision, row.losses) == (None, None, None, ())
    assert "clock of the log's lines" in (row.notes or "") and row.quality == "incomplete"


def test_steps_of_olmo_cores_console_logger_are_timed(tmp_path: Path) -> None:
    stamp = "2025-02-12 22:4{0}:00.500\tn0:0\tolmo_core.train.callbacks.console_logger:90\tINFO\t"
    step = stamp + "[step={0}0/1,000,epoch=1,eta=1h]\n    train/CE loss=6.{0}\n    throughput/device/TPS=12,000\n"
    path = tmp_path / "olmo.log"
    path.write_text((WILD / "olmo_core_config.txt").read_text() + "".join(step.format(n) for n in (1, 2, 3)))
    row = only(import_file(path, Asked()), "olmo-core")
    assert (row.step_times_s, row.losses, row.tokens_per_s_per_gpu) == ((6.0, 6.0), (6.1, 6.2, 6.3), 12000.0)
    path.write_text(path.read_text().replace("device/TPS=12,000", "device/BPS=0.25"))
    assert only(import_file(path, Asked()), "olmo-core").sec_per_it == 4.0


@pytest.mark.parametrize(
    ("name", "form", "seconds", "losses"),
    [
        ("hugging_face_trainer_state.json", "hugging-face", None, (3.7141, 3.6351, 0.0996)),
        ("linchance_wandb_summary.json", "wandb", 1333.6992 / 1070, (0.6439,)),
        ("marin_wandb_summary.json", "wandb", 435440.309247063 / 197429, ()),
        ("megatron_tensorboard_scalars.json", "tensorboard", 0.13348, (10.83373, 10.85679, 10.80851, 10.79855)),
    ],
)
def test_an_export_of_a_tracker_says_all_that_it_lacks(
    name: str, form: str, seconds: float | None, losses: tuple[float, ...]
) -> None:
    (refused,) = read(name).refused
    assert "layers, hidden, heads, seq_len, vocab, mbs, gbs are not stated" in refused
    row = only(read(name, **SHAPE, **BATCH), form)
    assert (row.sec_per_it, row.losses) == (seconds if seconds is None else pytest.approx(seconds), losses)
    assert (row.tp, row.precision, row.optimizer, row.quality) == (None, None, None, "incomplete")


def test_a_step_of_the_tracker_that_may_count_what_was_tracked_gives_a_summary_no_time(tmp_path: Path) -> None:
    """A run of 1,070 steps that was tracked 22 times had a step of a minute."""
    path = tmp_path / "wandb-summary.json"
    summary = {"loss": 0.64, "_runtime": 1331.6, "_step": 21, "_wandb": {"runtime": 1331}}
    for more, seconds in (({}, None), ({"global_step": 1070}, 1331.6 / 1070), ({"iteration": 1070}, 1331.6 / 1070)):
        path.write_text(json.dumps(summary | more))
        row = only(import_file(path, Asked(given=typed_cells({**SHAPE, **BATCH}))), "wandb")
        assert (row.sec_per_it, row.losses) == (seconds, (0.64,))
    path.write_text(json.dumps({"lm loss": 2.0, "_runtime": 500.0, "_step": 100, "_wandb": {}}))
    row = only(import_file(path, Asked(given=typed_cells({**SHAPE, **BATCH}))), "wandb")
    assert row.sec_per_it == 5.0, "Megatron-LM tells the tracker its own step"


def test_a_scalar_of_tensorboard_as_csv_gives_times_by_its_clock(tmp_path: Path) -> None:
    path = tmp_path / "run-tag-loss.csv"
    path.write_text("Wall time,Step,Value\n1654943296.25,0,59.3\n1654943316.25,10,64.7\n1654943341.25,20,70.0\n")
    row = only(import_file(path, Asked(given=typed_cells({**SHAPE, **BATCH}))), "tensorboard")
    assert row.step_times_s == (2.0, 2.5) and "clock of the points" in (row.notes or "")


def test_a_blank_stays_blank_in_the_store_and_in_tables_and_is_asked_for_by_a_prediction(tmp_path: Path) -> None:
    row = only(read("auroragpt_torchtitan.txt", cluster="dgx-a100-80gb"), "torchtitan")
    with Store(tmp_path / "s.sqlite") as store:
        assert store.add_new([row]) == 1
        assert store.measurements() == [row]
    for name in ("t.csv", "t.parquet"):
        assert export_table([row], tmp_path / name) == 1
    with pytest.raises(TrimaranError, match="precision, optimizer are not stated"):
        nouns_of(row)


def test_a_store_from_before_blanks_keeps_its_rows_and_takes_them(tmp_path: Path) -> None:
    path, whole = tmp_path / "s.sqlite", only(read("tiny_llama_nanotron.txt"), "nanotron")
    with Store(tmp_path / "new.sqlite") as store:
        store.add_new([whole])
    before = sqlite3.connect(path)
    for statement in itertools.chain(*MIGRATIONS[:2]):
        before.execute(statement)
    before.execute("ATTACH ? AS new", (str(tmp_path / "new.sqlite"),))
    columns = ", ".join(f'"{name}"' for _, name, *_ in before.execute("PRAGMA main.table_info(measurement)"))
    before.execute(f"INSERT INTO main.measurement ({columns}) SELECT {columns} FROM new.measurement")
    before.execute("PRAGMA user_version = 2")
    before.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    before.commit()
    before.close()
    with Store(path) as store:
        assert store.measurements() == [whole]
        store.add_new([only(read("auroragpt_torchtitan.txt"), "torchtitan")])
        assert [run.number for run in store.runs()] == [1, 2]
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT precision FROM measurement ORDER BY id").fetchall() == [("bf16",), (None,)]
