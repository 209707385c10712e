"""The page that says where a change is made names files, folders and tables that are there; all pages, such files."""

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


def in_the_repository(path: str) -> bool:
    return any((folder / path).exists() for folder in (PACKAGE, ROOT, ROOT / "benchmarks"))


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|md|toml|csv))`", page.read_text(encoding="utf-8")))
    # files of other software have folders that are not here
    ours = {path for path in named if in_the_repository(path.partition("/")[0])}
    assert {path for path in ours if not in_the_repository(path)} <= {"runs/NAME/events.csv"}


def test_the_map_of_rooms_shows_every_room_and_its_folders() -> None:
    _, shown, _ = TEXT.split("```")
    rooms = {room.split()[0]: room for room in re.split(r"\n(?=\w)", shown.strip())}
    there = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()} | {"api"}
    assert set(rooms) == there
    for name, said in rooms.items():
        folders = {path.parent.name for path in (PACKAGE / name).glob("*/__init__.py")}
        assert folders <= set(re.findall(r"(\w+)/", said)), name
