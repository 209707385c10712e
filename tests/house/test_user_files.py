"""What a user names is opened in one place, as a regular file and within a limit; nothing prints past one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "trimaran"
OPENER = "files/user_file.py"
# Ways to read a file by its path.
READS = {"open", "read_text", "read_bytes", "fromfile", "loadtxt", "genfromtxt", "fdopen"}
# Functions of libraries that open a path by themselves: what they are given has been looked at by the opener.
LIBRARIES = {"memmap", "safe_open", "ParquetFile", "from_file", "load_file"}
# Rooms and modules whose files nobody names: those of the system, of a run, and of the package itself.
OWN_FILES = {
    "bench/": "files of a trial and of the system, and programs that run without Trimaran",
    "probe/": "files of a probe and of the system",
    "protocol/": "files that ranks and watchers write to each other",
    "train/run/": "the log, the heartbeat and the trace of a run",
    "train/process/": "files of the system",
    "train/comm/": "shared memory of the ranks",
    "study/training/": "the log and the notices of a run",
    "cli/standard_streams.py": "files of the system",
    "store/owner.py": "files of the system",
    "report/appearance.py": "the package's own style and script",
    "report/explore.py": "the package's own style sheet",
    "report/page/html.py": "the package's own page",
    "report/life/life_page.py": "the package's own page",
    "files/row_table.py": "the package's own tables",
}
WRITES = {"w", "wb", "a", "ab", "x", "xb"}


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def name_of(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def writes(call: ast.Call) -> bool:
    """Whether a call of `open` says that it writes, or that it opens a folder."""
    modes = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    attributes = {inner.attr for mode in modes for inner in ast.walk(mode) if isinstance(inner, ast.Attribute)}
    return "O_DIRECTORY" in attributes or any(isinstance(mode, ast.Constant) and mode.value in WRITES for mode in modes)


def modules() -> list[str]:
    names = (path.relative_to(SRC).as_posix() for path in sorted(SRC.rglob("*.py")))
    return [name for name in names if name != OPENER and not name.startswith(tuple(OWN_FILES))]


def test_homes_are_looked_up_in_one_place() -> None:
    """A user whom the system does not know has none, which pathlib answers with a RuntimeError."""
    callers = {
        path.relative_to(SRC).as_posix()
        for path in SRC.rglob("*.py")
        for call in calls(path)
        if name_of(call) == "expanduser"
    }
    assert callers == {OPENER}


@pytest.mark.parametrize("module", modules())
def test_no_room_opens_a_users_file_by_another_way(module: str) -> None:
    for call in calls(SRC / module):
        where = f"{module}, line {call.lineno}"
        if name_of(call) in READS and not writes(call):
            imported = isinstance(call.func, ast.Name) and call.func.id != "open"
            assert imported, f"{where}: {name_of(call)}(...) opens a file; {OPENER} does"
        if name_of(call) in LIBRARIES and call.args:
            looked_at = [name_of(inner) for inner in ast.walk(call.args[0]) if isinstance(inner, ast.Call)]
            assert "regular_file" in looked_at, f"{where}: {name_of(call)} is given a path that nobody has looked at"


@pytest.mark.parametrize("name", OWN_FILES)
def test_who_is_let_open_files_of_its_own_opens_some(name: str) -> None:
    files = [SRC / name] if name.endswith(".py") else sorted((SRC / name).rglob("*.py"))
    assert any(name_of(call) in READS and not writes(call) for file in files for call in calls(file))


@pytest.mark.parametrize("path", sorted((SRC / "cli" / "verbs").glob("*.py")), ids=lambda path: path.stem)
def test_a_verb_prints_through_the_terminal(path: Path) -> None:
    """What is printed anywhere else might hold escape sequences of a file of others."""
    assert not {name_of(call) for call in calls(path)} & {"echo", "print", "secho"}
