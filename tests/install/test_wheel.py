"""A built wheel is whole: installed without the checkout it has the catalogue, the recipes and the page's assets."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("src", "recipes", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `make dist` has built and names, or one built here from a copy of what it is built of."""
    if built := os.environ.get("TRIMARAN_WHEEL"):
        return Path(built).resolve()
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "sources").mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / "sources" / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, folder / "sources")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command = [*pip, "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "sources")]
    subprocess.run(command, check=True, timeout=120)
    (built_wheel,) = folder.glob("*.whl")
    return built_wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel alone; what it depends on is found in this one's, so nothing is downloaded.

    A path file adds a folder without reading the path files in it, so the checkout that they may name stays unseen.
    """
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, timeout=120)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def run(installed: Path, *command: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    arguments = [str(installed / command[0]), *command[1:]]
    done = subprocess.run(
        arguments, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_file_of_data_is_in_the_wheel_and_nothing_else_is(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "trimaran"
    folders = ("catalog", "report")
    wanted = [
        path for folder in folders for path in (package / folder).rglob("*") if path.suffix in (".toml", ".csv", ".css")
    ]
    wanted += [*(package / "report" / "page").glob("page.*"), package / "py.typed", *package.rglob("job.sh")]
    assert {str(path.relative_to(package.parent)) for path in wanted} <= names
    recipes = {f"trimaran/catalog/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.toml")}
    assert recipes and recipes <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"trimaran"}
    assert not [name for name in names if name.startswith("trimaran/catalog") and name.endswith(".py")]


def test_the_installed_command_names_its_version_and_runs_without_the_checkout(
    wheel: Path, installed: Path, tmp_path: Path
) -> None:
    where = run(installed, "python", "-c", "import trimaran; print(trimaran.__file__)", cwd=tmp_path)
    assert Path(where).is_relative_to(installed.parent)
    assert run(installed, "trimaran", "--version", cwd=tmp_path) == f"trimaran {wheel.name.split('-')[1]}\n"
    asked = ["--model", "gpt3-1b3", "--cluster", "dgx-h100", "--devices", "8", "--gbs", "64", "--format", "json"]
    (tmp_path / "plan.json").write_text(run(installed, "trimaran", "plan", *asked, cwd=tmp_path))
    run(installed, "trimaran", "report", "plan.json", "-o", "plan.html", cwd=tmp_path)
    assert "gpt3-1b3 on dgx-h100" in (tmp_path / "plan.html").read_text()
    tables = json.loads(run(installed, "trimaran", "predict", "bloom-176b", "--format", "json", cwd=tmp_path))
    assert tables and all(table["rows"] for table in tables)
