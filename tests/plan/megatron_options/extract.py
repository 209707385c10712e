"""Writes the command-line options of a Megatron-LM as its source has them, without running any of it.

    python tests/plan/megatron_options/extract.py CHECKOUT core_v0.15.0 core_v0.19.0

One file a version, beside this one: the commit, then a line an option: its name, what it takes (`switch`, or a type
with `+` for several and `?` for one that may be left out) and the words that it is one of. Options are calls of
add_argument, and from core 0.16 on also fields of the dataclasses that an ArgumentGroupFactory is given
(megatron/training/argument_utils.py).
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ARGUMENTS = "megatron/training/arguments.py"
# Actions of argparse that take no value.
SWITCHES = {"store_true", "store_false", "store_const", "help", "version"}


@dataclass(frozen=True)
class Source:
    """A commit of a checkout."""

    checkout: Path
    commit: str

    def git(self, *words: str) -> str:
        """What a git command prints."""
        return subprocess.run(
            ["git", "-C", str(self.checkout), *words], check=True, capture_output=True, text=True
        ).stdout

    def text(self, path: str) -> str:
        """A file's text."""
        return self.git("show", f"{self.commit}:{path}")

    def dataclass(self, name: str) -> ast.ClassDef:
        """A class by its name, wherever under megatron/ it is defined."""
        found = self.git("grep", "-l", "-E", rf"^class {name}(\(|:)", self.commit, "--", "megatron").split()
        for where in found:
            for node in ast.walk(ast.parse(self.text(where.partition(":")[2]))):
                if isinstance(node, ast.ClassDef) and node.name == name:
                    return node
        raise SystemExit(f"class {name} is not found at {self.commit}")


def options(source: Source) -> Iterator[tuple[str, str]]:
    """Names of options and what they take."""
    for function in ast.walk(ast.parse(source.text(ARGUMENTS))):
        if not isinstance(function, ast.FunctionDef):
            continue
        lists = {
            target.id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in ast.walk(function):
            if not isinstance(call, ast.Call):
                continue
            called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if called == "add_argument":
                names = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
                given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
                yield from ((name, takes(given)) for name in names if name.startswith("--"))
            elif called == "ArgumentGroupFactory":
                named = next((keyword.value for keyword in call.keywords if keyword.arg == "exclude"), None)
                listed = lists.get(named.id) if isinstance(named, ast.Name) else named
                excluded = set(words(listed)) if listed is not None else set()
                assert isinstance(call.args[0], ast.Name)
                yield from of_dataclass(source, call.args[0].id, excluded)


def words(node: ast.AST) -> list[str]:
    """Every text inside a literal."""
    return [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant) and isinstance(inner.value, str)]


def takes(given: dict[str, ast.expr]) -> str:
    """What an option takes, from the arguments of add_argument."""
    action = given.get("action")
    if isinstance(action, ast.Constant) and action.value in SWITCHES:
        return "switch"
    if action is not None and ast.unparse(action).endswith("BooleanOptionalAction"):
        return "switch"
    nargs = given.get("nargs")
    several = {"+": "+", "*": "+", "?": "?"}.get(nargs.value, "+") if isinstance(nargs, ast.Constant) else ""
    kind = ast.unparse(given["type"]) if "type" in given else "str"
    choices = f" {'|'.join(map(str, ast.literal_eval(given['choices'])))}" if is_literal(given.get("choices")) else ""
    return f"{kind if kind in ('int', 'float') else 'str'}{several}{choices}"


def is_literal(node: ast.expr | None) -> bool:
    """Whether a value can be read without running it."""
    try:
        return node is not None and bool(ast.literal_eval(node))
    except ValueError:
        return False


def of_dataclass(source: Source, name: str, excluded: set[str]) -> Iterator[tuple[str, str]]:
    """Options that a dataclass and those it extends make (ArgumentGroupFactory._build_argparse_kwargs_from_field)."""
    definition = source.dataclass(name)
    for base in definition.bases:
        if isinstance(base, ast.Name):
            yield from of_dataclass(source, base.id, excluded)
    for node in definition.body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)) or node.target.id in excluded:
            continue
        default, meta, settable = field_of(node)
        if settable:
            named = [words(meta["arg_names"])] if "arg_names" in meta else []
            yield from of_field(node.target.id, node.annotation, default, meta, named)


def field_of(node: ast.AnnAssign) -> tuple[ast.expr | None, dict[str, ast.expr], bool]:
    """A field's default, its argparse_meta, and whether it is one of the constructor's."""
    value = node.value
    if not (isinstance(value, ast.Call) and getattr(value.func, "id", getattr(value.func, "attr", "")) == "field"):
        return value, {}, True
    given = {keyword.arg: keyword.value for keyword in value.keywords}
    settable = not (isinstance(given.get("init"), ast.Constant) and given["init"].value is False)
    meta: dict[str, ast.expr] = {}
    if isinstance(given.get("metadata"), ast.Dict):
        for key, inner in zip(given["metadata"].keys, given["metadata"].values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "argparse_meta" and isinstance(inner, ast.Dict):
                meta = {
                    k.value: v for k, v in zip(inner.keys, inner.values, strict=True) if isinstance(k, ast.Constant)
                }
    return given.get("default"), meta, settable


def of_field(
    field: str, annotation: ast.expr, default: ast.expr | None, meta: dict[str, ast.expr], named: list[list[str]]
) -> Iterator[tuple[str, str]]:
    """The options of one field: a switch where it is a bool, else a value of its type."""
    dashed = field.replace("_", "-")
    kind = ast.unparse(annotation).strip("'\"").removeprefix("Optional[").removesuffix("| None").rstrip("] ")
    is_switch = kind == "bool" and "type" not in meta
    is_on = isinstance(default, ast.Constant) and default.value is True
    names = named[0] if named else [f"--no-{dashed}", f"--disable-{dashed}"] if is_switch and is_on else [f"--{dashed}"]
    if meta.keys() & {"type", "action", "nargs", "choices"}:
        spec = takes(meta)
    elif is_switch:
        spec = "switch"
    elif kind.startswith("Literal["):
        choices = [str(inner.value) for inner in ast.walk(annotation) if isinstance(inner, ast.Constant)]
        spec = f"str {'|'.join(choice for choice in choices if choice != 'None')}"
    else:
        several = "+" if kind.lower().startswith("list[") else ""
        inner = kind.partition("[")[2] if several else kind
        spec = f"{inner if inner in ('int', 'float') else 'str'}{several}"
    yield from ((name, spec) for name in names)


def main(checkout: str, *versions: str) -> None:
    """Write a file for each of the versions, tags or commits of the checkout."""
    for version in versions:
        source = Source(Path(checkout), version)
        commit = source.git("rev-parse", f"{version}^{{commit}}").strip()
        found = dict(options(source))
        lines = [f"# Megatron-LM {version}, {commit}", *(f"{name} {spec}" for name, spec in sorted(found.items()))]
        Path(__file__).with_name(f"{version}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
