"""The page's table of answers is the one that its command made last."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def answers() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return importlib.import_module("answers")


def test_the_page_has_the_table_that_the_command_made(answers: ModuleType) -> None:
    _, _, made = answers.RESULTS.read_text(encoding="utf-8").partition("\n\n")
    _, _, rest = answers.PAGE.read_text(encoding="utf-8").partition(answers.BEGIN)
    shown, _, _ = rest.partition(answers.END)
    assert shown.strip() == made.strip()
    for question in answers.QUESTIONS:
        assert f"| {question.model}, {question.seq_len:,}, {question.global_batch:,} | {question.devices:,} " in made


def test_every_published_figure_names_a_source_and_every_source_is_cited(answers: ModuleType) -> None:
    cited = {question.published.source for question in answers.QUESTIONS if question.published}
    assert cited == set(answers.SOURCES)
