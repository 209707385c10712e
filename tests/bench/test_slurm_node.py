"""What runs on a node of Slurm writes down how its rank ended, whatever the node lacks: room, an address, scontrol."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from small_disk import mounted
from trimaran.bench.launch.slurm import node
from trimaran.protocol import rank_process
from trimaran.protocol.files import RunFile

# As a step of one task on one node that no scontrol knows.
TASK = {
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURMD_NODENAME": "n7", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "PATH": "",
}  # fmt: skip
FILLS_THE_DISK = """
import sys
with open("junk", "wb", buffering=0) as junk:
    try:
        while True:
            junk.write(bytes(4096))
    except OSError:
        sys.exit(3)
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with mounted(tmp_path / "disk", "256k") as disk:
        yield disk


def run_node(
    folder: Path, program: str, within: tuple[str, ...] = (), environment: dict[str, str] | None = None
) -> dict[str, object]:
    """Have the node's program run a rank, a Python program, to its end; what it wrote of that."""
    (folder / "alive").touch()
    launch = {
        "command": [sys.executable, "-c", program], "environment": {}, "ranks": 1, "ranks_of_tasks": [0],
        "slots": None, "out_dir": str(folder), "stdout": RunFile.STDOUT, "stderr": RunFile.STDERR,
        "rendezvous_fd": "FD", "rank_process": rank_process.__file__, "memory_gib": None,
        "lifeline": str(folder / "alive"),
    }  # fmt: skip
    (folder / "launch.json").write_text(json.dumps(launch))
    command = [*within, sys.executable, "-I", "-S", node.__file__, "rank", str(folder / "launch.json")]
    subprocess.run(command, env=TASK if environment is None else environment, timeout=60, check=False)
    ending: dict[str, object] = json.loads(node.exit_file(folder, 0).read_text())
    return ending


def test_a_rank_that_has_filled_the_shared_disk_is_known_to_have_ended(disk: Path) -> None:
    """Its ending found no room, so that it was taken for lost with its node, and run again three times."""
    assert run_node(disk, FILLS_THE_DISK) == {"code": 3, "oom": False, "asked_to_end": False}
    assert os.statvfs(disk).f_bavail == 0


def test_a_node_without_an_ipv4_address_says_so(tmp_path: Path) -> None:
    nowhere = ("/usr/bin/unshare", "--uts", "/bin/sh", "-c", '/bin/hostname nowhere.invalid && exec "$@"', "sh")
    if subprocess.run([*nowhere, "/bin/true"], check=False, capture_output=True).returncode:
        pytest.skip("naming a host is not allowed here")
    alone = {name: value for name, value in TASK.items() if name != "SLURM_LAUNCH_NODE_IPADDR"}
    assert run_node(tmp_path, "", nowhere, alone)["code"] == 1
    said = RunFile.STDERR.of(tmp_path, 0).read_text()
    assert said.startswith("node n7: ranks meet at an IPv4 address") and "NodeAddr of slurm.conf" in said


def test_a_node_that_calls_itself_by_its_loopback_is_met_where_srun_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container, which has no scontrol: ranks of other nodes then waited at a loopback of their own."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert node.own_address() == "127.0.0.1"


def test_a_file_system_that_cannot_say_for_a_moment_ends_no_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = [OSError(errno.ESTALE, "Stale file handle"), OSError(errno.EIO, "Input/output error"), FileNotFoundError()]
    seen = list(looks)

    alive, look = str(tmp_path / "alive"), os.stat

    def stat(path: str | Path, **options: Any) -> os.stat_result:
        if str(path) != alive:
            return look(path, **options)
        raise seen.pop(0)

    monkeypatch.setattr(node.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(os, "stat", stat)
    assert node.hold(alive) == 0
    assert seen == [], "the last look found it removed"
