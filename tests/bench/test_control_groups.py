"""What the kernel's control groups say of this process: their limits, however deep, and whom it killed in them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from trial_helpers import fake_worker
from trimaran.bench.launch.cgroup import memory_group
from trimaran.bench.launch.contract import Launch
from trimaran.bench.launch.held_memory import kernel_oom_kills
from trimaran.bench.launch.local import LocalLauncher
from trimaran.protocol import control_groups, host


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("inside", ["job_1/step_0", ""], ids=["of a job", "of a container"])
def test_the_tightest_limit_of_a_process_s_groups_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: int, inside: str
) -> None:
    """A job of Slurm's, or a service, is some groups below the root, and the root has no limit."""
    lines, groups = "0::/{0}\n" if version == 2 else "3:cpu,cpuacct:/{0}\n4:memory:/{0}\n", tmp_path / "groups"
    groups.write_text(lines.format(inside))
    monkeypatch.setattr(control_groups, "_ROOT", tmp_path)
    monkeypatch.setattr(control_groups, "_OWN", groups)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))

    def limit(folder: str, memory: int, cores: float) -> None:
        for controller in ("cpu", "memory"):
            place = tmp_path / ("" if version == 2 else controller) / folder
            place.mkdir(parents=True, exist_ok=True)
            if version == 2:
                (place / "cpu.max").write_text(f"{int(cores * 1e5)} 100000\n")
                (place / "memory.max").write_text(f"{memory}\n")
            elif controller == "cpu":
                (place / "cpu.cfs_quota_us").write_text(f"{int(cores * 1e5)}\n")
                (place / "cpu.cfs_period_us").write_text("100000\n")
            else:
                (place / "memory.limit_in_bytes").write_text(f"{memory}\n")

    assert (host.usable_cores(), host.memory_gib() * 2**30) == (
        64,
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )
    limit(inside, 3 << 20, 6.5)
    assert (host.usable_cores(), host.memory_gib() * 2**30) == (6, 3 << 20)
    limit(str(Path(inside).parent) if inside else "", 2 << 20, 0.5)
    assert (host.usable_cores(), host.memory_gib() * 2**30) == (1, 2 << 20)


def test_a_process_that_the_kernel_kills_elsewhere_is_no_rank_s_lack_of_memory(tmp_path: Path) -> None:
    """A rank that somebody killed meanwhile was said to be out of memory, since the whole machine's kills counted."""
    group = memory_group(0.05)
    if group is None or control_groups.oom_kills() is None:
        pytest.skip("needs the right to make control groups, and a kernel that counts whom it kills in them")
    launch = Launch((*fake_worker("silent"), str(tmp_path / "job.json")), 1, tmp_path)
    (tmp_path / "job.json").write_text(f'{{"out_dir": "{tmp_path}", "steps": 3}}')
    counted, of_machine = kernel_oom_kills(), control_groups.oom_kills_of(Path("/proc/vmstat"))
    with closing(LocalLauncher()) as launcher:
        ranks = launcher.start(launch)
        eat = f"open({str(group.processes_file)!r}, 'w').write('0'); b = bytearray(1 << 28)"
        with closing(group):
            assert subprocess.run([sys.executable, "-c", eat], check=False).returncode == -signal.SIGKILL
        os.kill(ranks.process_ids()[0], signal.SIGKILL)
        ranks.processes[0].wait()
        killed = control_groups.oom_kills_of(Path("/proc/vmstat"))
        assert killed is not None and of_machine is not None and killed > of_machine
        assert kernel_oom_kills() == counted and not ranks.over_memory()
        ranks.kill()


# Takes as many bytes as each line of standard input says.
EATER = """
import sys
hoard = []
for line in sys.stdin:
    hoard.append(bytearray(b"x" * int(line)))
    print("taken", flush=True)
"""
# In a group of its own: a child takes all but 1% of what the group may hold, and this process tells what it sees of it.
FILLED = """
import subprocess, sys
from pathlib import Path
from trimaran.bench.launch.held_memory import HeldMemory
from trimaran.protocol.control_groups import memory_rooms

Path(sys.argv[1]).write_text("0")
eater = subprocess.Popen(
    [sys.executable, "-c", sys.argv[3]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)

def ask(size):
    print(size, file=eater.stdin, flush=True)
    eater.stdout.readline()

ask(0)
held = HeldMemory([eater.pid], None)
assert held.shortage([eater.pid]) is None
limit = int(sys.argv[2])
while (left := min(left for _, left in memory_rooms())) > limit // 100:
    ask(min(left // 2, 1 << 20) if left > limit // 50 else 1 << 16)
found = held.shortage([eater.pid])
print(found and (found.by_others, found.sentence))
"""


def test_a_container_that_is_about_to_be_full_is_seen_before_the_kernel_ends_what_is_in_it() -> None:
    """Under memory.oom.group the kernel ends the sweep with its ranks, and started again it met the same trial."""
    limit = 256 << 20
    group = memory_group(limit / 2**30)
    if group is None:
        pytest.skip("needs the right to make control groups")
    with closing(group):
        command = [sys.executable, "-c", FILLED, str(group.processes_file), str(limit), EATER]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = (
        "(False, 'the control group of this process, as of a container or a job, has 0.00 of 0.25 GiB left, the ranks"
    )
    assert done.stdout.startswith(said)
