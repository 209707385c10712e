"""The examples that `trimaran VERB --help` gives work as they stand, where they need no machine of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from command import run


@pytest.mark.parametrize("verb", ["plan", "predict", "export"])
def test_the_examples_of_a_help_text_work(tmp_path: Path, verb: str) -> None:
    (tmp_path / "recipes").symlink_to(Path(__file__).parents[2] / "recipes")
    told = " ".join(run(verb, "--help").stdout.split())
    examples = re.findall(rf"Example: trimaran ({verb} .*?)(?= Example:| ╭|$)", told)
    assert examples, told
    for example in examples:
        done = run(*example.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
