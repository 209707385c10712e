"""Standard streams that take nothing, or that whoever started the command has closed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from command import TRIMARAN, tiny_recipe

PLAN = ["plan", "--model", "gpt2-124m", "--cluster", "dgx-h100", "--devices", "8", "--gbs", "8", "--format", "json"]


def test_a_disk_that_takes_no_line_of_what_is_said_changes_no_status() -> None:
    """A mistake ended with status 1 where it could not be told, and a sweep after its first trial."""
    with open("/dev/full", "w") as full:  # noqa: PTH123 (a device)
        told = subprocess.run([TRIMARAN, "plan", "--model", "no-such-model"], stderr=full, check=False)
    assert told.returncode == 2


@pytest.mark.proof
def test_a_training_that_was_started_without_standard_streams_trains(tmp_path: Path) -> None:
    """Its sockets took the numbers of the streams, and its ranks began with others in their place."""
    command = [TRIMARAN, "train", str(tiny_recipe(tmp_path)), "--layout", "dp2,mbs1"]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
    done = subprocess.run(closed, cwd=tmp_path, check=False, timeout=120)
    assert done.returncode == 0, (tmp_path / "runs/tiny/events.csv").read_text()


def test_a_mistake_told_where_standard_error_is_closed_is_no_output() -> None:
    command = [TRIMARAN, "plan", "--model", "no-such-model"]
    told = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *command], stdout=subprocess.PIPE, check=False)
    assert (told.returncode, told.stdout) == (2, b"")


@pytest.mark.parametrize("words", [["--version"], ["plan", "--help"], PLAN])
def test_output_that_nobody_reads_ends_as_by_sigpipe_and_says_nothing(words: list[str]) -> None:
    """It ended with status 1, which is none of this program's."""
    unread = '"$@" | true; echo "${PIPESTATUS[0]}"'
    done = subprocess.run(["bash", "-c", unread, "bash", TRIMARAN, *words], capture_output=True, check=False)
    assert (done.stdout, done.stderr) == (b"141\n", b"")


@pytest.mark.parametrize("words", [["--version"], PLAN])
def test_output_on_a_full_disk_is_named(words: list[str]) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123 (a device)
        done = subprocess.run([TRIMARAN, *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("trimaran: standard output: No space left on device; ")
    assert done.stderr.count("\n") == 1
