"""The page that says where a change is made names files, folders and tables that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "trimaran"
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.+?) \| (.+) \|$", TEXT.partition("## Where to make a change")[2], flags=re.MULTILINE)[2:]
PATH = re.compile(r"(?:\w+/)+(?:\w+\.py)?|\w+\.py")


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize(("change", "places"), ROWS, ids=[change for change, _ in ROWS])
def test_every_place_of_a_change_exists(change: str, places: str) -> None:
    words = named(places)
    paths = [word for word in words if PATH.fullmatch(word)]
    assert paths, f"{change}: no file is named"
    for path in paths:
        assert (PACKAGE / path).exists() or (ROOT / path).exists(), f"{change}: {path} is not there"
    code = "".join((PACKAGE / path).read_text() for path in paths if (PACKAGE / path).is_file())
    for name in (word for word in words if word.isidentifier()):
        assert re.search(rf"^(?:class )?{name}\b", code, flags=re.MULTILINE), f"{change}: no {name} in {paths}"


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:\w+/)+\w+\.py)`", TEXT))))
def test_every_file_that_the_page_names_exists(path: str) -> None:
    assert (PACKAGE / path).exists() or (ROOT / path).exists() or (ROOT / "benchmarks" / path).exists()
