"""Claims about who imports whom: no circle anywhere, lazy imports for stated reasons alone, rooms of bearable size."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

HOUSE = Path(__file__).parents[2]
SRC = HOUSE / "src"
# The most Python files that a folder may hold.
FILES_AT_MOST = 20
# Libraries that take tenths of a second to import, or that are optional: an import inside a function may spare them.
HEAVY = (
    "numpy", "scipy", "pydantic", "typer", "rich", "tomli_w", "torch", "torch.distributed.checkpoint",
    "torch.utils.tensorboard", "tensorboard", "safetensors", "tokenizers", "pyarrow", "matplotlib", "plotly", "dash",
    "flask", "wandb", "mlflow", "ray",
)  # fmt: skip
# Those that answer a command line quickly: every verb imports what it needs when it runs.
LAZY_BY_DESIGN = ("trimaran", "trimaran.cli")


def modules() -> dict[str, Path]:
    """Every module of the package, by name."""
    paths = sorted((SRC / "trimaran").rglob("*.py"))
    return {".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


MODULES = modules()


@cache
def imports(module: str) -> list[tuple[str, bool]]:
    """All that a module imports, and whether that is inside a function or for types alone."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, f"{module} imports by a relative name"
                names = [f"{child.module}.{alias.name}" for alias in child.names]
                yield from ((name if name in MODULES else str(child.module), lazy) for name in names)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from ((name, True) for name, _ in visit(child, lazy))
            else:
                yield from visit(child, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    return sorted(set(visit(ast.parse(MODULES[module].read_text()), False)))


@cache
def heavy_behind(module: str) -> frozenset[str]:
    """The heavy libraries that importing a module imports, through other modules too."""
    seen, todo, heavy = {module}, [module], set()
    while todo:
        for name, lazy in imports(todo.pop()):
            if lazy:
                continue
            heavy |= {library for library in HEAVY if f"{name}.".startswith(f"{library}.")}
            if name in MODULES and name not in seen:
                seen.add(name)
                todo.append(name)
    return frozenset(heavy)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for imported in sorted(graph[module]):
            if imported not in index:
                visit(imported)
            if imported in stack:
                lowest[module] = min(lowest[module], lowest[imported])
        if lowest[module] == index[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                components.append(sorted(component))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return components


def test_circles_are_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_no_module_imports_itself_by_a_circle_lazily_or_for_types_either() -> None:
    assert circles({module: {name for name, _ in imports(module) if name in MODULES} for module in MODULES}) == []


def spared_by(module: str, name: str) -> frozenset[str]:
    """The heavy libraries that a module does not import as long as it does not import `name`."""
    behind = heavy_behind(name) if name in MODULES else frozenset({name, name.partition(".")[0]}) & {*HEAVY}
    return behind - heavy_behind(module)


def test_an_import_inside_a_function_spares_a_heavy_library() -> None:
    lazy_imports = [(module, name) for module in MODULES for name, lazy in imports(module) if lazy]
    ours = [pair for pair in lazy_imports if pair[0] not in LAZY_BY_DESIGN and not pair[0].startswith("trimaran.cli.")]
    assert [" -> ".join(pair) for pair in ours if not spared_by(*pair)] == []


def test_ray_is_imported_by_its_launcher_alone_and_when_that_is_asked_for() -> None:
    users = {(module, lazy) for module in MODULES for name, lazy in imports(module) if name.partition(".")[0] == "ray"}
    assert users == {("trimaran.bench.launch.ray.ray_cluster", True)}


def test_every_package_that_is_installed_for_users_is_imported() -> None:
    project = tomllib.loads((HOUSE / "pyproject.toml").read_text())["project"]
    extras = [extra for name, extra in project["optional-dependencies"].items() if name not in ("docs", "dev")]
    asked = {re.split(r"[^\w-]", entry)[0].replace("-", "_") for entry in sum(extras, project["dependencies"])}
    parts = {part for module in MODULES for name, _ in imports(module) for part in name.split(".")}
    assert {{"pyyaml": "yaml"}.get(name, name) for name in asked} - parts == set()


def test_every_package_that_is_asked_for_has_the_version_that_the_tests_ran_with() -> None:
    """What checks, formats or types otherwise from one day to the next would fail a commit that has not changed."""
    project = tomllib.loads((HOUSE / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    asked = {re.split(r"[^\w-]", entry)[0] for entry in sum(extras, project["dependencies"])}
    lines = (HOUSE / "constraints.txt").read_text().splitlines()
    # PyTorch is installed from an index of its own too, with whatever setuptools that has
    assert {line.partition("==")[0] for line in lines if not line.startswith("#")} == asked - {"setuptools"}


def test_no_folder_holds_more_files_than_a_reader_can_survey() -> None:
    folders: dict[Path, int] = {}
    for path in MODULES.values():
        folders[path.parent] = folders.get(path.parent, 0) + 1
    assert {str(folder.relative_to(SRC)): count for folder, count in folders.items() if count > FILES_AT_MOST} == {}


def room(package: str, module: str) -> str:
    """The package or module right below `package` that `module` is or is in."""
    return ".".join(module.split(".")[: package.count(".") + 2])


def within(package: str) -> set[tuple[str, str]]:
    """Pairs of different rooms of a package of which the first imports the second."""
    modules = [module for module in MODULES if module.startswith(f"{package}.")]
    pairs = {(room(package, m), room(package, name)) for m in modules for name, _ in imports(m) if name in modules}
    return {(importer, imported) for importer, imported in pairs if importer != imported}


def test_wherever_modules_of_a_package_import_each_other_layers_say_in_which_order() -> None:
    contracts = tomllib.loads((HOUSE / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    exhaustive = [contract for contract in contracts if contract["type"] == "layers" and contract.get("exhaustive")]
    containers = {container for contract in exhaustive for container in contract["containers"]}
    packages = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    assert containers <= packages
    assert {package for package in packages - containers if within(package)} == set()
