"""DeepSpeed's dump of its configuration, as its releases since 2022 print it."""

from __future__ import annotations

from pathlib import Path

import pytest

from test_import_forms import HEADER, only, read

STAMP = "[2025-02-20 02:13:56,591] [INFO] "
# the lines of the dump that tell, and the JSON below them, which accelerate lets say `inf`
DUMP = f"""{STAMP}[logging.py:128:log_dist] [Rank 0] DeepSpeed Basic Optimizer = AdamW
{STAMP}[config.py:1003:print]   optimizer_name ............... None
{STAMP}[config.py:1003:print]   steps_per_print .............. inf
{STAMP}[config.py:1003:print]   train_batch_size ............. 64
{STAMP}[config.py:1003:print]   train_micro_batch_size_per_gpu  4
{STAMP}[config.py:1003:print]   world_size ................... 4
{STAMP}[config.py:1003:print]   zero_optimization_stage ...... 3
{STAMP}[config.py:989:print_user_config]   json = {{
    "train_batch_size": 64, 
    "zero_optimization": {{
        "stage": 3, 
        "offload_optimizer": {{
            "device": "OPTIMIZER", 
            "nvme_path": null
        }}, 
        "offload_param": {{
            "device": "WEIGHTS", 
            "nvme_path": null
        }}
    }}, 
    "steps_per_print": inf, 
    "bf16": {{
        "enabled": true
    }}
}}
"""  # noqa: W291
STEPS = "{'train_runtime': 20.0, 'train_steps_per_second': 0.5}\n"


@pytest.mark.parametrize("host", ["", "worker-0: "])
def test_a_dump_states_precision_and_optimizer_of_today(tmp_path: Path, host: str) -> None:
    """The JSON below it was not read since its line names another function: such a row had neither."""
    dump = "".join(
        host + line + "\n" for line in DUMP.replace("OPTIMIZER", "none").replace("WEIGHTS", "none").split("\n")
    )
    row = only(read(tmp_path, HEADER.format(10) + dump + STEPS), "hugging-face")
    assert (row.precision, row.optimizer, row.zero_stage, row.dp, row.offload) == ("bf16", "adam", 3, 4, None)
    assert "not stated: recompute" in (row.notes or "")


@pytest.mark.parametrize(("optimizer", "weights", "offload"), [("cpu", "none", "optimizer"), ("cpu", "cpu", "weights")])
def test_what_deepspeed_keeps_on_the_host_is_the_rows(
    tmp_path: Path, optimizer: str, weights: str, offload: str
) -> None:
    """Its times were those of a run that keeps all on its devices."""
    dump = DUMP.replace("OPTIMIZER", optimizer).replace("WEIGHTS", weights)
    assert only(read(tmp_path, HEADER.format(10) + dump + STEPS), "hugging-face").offload == offload


def test_what_deepspeed_keeps_on_a_disk_is_refused_by_its_word(tmp_path: Path) -> None:
    dump = DUMP.replace("OPTIMIZER", "nvme").replace("WEIGHTS", "none")
    found = read(tmp_path, HEADER.format(10) + dump + STEPS)
    assert found.rows == () and "offload is 'nvme'" in found.refused[0]


def dump(said: str) -> str:
    """The dump with one more line."""
    text = DUMP.replace("OPTIMIZER", "none").replace("WEIGHTS", "none")
    line = f"{STAMP}[config.py:1003:print]   {said}\n"
    return HEADER.format(10) + text.replace(f"{STAMP}[config.py:989", f"{line}{STAMP}[config.py:989") + STEPS


@pytest.mark.parametrize(("size", "shard"), [("-1", None), ("2", 2)])
def test_replicas_of_deepspeed_that_share_in_groups_are_stored_so(tmp_path: Path, size: str, shard: int | None) -> None:
    """Under MiCS they were stored as sharing among all."""
    row = only(read(tmp_path, dump(f"mics_shard_size .............. {size}")), "hugging-face")
    assert (row.dp, row.zero_stage, row.dp_kind, row.shard) == (4, 3, "fully_sharded", shard)


@pytest.mark.parametrize("said", ["zero_hpz_partition_size=2", "zero_quantized_gradients=True", ""])
def test_zero_plus_plus_is_refused_by_its_word(tmp_path: Path, said: str) -> None:
    """Its times were those of ZeRO-3."""
    plain = "zero_config .................. stage=3 contiguous_gradients=True reduce_scatter=True "
    plain += "model_persistence_threshold=9223372036854775807 param_persistence_threshold=100000 legacy_stage1=False "
    plain += "gather_16bit_weights_on_model_save=False zero_hpz_partition_size=1 zero_quantized_gradients=False"
    name = said.partition("=")[0]
    text = " ".join(said if name and word.startswith(name) else word for word in plain.split(" "))
    found = read(tmp_path, dump(text))
    if said:
        assert found.rows == () and f"dp_kind is '{said}'" in found.refused[0]
    else:
        assert only(found, "hugging-face").dp_kind == "fully_sharded"


@pytest.mark.parametrize("world", ["4", "4.0"])
def test_ranks_of_deepspeed_that_share_a_sequence_are_stored_so(tmp_path: Path, world: str) -> None:
    """A run on 8 devices was stored as one on 4. The engine divides its world by them, as Python divides."""
    text = dump("zero_enabled ................. True").replace(
        '"steps_per', '"sequence_parallel_size": 2,\n    "steps_per'
    )
    text = text.replace("world_size ................... 4", f"world_size ................... {world}")
    row = only(read(tmp_path, text), "hugging-face")
    assert (row.dp, row.cp, row.cp_kind, row.tp, row.pp, row.devices) == (4, 2, "ulysses", 1, 1, 8)


def test_ranks_of_deepspeed_that_share_tensors_are_stored_so(tmp_path: Path) -> None:
    """TP was stored as 1; whether the engine's world has these ranks in it, its lines do not say."""
    text = dump("zero_enabled ................. True")
    text = text.replace('"steps_per', '"tensor_parallel": {\n        "autotp_size": 2\n    },\n    "steps_per')
    row = only(read(tmp_path, text), "hugging-face")
    assert (row.tp, row.pp, row.devices) == (2, None, None)


def test_a_device_without_memory_of_its_own_leaves_its_row_without_memory(tmp_path: Path) -> None:
    """On CPUs the engine prints MaxMemAllocated=0.0GB, for which the row was refused."""
    timer = "[INFO] [timer.py:260:stop] epoch=0/micro_step={0}/global_step={0}, RunningAvgSamplesPerSec=32.1, "
    timer += "CurrSamplesPerSec=32.0, MemAllocated=0.0GB, MaxMemAllocated=0.0GB\n"
    row = only(read(tmp_path, timer.format(10) + timer.format(20)), "deepspeed")
    assert (row.sec_per_it, row.mem_gib, row.mem_gib_per_rank) == (2.0, None, ())
