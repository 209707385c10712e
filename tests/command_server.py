"""The trimaran command again and again: a process that has read its modules forks for each call.

A fresh interpreter takes a second of a core to read them, of which the tests of the command line would pay hundreds.
Requests are lines of JSON on standard input; how a call ended is written into its folder. `command.py` asks.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
from pathlib import Path

import trimaran.cli

# What verbs read when they are called.
MODULES = (
    "cli.app", "cli.question", "cost.fit.fit_rows", "cost.simulate", "planner.export.exporters", "planner.ramp_up",
    "planner.why", "report.explore", "report.figures", "report.published_answers", "report.timelines",
    "store.importers.formats", "study.tune.tune_recipe",
)  # fmt: skip
_ASK_AGAIN_S = 0.003


def become_the_command() -> None:
    """Serve until standard input ends; returns in each fork, where the process is as the command's own."""
    running: dict[int, Path] = {}
    asked = b""
    while True:
        if select.select([0], [], [], _ASK_AGAIN_S if running else None)[0]:
            read = os.read(0, 1 << 16)
            if not read:
                for pid in running:
                    os.killpg(pid, signal.SIGKILL)
                os._exit(0)
            *lines, asked = (asked + read).split(b"\n")
            for line in lines:
                request = json.loads(line)
                folder = Path(request["folder"])
                pid = os.fork()
                if pid == 0:
                    _take_the_place(folder, request["cwd"], request["arguments"], request["environment"])
                    return
                running[pid] = folder
        for pid, folder in list(running.items()):
            ended, status, used = os.wait4(pid, os.WNOHANG)
            if ended:
                said = {
                    "status": os.waitstatus_to_exitcode(status),
                    "cpu_s": used.ru_utime + used.ru_stime,
                    "peak_gib": used.ru_maxrss / 2**20,
                }
                del running[pid]
                with contextlib.suppress(FileNotFoundError):  # whoever asked waits no longer
                    beside = folder / "ended.new"
                    beside.write_text(json.dumps(said))
                    beside.replace(folder / "ended")


def _take_the_place(folder: Path, cwd: str, arguments: list[str], environment: dict[str, str]) -> None:
    os.setpgid(0, 0)
    (folder / "pid").write_text(str(os.getpid()))
    for number, path, flags in (
        (0, Path(os.devnull), os.O_RDONLY),
        (1, folder / "out", os.O_WRONLY | os.O_CREAT),
        (2, folder / "err", os.O_WRONLY | os.O_CREAT),
    ):
        descriptor = os.open(path, flags)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["trimaran", *arguments]


if __name__ == "__main__":
    for name in MODULES:
        importlib.import_module(f"trimaran.{name}")
    become_the_command()
    trimaran.cli.main()
