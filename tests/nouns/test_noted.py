"""Words of a row's text, however they are set apart, and whether a text denies them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trimaran.files.catalogue import catalogue_names, load_device, load_stack
from trimaran.nouns.spoken.noted import Noted, first_said

ASYNC = Noted(words="async TP", read_as="torchtitan-async-tp")
COMPILE = Noted(words="compile", read_as="torchtitan-compiled")


@pytest.mark.parametrize(
    "text", ["async TP", "AsyncTP+compile", "2D + async-TP", "with async_tp.", "Float8 + Async  TP;"]
)
def test_words_are_found_however_they_are_written(text: str) -> None:
    assert ASYNC.said_in(text)


@pytest.mark.parametrize("text", ["FSDP + torch.compile", "compiled", "compile+Float8", "no AC, torch.compile"])
def test_a_word_may_go_on(text: str) -> None:
    assert COMPILE.said_in(text)


@pytest.mark.parametrize(
    "text", ["", "eager", "without torch.compile", "no compile", "not compiled", "torch.compile: off", "compile=False",
             "vanilla TP", "non-compiled", "recompiles"],
)  # fmt: skip
def test_what_is_denied_or_not_said_is_not_found(text: str) -> None:
    assert not COMPILE.said_in(text)


@pytest.mark.parametrize("wrong", [{"words": "++"}, {"read_as": "mine.toml"}, {"read_as": "../mine"}])
def test_words_without_letters_and_files_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match=f"{next(iter(wrong))} is "):
        Noted.model_validate({"words": "async TP", "read_as": "torchtitan-async-tp"} | wrong)


@pytest.mark.parametrize(
    ("text", "said"),
    [("no compile " * 6000, False), ("no" + " " * 60_000 + "compile", True), ("compile " + "x" * 60_000, True)],
)
def test_a_cell_may_be_as_long_as_a_line(text: str, said: bool) -> None:
    assert COMPILE.said_in(text) is said and not ASYNC.said_in(text)


def test_what_rows_of_a_stack_are_read_as_is_not_what_those_of_one_that_extends_it_are(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "torchtitan"\nop_us = 30\n')
    assert load_stack("torchtitan").noted and not load_stack(str(mine)).noted


@given(before=st.text(alphabet="xyz +,;", max_size=9), apart=st.sampled_from(["", " ", "-", "_", "  ", "."]))
def test_only_what_stands_between_the_words_differs(before: str, apart: str) -> None:
    said = f"{before} Async{apart}TP"
    assert first_said((COMPILE, ASYNC), said) is ASYNC


@pytest.mark.parametrize(
    ("date", "said"), [(None, False), ("2025-03-31", False), ("2025-04-02", True), ("2025-05", True)]
)
def test_words_may_say_so_from_a_day_on(date: str | None, said: bool) -> None:
    dated = COMPILE.model_copy(update={"since": "2025-04-02"})
    assert (first_said((dated,), "compile", date) is dated) is said


def test_every_entry_of_the_catalogue_names_another_and_none_goes_in_a_circle() -> None:
    for kind, load in (("stacks", load_stack), ("devices", load_device)):
        for name in catalogue_names(kind):
            seen = [name]
            while noted := load(seen[-1]).noted:
                assert all(each.read_as in catalogue_names(kind) for each in noted)
                seen.append(noted[0].read_as)
                assert len(seen) == len(set(seen)), seen
