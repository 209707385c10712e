"""The rank program, run as it is run for real: as processes."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from tests.ports import free_port
from torch.distributed import TCPStore

from shapes import MIXTURE, SMALL
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.workload import Workload
from trimaran.protocol.job import TrainJob, read_job
from trimaran.recipe.train_settings import TrainSettings
from trimaran.train.text.tokens import TokenFile, TokenIndex

FULL = Workload(model=MIXTURE, seq_len=16, global_batch=24, capacity_factor=1.25)
DROPPING = Workload(model=SMALL.model_copy(update={"dropout": 0.1}), seq_len=16, global_batch=24)

BLOOM_FIELDS = (
    "iteration",
    "consumed samples",
    "consumed tokens",
    "elapsed time per iteration (s)",
    "learning rate",
    "global batch size",
    "lm loss",
    "loss scale",
    "grad norm",
    "num zeros",
    "number of skipped iterations",
    "number of nan iterations",
    "samples per second",
    "TFLOPs",
)


def run_ranks(
    job: TrainJob, world_size: int, address_space_bytes: int | None = None
) -> list[subprocess.CompletedProcess[str]]:
    path = Path(job.out_dir) / "job.json"
    path.write_text(job.model_dump_json())
    # as the harness does it, the port is held by a socket that rank 0 inherits
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]

    def limit() -> None:
        if address_space_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes, address_space_bytes))

    processes = []
    for rank in range(world_size):
        env = dict(
            os.environ,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            GLOO_SOCKET_IFNAME="lo",
            OMP_NUM_THREADS="1",
        )
        if rank == 0:
            env["TRIMARAN_RENDEZVOUS_FD"] = str(held.fileno())
        command = [sys.executable, "-m", "trimaran.train.process.worker", str(path)]
        process = subprocess.Popen(
            command,
            env=env,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limit,  # noqa: PLW1509
            pass_fds=(held.fileno(),),
        )
        processes.append(process)
    held.close()
    errors = [process.communicate(timeout=120)[1] for process in processes]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, stderr=error)
        for process, error in zip(processes, errors, strict=True)
    ]


def test_two_ranks_leave_a_log_a_result_and_signs_of_life(make_job: Callable[..., TrainJob]) -> None:
    job = make_job("dp2,mbs12,fp16", steps=3).model_copy(update={"peak_tflops": 0.1})
    assert [r.returncode for r in run_ranks(job, 2)] == [0, 0]
    out = Path(job.out_dir)

    lines = (out / "log.txt").read_text().splitlines()
    assert len(lines) == 3
    fields = [re.match(r" ?([^:/]+?)(:| +\d+/)", part).group(1) for part in lines[1].split("|")[:-1]]  # type: ignore[union-attr]
    assert tuple(fields[: len(BLOOM_FIELDS)]) == BLOOM_FIELDS
    assert fields[len(BLOOM_FIELDS) :] == ["tokens per second", "MFU", "peak memory (GiB)"]
    assert "| loss scale: 2048.0 |" in lines[1] and "| number of skipped iterations:   0 |" in lines[1]

    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records] == [1, 2, 3]
    assert records[2]["consumed_samples"] == 72
    assert records[2]["consumed_tokens"] == 72 * 16
    assert 0 < records[2]["mfu"] < 1

    result = json.loads((out / "result.json").read_text())
    assert result["status"] == "ok"
    assert result["losses"] == [record["lm_loss"] for record in records]
    assert len(result["sec_per_it"]) == result["steps"] == 3
    assert result["parameters"] == SMALL.parameters
    for rank in range(2):
        assert (out / f"heartbeat.{rank}").exists()
        memory = json.loads((out / f"memory.{rank}.json").read_text())
        assert result["mem_gib_per_rank"][rank] == pytest.approx(memory["peak"])
        assert memory["peak"] > memory["baseline"] > 0


@pytest.mark.parametrize("layout", ["dp2,mbs12", "tp2,mbs24"])
def test_tokens_of_another_tokenizer_are_told_by_number(
    make_job: Callable[..., TrainJob], tmp_path: Path, layout: str
) -> None:
    """Token files of Megatron-LM hold what their own tokenizer made; under TP such a token gave an infinite loss."""
    (tmp_path / "tokens.bin").write_bytes(np.full(2_000, SMALL.vocab, "<u2").tobytes())
    file = TokenFile(name=str(tmp_path / "tokens.bin"), dtype="uint16", tokens=2_000)
    index = TokenIndex(
        files=(file,), vocab=257, end_of_document=256, tokenizer="tokenizer.json", documents=1, text_bytes=0
    )
    (tmp_path / "index.json").write_text(index.model_dump_json())
    job = make_job(layout, steps=1).model_copy(update={"data_dir": str(tmp_path)})
    said = f"trimaran: data: the text holds token {SMALL.vocab}, model.vocab {SMALL.vocab} ends at {SMALL.vocab - 1}: "
    for run in run_ranks(job, 2):
        assert run.returncode == 2 and run.stderr.startswith(said) and run.stderr.count("\n") == 1


def test_validation_is_in_log_and_result(make_job: Callable[..., TrainJob]) -> None:
    job = make_job("dp2,mbs12", steps=5, validation=0.1, eval_every=2, eval_steps=2)
    assert [r.returncode for r in run_ranks(job, 2)] == [0, 0]
    out = Path(job.out_dir)
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    validated = {r["iteration"]: r["validation_loss"] for r in records if r["validation_loss"] is not None}
    assert list(validated) == [2, 4, 5]
    assert 4 < validated[5] < validated[2] < 6
    assert records[4]["validation_perplexity"] == pytest.approx(math.exp(validated[5]))
    figures = json.loads((out / "result.json").read_text())["validations"]
    assert {each["step"]: each["loss"] for each in figures} == validated
    assert f"validation loss: {validated[4]:.6E} |" in (out / "log.txt").read_text().splitlines()[3]


@pytest.mark.parametrize(
    ("layout", "world_size", "changes", "message"),
    [
        ("dp2,mbs12", 1, {}, "needs 2 ranks, but WORLD_SIZE is 1"),
        ("dp1,mbs24", 1, {"data_dir": "/nowhere"}, "data_dir /nowhere: index.json cannot be read"),
        ("dp1,mbs24", 1, {"workload": DROPPING}, "model.dropout is 0.1, and trimaran trains without: set it to 0"),
        ("dp1,mbs24", 1, {"workload": FULL}, "workload.capacity_factor is 1.25, and trimaran drops no token: leave it"),
        (
            "dp1,mbs24",
            1,
            {"train": TrainSettings(steps=20, validation=0.01, eval_every=9, eval_steps=9999)},
            "train.eval_steps 9999 x global_batch 24 = 239976 samples are more than",
        ),
        ("dp1,mbs24", 1, {"device": "cuda"}, "device cuda is asked for"),
        ("dp1,mbs7", 1, {}, "global batch 24 is not a multiple of DP 1 x micro-batch 7 = 7"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_mistakes_are_told_in_one_line_and_leave_with_status_2(
    make_job: Callable[..., TrainJob], layout: str, world_size: int, changes: dict[str, object], message: str
) -> None:
    (run,) = run_ranks(make_job(layout).model_copy(update=changes), world_size)
    assert run.returncode == 2
    assert message in run.stderr
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe{", b"{}", b"[" * 100_000], ids=["nothing", "bytes", "object", "deep"]
)
def test_a_job_that_cannot_be_read_is_a_mistake_told_in_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_bytes(content)
    with pytest.raises(TrimaranError, match=r"^job .*job\.json: [^\n]+$"):
        read_job(TrainJob, path)


def test_out_of_memory_has_its_own_status_and_leaves_a_note(make_job: Callable[..., TrainJob]) -> None:
    model = SMALL.model_copy(update={"ffn_hidden": 48 * 1_000_000})
    job = make_job("dp1,mbs24", model=model)
    (run,) = run_ranks(job, 1, address_space_bytes=12 << 30)
    assert run.returncode == 41, run.stderr
    assert json.loads((Path(job.out_dir) / "error.0.json").read_text())["kind"] == "oom"
    assert not (Path(job.out_dir) / "result.json").exists()


@pytest.mark.parametrize("whose", ["True", "False"])
def test_ranks_of_torchrun_meet_in_its_store_or_where_it_has_none_at_one_of_their_own(
    monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """Behind etcd, or where TORCH_DISABLE_SHARE_RDZV_TCP_STORE is set, nobody listened and all ranks waited."""
    from trimaran.train.run import meeting

    monkeypatch.setattr(meeting, "RENDEZVOUS_TIMEOUT", timedelta(seconds=20))
    port = free_port()
    agents = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if whose == "True" else None
    stated = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    stated |= {"TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": whose}
    for name, value in stated.items():
        monkeypatch.setenv(name, value)
    store = meeting.joined_store(0, 1)
    store.set("job", "a")
    assert store.get("job") == b"a"
    if agents is not None:
        assert agents.get("trimaran/1/job") == b"a"
