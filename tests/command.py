"""The trimaran command and a tiny study for it, as the tests of the command line use them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TRIMARAN = str(Path(sys.executable).with_name("trimaran"))


def run(*arguments: str, cwd: Path | None = None, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    command = [TRIMARAN, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False, timeout=timeout_s)


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
