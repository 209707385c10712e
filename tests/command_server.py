"""The trimaran command again and again: a process that has read its modules forks for each call.

A fresh interpreter takes a second of a core to read them, of which the tests of the command line would pay hundreds.
Requests are lines of JSON on standard input; a call's status is written into its folder when it has ended.
"""

from __future__ import annotations

import importlib
import json
import os
import select
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


def read_modules() -> None:
    """Read what verbs read when they are called, so that no fork has to."""
    for name in MODULES:
        importlib.import_module(f"trimaran.{name}")


def become_the_command() -> None:
    """Serve until standard input ends; returns in each fork, where the process is as the command's own."""
    running: dict[int, Path] = {}
    asked = b""
    while True:
        if select.select([0], [], [], _ASK_AGAIN_S if running else None)[0]:
            read = os.read(0, 1 << 16)
            if not read:
                os._exit(0)
            *lines, asked = (asked + read).split(b"\n")
            for line in lines:
                request = json.loads(line)
                folder = Path(request["folder"])
                pid = os.fork()
                if pid == 0:
                    _as_asked(request, folder)
                    return
                running[pid] = folder
                _put(folder / "pid", str(pid))
        for pid, folder in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _put(folder / "status", str(os.waitstatus_to_exitcode(status)))
                del running[pid]


def _as_asked(request: dict[str, object], folder: Path) -> None:
    os.chdir(str(request["cwd"]))
    for number, name, flags in ((0, os.devnull, os.O_RDONLY), (1, "out", os.O_WRONLY), (2, "err", os.O_WRONLY)):
        descriptor = os.open(folder / name, flags | (os.O_CREAT if number else 0))
        os.dup2(descriptor, number)
        os.close(descriptor)
    environment, arguments = request["environment"], request["arguments"]
    assert isinstance(environment, dict) and isinstance(arguments, list)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["trimaran", *arguments]


def _put(file: Path, text: str) -> None:
    beside = file.with_name(f"{file.name}.new")
    beside.write_text(text)
    beside.replace(file)


if __name__ == "__main__":
    read_modules()
    become_the_command()
    trimaran.cli.main()
