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
from pathlib import Path

TRIMARAN = str(Path(sys.executable).with_name("trimaran"))
_ASK_AGAIN_S = 0.005


def run(*arguments: str, cwd: Path | None = None, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, forked from one that has read its modules (`command_server.py`)."""
    return _server().run(arguments, cwd or Path.cwd(), timeout_s)


class CommandServer:
    """What `command_server.py` forks from."""

    def __init__(self) -> None:
        here = Path(__file__).with_name("command_server.py")
        self._process = subprocess.Popen([sys.executable, "-P", str(here)], stdin=subprocess.PIPE, cwd=here.parent)
        atexit.register(self._process.kill)

    def run(self, arguments: tuple[str, ...], cwd: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """One call, with this process's environment; raises subprocess.TimeoutExpired as subprocess.run does."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            request = {
                "folder": name, "cwd": str(cwd), "arguments": list(arguments), "environment": dict(os.environ)
            }  # fmt: skip
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            until = time.monotonic() + timeout_s
            while not (folder / "status").exists():
                assert self._process.poll() is None, "the process that forks has ended"
                if time.monotonic() > until:
                    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
                    raise subprocess.TimeoutExpired([TRIMARAN, *arguments], timeout_s)
                time.sleep(_ASK_AGAIN_S)
            out, err = ((folder / stream).read_text(encoding="utf-8") for stream in ("out", "err"))
            status = int((folder / "status").read_text())
        return subprocess.CompletedProcess([TRIMARAN, *arguments], status, out, err)


@functools.cache
def _server() -> CommandServer:
    return CommandServer()


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
