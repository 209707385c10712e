"""The examples that `trimaran VERB --help` gives work as they stand, where they need no machine of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from command import run


@pytest.mark.parametrize("verb", ["plan", "predict", "export"])
def test_the_example_of_a_help_text_works(tmp_path: Path, verb: str) -> None:
    told = " ".join(run(verb, "--help").stdout.split())
    example = re.search(rf"Example: trimaran ({verb} [^╭|]*)", told)
    assert example, told
    done = run(*example.group(1).split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
