"""The commands of docs/planning.md run as they stand; its other blocks are looked at as those of all pages are."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_example_runs(
    code: str, trimaran: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for line in code.strip().splitlines():
        done = trimaran(*shlex.split(line)[1:])
        assert done.returncode == 0, done.stderr
        assert done.stdout or "-o" in line


def test_options_of_the_table_exist(trimaran: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    shown = trimaran("plan", "--help").stdout
    rows = re.findall(r"^\| `--.*$", TEXT, flags=re.MULTILINE)
    assert len(rows) > 5
    for option in re.findall(r"--[a-z][a-z-]+", "\n".join(rows)):
        assert option in shown
