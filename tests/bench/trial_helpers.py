"""What the tests of trials share: the worker that misbehaves, limits that suit it, a look for what is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from trimaran.bench.watch.limits import Limits

FAKE = Path(__file__).with_name("fake_worker.py")
LIMITS = Limits(timeout_s=60, start_s=30, hang_s=3.0, peers_s=0.3)


def fake_worker(behaviour: str) -> tuple[str, ...]:
    """Command of a rank that behaves so."""
    return (sys.executable, str(FAKE), behaviour)


def start_silent_ranks_and_kill_the_launcher(
    folder: Path, starts: str, launch: str, ranks: int, environment: Mapping[str, str] | None = None
) -> None:
    """Kill a process, once the ranks that it has started are there.

    `starts` is Python that makes the launcher `launcher`; the ranks write to `folder`, under `Launch`'s options
    `launch`.
    """
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\nfrom trial_helpers import fake_worker\n"
        "from trimaran.bench.launch.contract import Launch\n"
        f"{starts}\n"
        "out = Path(sys.argv[2])\n"
        "(out / 'job.json').write_text('{\"out_dir\": \"' + str(out) + '\", \"steps\": 3}')\n"
        f"launch = Launch((*fake_worker('silent'), str(out / 'job.json')), {ranks}, out{launch})\n"
        "running = launcher.start(launch)\n"
        "print('started', flush=True); input()\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", script, str(Path(__file__).parent), str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})},
    )  # fmt: skip
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "started\n"
    deadline = time.monotonic() + 20
    while len(processes_that_name("fake_worker.py silent")) < ranks and time.monotonic() < deadline:
        time.sleep(0.05)
    launcher.kill()
    launcher.communicate()


def processes_that_name(text: str) -> list[str]:
    """Command lines, and folders, of other processes that hold `text`."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            command += f"in {(file.parent / 'cwd').readlink()}"
        except OSError:
            continue
        if text in command and file.parent.name != str(os.getpid()):
            found.append(command)
    return found
