"""How other trainers themselves read what is exported for them: their own classes, or their options as extracted."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
# Where `make parsers` installs them.
INSTALLED = HERE.parents[1] / ".parsers"


def read_by(parser: str, script: str, files: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    """What each of the files sets, each given with a number that the script says the meaning of."""
    folder = INSTALLED / parser
    if not (folder / ".installed").exists():
        pytest.skip(f"{parser} is not in .parsers: make parsers")
    done = subprocess.run(
        [sys.executable, HERE / "parsers" / script],
        input=json.dumps(files), text=True, capture_output=True, check=False,
        env={**os.environ, "PYTHONPATH": str(folder)}, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    read: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return read


def read_by_torchtitan(version: str, files: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    """What torchtitan of a version sets, of files each given with the layers of its model."""
    return read_by(f"torchtitan-{version}", f"read_torchtitan_{version.replace('.', '')}.py", files)


def read_by_deepspeed(files: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    """What DeepSpeed sets, of files each given with the ranks that it runs on."""
    return read_by("deepspeed", "read_deepspeed.py", files)


@cache
def megatron_parser(version: str) -> argparse.ArgumentParser:
    """A parser of the options that Megatron-LM's source of a version has (megatron_options/extract.py)."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, add_help=False)
    kinds = {"int": int, "float": float, "str": str}
    for line in (HERE / "megatron_options" / f"core_v{version}.0.txt").read_text().splitlines()[1:]:
        name, takes, *choices = line.split(" ", 2)
        if takes == "switch":
            parser.add_argument(name, action="store_true", dest=name)
            continue
        kind = kinds[takes.rstrip("+?")]
        listed = [kind(choice) for choice in choices[0].split("|")] if choices else None
        nargs = takes[-1] if takes[-1] in "+?" else None
        parser.add_argument(name, type=kind, nargs=nargs, choices=listed, dest=name)
    return parser


def read_by_megatron(version: str, text: str) -> dict[str, Any]:
    """The flags of a text that are set, as that version's parser types them; what it does not know fails."""
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    said, unknown = megatron_parser(version).parse_known_args(words)
    assert not unknown, unknown
    twice = {word for word in words if word.startswith("--") and words.count(word) > 1}
    assert not twice, twice
    return {name: value for name, value in vars(said).items() if value is not None and value is not False}
