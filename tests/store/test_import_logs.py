"""Logs of other trainers become rows: set-up, step times, losses, memory, and how the run ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trimaran.layout.notation import parse_layout
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.model import Model
from trimaran.nouns.workload import Workload
from trimaran.protocol.job import TrainJob
from trimaran.recipe.train_settings import TrainSettings
from trimaran.store.importers.formats import Asked, Imported, import_file
from trimaran.store.importers.profile import typed_cells

LOGS = Path(__file__).parent / "logs"
DEEPSPEED = (LOGS / "megatron_deepspeed.txt").read_text()
MEGATRON_LM = (LOGS / "megatron_lm.txt").read_text()
TITAN = (LOGS / "torchtitan.txt").read_text()
NANOTRON = (LOGS / "nanotron.txt").read_text()
LLAMA = {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 128256}


def read(tmp_path: Path, text: str, **given: object) -> Imported:
    path = tmp_path / "train.log"
    path.write_text(text)
    return import_file(path, Asked(given=typed_cells(given)))  # type: ignore[arg-type]


def only(found: Imported) -> Measurement:
    assert found.refused == ()
    (row,) = found.rows
    return row


def test_a_log_of_megatron_deepspeed_gives_its_row(tmp_path: Path) -> None:
    found = read(tmp_path, DEEPSPEED, cluster="jean-zay-a100-80gb", devices_per_node=8)
    row = only(found)
    assert (found.format, row.stack, row.nodes, row.devices) == ("megatron", "megatron-deepspeed", 20, 160)
    assert (row.layers, row.hidden, row.heads, row.vocab, row.seq_len) == (80, 14400, 96, 250880, 2048)
    assert (row.dp, row.tp, row.pp, row.vpp, row.mbs, row.gbs, row.zero_stage) == (2, 8, 10, 1, 1, 2048, 1)
    assert (row.precision, row.recompute) == ("bf16", "full")
    assert row.step_times_s == (455.02, 430.21, 431.01)
    assert row.sec_per_it == pytest.approx(430.61)
    assert row.losses == (64.0, 63.73876)
    assert row.mem_gib_per_rank == (45.0, 50.0) and row.mem_gib == 50.0
    assert row.flops_formula == "bs_old_96BsLh2", "the one calculator that gives 97.07 TFLOPs"
    assert row.quality == "ok"


def test_a_log_of_megatron_lm_gives_a_row_for_each_global_batch(tmp_path: Path) -> None:
    first, second = read(tmp_path, MEGATRON_LM).rows
    assert (first.gbs, second.gbs) == (64, 128)
    assert (first.stack, first.dp, first.tp, first.pp, first.vpp) == ("megatron", 2, 4, 2, 4)
    assert (first.kv_heads, first.vocab, first.zero_stage, first.recompute) == (8, 128256, 1, "selective")
    assert first.sec_per_it == pytest.approx(5.4707)
    assert (second.sec_per_it, second.tflops) == (pytest.approx(10.8299), 241.0)


def test_a_log_of_torchtitan_gives_its_row_with_colours_and_several_ranks(tmp_path: Path) -> None:
    row = only(read(tmp_path, TITAN, **LLAMA, precision="bf16"))
    assert (row.stack, row.dp, row.tp, row.pp, row.devices) == ("torchtitan", 4, 2, 1, 8)
    assert (row.dp_kind, row.zero_stage, row.gbs, row.mbs, row.seq_len) == ("fully_sharded", 3, 8, 2, 2048)
    # a step takes 8 x 2048 tokens over 8 devices: 2048 tokens of each
    assert row.step_times_s == pytest.approx((2048 / 500, 1.0, 1.024))
    assert row.sec_per_it == pytest.approx(1.012)
    assert (row.mem_gib, row.mem_gib_per_rank) == (66.91, (60.10, 66.91))
    assert row.losses == (12.2721, 9.62585, 7.62585)


def test_without_batch_and_degrees_torchtitans_clock_gives_the_times(tmp_path: Path) -> None:
    bare = "\n".join(line for line in TITAN.splitlines() if "step:" in line)
    row = only(read(tmp_path, bare, **LLAMA, seq_len=2048, mbs=2, gbs=8))
    assert row.step_times_s == pytest.approx((1.024, 0.976))
    assert "clock of the log" in (row.notes or "")


def test_a_log_of_nanotron_gives_its_row(tmp_path: Path) -> None:
    row = only(read(tmp_path, NANOTRON))
    assert (row.dp, row.tp, row.pp, row.devices, row.layers, row.mbs, row.gbs) == (2, 2, 2, 8, 4, 2, 20)
    assert row.step_times_s == (1.5, 0.412) and row.sec_per_it == 0.412
    assert row.losses == (10.6, 10.5)
    assert row.mem_gib == pytest.approx(547e6 / 2**30)
    assert "three digits" in (row.notes or "")


def test_trimarans_own_log_and_job_give_the_row_of_the_training(tmp_path: Path) -> None:
    model = Model(layers=2, hidden=32, heads=2, vocab=257, max_positions=32)
    job = TrainJob(
        workload=Workload(model=model, seq_len=32, global_batch=4),
        layout=parse_layout("dp2,tp1,pp1,mbs1"),
        stage_split=(2,),
        train=TrainSettings(),
        data_dir="data",
        out_dir=".",
        steps=3,
    )
    (tmp_path / "job.json").write_text(job.model_dump_json())
    fields = {"global_batch": 4, "tflops": 0.1, "peak_mem_gib": 0.5}
    lines = [
        {"iteration": n, "sec_per_it": t, "lm_loss": loss, **fields}
        for n, t, loss in ((1, 0.9, 5.5), (2, 0.2, None), (3, 0.1, 5.0))
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"iteration": 4, "sec')
    row = only(import_file(path, Asked()))
    assert (row.stack, row.dp, row.devices, row.mbs, row.gbs, row.hidden) == ("trimaran", 2, 2, 1, 4, 32)
    assert (row.step_times_s, row.losses, row.mem_gib) == ((0.9, 0.2, 0.1), (5.5, 5.0), 0.5)
    assert row.sec_per_it == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("last", "status"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "oom"),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", "hang"),
        ("Signal 11 (SIGSEGV) received by PID 7", "crash"),
        ("srun: error: n2: task 3: Killed", "crash"),
        ("srun: error: n2: tasks 3-7: Exited with exit code 1", "fail"),
        ("torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268", "fail"),
        ("srun: error: Node failure on n2\nWatchdog caught collective operation timeout", "fail"),
        ("Traceback (most recent call last):\n  File train.py\nValueError: bad shape", "fail"),
    ],
)
def test_how_a_run_ended_is_read_behind_its_last_step(tmp_path: Path, last: str, status: str) -> None:
    row = only(read(tmp_path, DEEPSPEED + "rank 7:\n" + last + "\n"))
    assert row.status == status and last in (row.evidence or "")
    assert row.sec_per_it == pytest.approx(430.61), "what was measured before stays"
    recovered = only(read(tmp_path, last + "\n" + DEEPSPEED))
    assert (recovered.status, recovered.evidence) == ("ok", None)


@pytest.mark.parametrize(("text", "given"), [(DEEPSPEED, {}), (TITAN, LLAMA), (NANOTRON, {"gbs": 20})])
def test_a_run_out_of_memory_before_its_first_step_is_a_row_too(
    tmp_path: Path, text: str, given: dict[str, object]
) -> None:
    start = [line for line in text.splitlines() if "step:" not in line and "iteration" not in line]
    row = only(read(tmp_path, "\n".join([*start, "x" * 9000, "torch.OutOfMemoryError: CUDA out of memory."]), **given))
    assert (row.status, row.sec_per_it, row.step_times_s) == ("oom", None, ())
    assert (row.evidence or "").endswith("out of memory.") and len(row.evidence or "") < 2000


def test_a_log_that_was_cut_off_by_a_dead_node_gives_what_is_whole(tmp_path: Path) -> None:
    whole, (path, last) = only(read(tmp_path, DEEPSPEED)), (tmp_path / "train.log", "TFLOPs: 96.89")
    assert last in DEEPSPEED
    for end in range(DEEPSPEED.rindex(" iteration ") + 30, DEEPSPEED.index(last) + len(last), 7):
        row = only(read(tmp_path, DEEPSPEED[:end]))
        assert (row.gbs, row.status, row.sec_per_it in (430.21, 430.61)) == (2048, "ok", True), DEEPSPEED[:end][-60:]
    path.write_bytes(DEEPSPEED.encode() + bytes(200_000) + b"\nslurmstepd: *** STEP 1.0 CANCELLED DUE TO NODE FAILURE")
    row = only(import_file(path, Asked()))
    assert (row.status, row.sec_per_it) == ("fail", whole.sec_per_it)


def test_a_run_that_its_time_limit_ended_is_as_good_as_any(tmp_path: Path) -> None:
    row = only(read(tmp_path, DEEPSPEED + "slurmstepd: *** JOB 7 ON n1 CANCELLED AT 2022-02-25 DUE TO TIME LIMIT"))
    assert row.status == "ok" and "time limit ended the run" in (row.notes or "")


def test_a_time_over_several_iterations_is_said_to_be_their_mean(tmp_path: Path) -> None:
    first = read(tmp_path, MEGATRON_LM).rows[0]
    assert "the mean of 10 iterations" in (first.notes or "")


def test_what_the_log_states_wins_over_the_user_and_the_user_over_a_guess(tmp_path: Path) -> None:
    row = only(read(tmp_path, DEEPSPEED, tp=4, stack="megatron"))
    assert (row.tp, row.stack) == (8, "megatron")


def test_a_log_that_lacks_a_column_says_which(tmp_path: Path) -> None:
    found = read(tmp_path, DEEPSPEED.replace("micro_batch_size", "macro_batch_size"))
    assert not found.rows and "mbs is not stated" in found.refused[0] and "--set mbs=" in found.refused[0]
