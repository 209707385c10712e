"""Claims about what a rank that waits for ever tells when asked by SIGUSR1: real ranks, one of which never comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from trimaran.bench.watch.evidence import collect
from trimaran.bench.watch.flight import waited_in

RANK = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from trimaran.train.run.course import StopSignals
from trimaran.train.run.silence import tell_collectives

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
stop = StopSignals() if sys.argv[3] == "training" else None
dist.init_process_group("gloo", store=dist.FileStore(str(folder / "meet"), 2), rank=rank, world_size=2)
tell_collectives(folder / f"flight.{rank}.json", on_gpu=False)
dist.all_reduce(torch.ones(3))
(folder / f"ready.{rank}").touch()
while rank == 1 and not (stop and stop.seen):
    time.sleep(0.01)
if rank == 0:
    dist.all_reduce(torch.ones(5, 7))
print("was told to leave", flush=True)
time.sleep(600)
"""


def wait_for(*files: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, f"no {files}"
        time.sleep(0.02)


def test_a_rank_that_waits_in_a_collective_says_in_which_and_leaves_its_stacks(tmp_path: Path) -> None:
    ranks = []
    for rank, kind in enumerate(("trial", "training")):
        with (tmp_path / f"stdout.{rank}").open("wb") as out, (tmp_path / f"stderr.{rank}").open("wb") as err:
            command = [sys.executable, "-c", RANK, str(rank), str(tmp_path), kind]
            ranks.append(
                subprocess.Popen(
                    command, stdout=out, stderr=err, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}, cwd=tmp_path
                )
            )
    try:
        wait_for(tmp_path / "ready.0", tmp_path / "ready.1")
        time.sleep(0.3)  # rank 0 goes on into the collective in which it waits
        for process in ranks:
            process.send_signal(signal.SIGUSR1)
        wait_for(tmp_path / "flight.0.json", tmp_path / "flight.1.json")
        deadline = time.monotonic() + 60
        while "told to leave" not in (tmp_path / "stdout.1").read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    evidence = collect("a hang", tmp_path, (None, None), (1.0, 1.0), {})
    assert "rank 0 waited in gloo:all_reduce 2 of default_pg (Float 5x7; scheduled)" in evidence
    assert "rank 1 waited in nothing that PyTorch's flight recorder records" in evidence
    for rank in (0, 1):
        assert "most recent call first" in (tmp_path / f"stderr.{rank}").read_text()
    assert "told to leave" in (tmp_path / "stdout.1").read_text(), "a training is still told what the scheduler said"


def test_a_flight_record_that_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    deep, other_kind = b"[" * 100_000, b'{"entries": [{"profiling_name": 7}]}'
    for rank, content in enumerate((b"", b"\x80\x04\x95garbage", deep, other_kind)):
        (tmp_path / f"flight.{rank}.json").write_bytes(content)
        assert waited_in(tmp_path, rank) is None
    assert waited_in(tmp_path, 9) is None
    hostile = '{"entries": [{"profiling_name": "\\u001b[2J", "state": "started", "retired": false, "is_p2p": true, '
    (tmp_path / "flight.0.json").write_text(hostile + '"collective_seq_id": 1, "p2p_seq_id": 4}]}')
    assert "\x1b" not in collect("a hang", tmp_path, (None,), (1.0,), {})
    assert "[2J 4 (; started)" in collect("a hang", tmp_path, (None,), (1.0,), {})
