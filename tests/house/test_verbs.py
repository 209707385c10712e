"""A verb is thin: it reads options, calls one room, and prints what the report makes of it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from trimaran.cli.app import app

VERBS = Path(__file__).parents[2] / "src" / "trimaran" / "cli" / "verbs"
FILES = sorted(path for path in VERBS.glob("*.py") if path.name != "__init__.py")
# Rooms that do something; beside them a verb may use nouns, files and what prints.
ROOMS = {"study", "api", "planner", "bench", "cost", "store", "probe", "train"}
# Names of the called room, classes apart, that a function may use: the longest is export, which plans or completes a
# layout before it writes it down.
MOST_CALLS = 5


def functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]


def imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The room and the name of everything of Trimaran that is imported inside."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.ImportFrom) and (inner.module or "").startswith("trimaran."):
            yield from (((inner.module or "").split(".")[1], alias.name) for alias in inner.names)
        elif isinstance(inner, ast.Import):
            yield from ((alias.name.split(".")[1], "") for alias in inner.names if alias.name.startswith("trimaran."))


def registered() -> set[str]:
    commands = [command.callback for command in app.registered_commands]
    groups = [group.typer_instance for group in app.registered_groups]
    commands += [
        command.callback for group in groups if isinstance(group, typer.Typer) for command in group.registered_commands
    ]
    return {f"{callback.__module__.split('.')[-1]}.{callback.__name__}" for callback in commands if callback}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_defines_the_verb_of_its_name_and_the_command_line_has_it(path: Path) -> None:
    names = {function.name for function in functions(path) if not function.name.startswith("_")}
    verbs = {f"{path.stem}.{name}" for name in names}
    assert verbs and verbs <= registered()
    # a file of several verbs is a group of that name
    assert path.stem in names or len(names) > 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_function_of_a_verb_calls_one_room(path: Path) -> None:
    for function in functions(path):
        calls = [(room, name) for room, name in imported(function) if room in ROOMS and not name[:1].isupper()]
        rooms = {room for room, _ in imported(function)} & ROOMS
        assert len(rooms) <= 1, f"{path.name}, {function.name}: calls {', '.join(sorted(rooms))}"
        assert len(calls) <= MOST_CALLS, f"{path.name}, {function.name}: {', '.join(name for _, name in calls)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_verb_starts_no_process_and_opens_no_room_before_it_is_called(path: Path) -> None:
    """Trials, trainings and probes are started by the rooms below; the help needs none of them."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.If)]
    assert {room for room, _ in imported(tree)} <= {"cli"}
    names = {
        alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert not names & {"subprocess", "multiprocessing"}


def test_a_table_that_is_not_there_is_told_before_the_cost_model_comes() -> None:
    """Half of a second of a core is what the model takes to come, which a mistake should not cost."""
    script = (
        "import sys; sys.argv = ['trimaran', 'predict', 'nosuch']\n"
        "from trimaran.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([name for name in sys.modules if name.startswith('trimaran.cost')])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n" and "table nosuch is neither a file nor a table that ships" in done.stderr
