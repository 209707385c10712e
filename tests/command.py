"""The trimaran command and a tiny study for it, as the tests of the command line use them."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

TRIMARAN = str(Path(sys.executable).with_name("trimaran"))
_ASK_AGAIN_S = 0.005


@dataclass(frozen=True)
class Ended:
    """How a call ended: exit status, what it printed, its processor time and its largest resident memory."""

    status: int
    out: str
    err: str
    cpu_s: float
    peak_gib: float


class Commands:
    """Calls of the command, each forked from a process that has read its modules (`command_server.py`)."""

    def __init__(self) -> None:
        server = Path(__file__).with_name("command_server.py")
        self._server = subprocess.Popen([sys.executable, "-P", str(server)], stdin=subprocess.PIPE)
        atexit.register(self._server.communicate)  # which ends what it serves, and what of it still runs

    def call(self, arguments: tuple[str, ...], cwd: Path, timeout_s: float) -> Ended:
        """One call, with this process's environment; what lasts longer is killed, and TimeoutExpired raised."""
        with tempfile.TemporaryDirectory() as name:
            folder, ended = Path(name), Path(name) / "ended"
            asked = {"folder": name, "cwd": str(cwd), "arguments": list(arguments), "environment": dict(os.environ)}
            assert self._server.stdin is not None
            self._server.stdin.write(json.dumps(asked).encode() + b"\n")
            self._server.stdin.flush()
            until = time.monotonic() + timeout_s
            while not ended.exists():
                assert self._server.poll() is None, "the process that forks has ended"
                if time.monotonic() > until:
                    os.killpg(int((folder / "pid").read_text()), signal.SIGKILL)
                    raise subprocess.TimeoutExpired([TRIMARAN, *arguments], timeout_s)
                time.sleep(_ASK_AGAIN_S)
            out, err = ((folder / name).read_text("utf-8", "backslashreplace") for name in ("out", "err"))
            return Ended(out=out, err=err, **json.loads(ended.read_text()))


@functools.cache
def commands() -> Commands:
    """Those of this process."""
    return Commands()


def run(*arguments: str, cwd: Path | None = None, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as `subprocess.run` tells of one."""
    ended = commands().call(arguments, cwd or Path.cwd(), timeout_s)
    return subprocess.CompletedProcess([TRIMARAN, *arguments], ended.status, ended.out, ended.err)


def tiny_recipe(folder: Path, layouts: list[str] | None = None, data: str = 'paths = ["text.txt"]') -> Path:
    """A recipe of a tiny model on a stated two-slot machine, its text beside it."""
    (folder / "text.txt").write_text("all work and no play makes jack a dull boy\n" * 400)
    (folder / "machine.toml").write_text(MACHINE)
    quoted = ", ".join(f'"{layout}"' for layout in layouts or ["dp1,mbs4"])
    path = folder / "tiny.toml"
    path.write_text(TINY.format(layouts=quoted, data=data))
    return path


MACHINE = """
nodes = 1
devices_per_node = 2
cores_per_node = 2
host_mem_gib = 8
[device]
kind = "cpu"
mem_gib = 4
mem_bandwidth_gb_s = 10
cores = 1
[device.peak_tflops]
fp32 = 0.1
bf16 = 0.2
[intra]
bandwidth_gbps = 20
latency_us = 100
[inter]
bandwidth_gbps = 20
latency_us = 100
"""

TINY = """
name = "tiny"
stack = "trimaran"
cluster = "machine.toml"
[model]
layers = 2
hidden = 32
heads = 2
vocab = 257
max_positions = 32
[workload]
seq_len = 32
global_batch = 4
[data]
{data}
[sweep]
layouts = [{layouts}]
min_trials = 4
max_trials = 4
steps = 3
warmup_steps = 1
[train]
steps = 12
learning_rate = 1e-2
"""
