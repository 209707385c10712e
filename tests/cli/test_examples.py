"""The examples that `trimaran VERB --help` gives work as they stand, where they need no machine of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from rich.text import Text

from command import run
from trimaran.cli.app import app


def test_help_is_printed_as_it_is_written() -> None:
    """Square brackets would be taken for a colour and left out."""
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    texts = [option.help for verb in verbs.values() for option in verb.params if getattr(option, "help", None)]
    assert len(texts) > 50
    assert [text for text in texts if Text.from_markup(text).plain != text] == []


@pytest.mark.parametrize("verb", ["plan", "predict", "export"])
def test_the_examples_of_a_help_text_work(tmp_path: Path, verb: str) -> None:
    (tmp_path / "recipes").symlink_to(Path(__file__).parents[2] / "recipes")
    told = " ".join(run(verb, "--help").stdout.split())
    examples = re.findall(rf"Example: trimaran ({verb} .*?)(?= Example:| ╭|$)", told)
    assert examples, told
    for example in examples:
        done = run(*example.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
