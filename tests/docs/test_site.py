"""The documentation site builds without a warning, and its reference holds what the program has."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from trimaran.files.catalogue import catalogue_names
from trimaran.nouns.columns import BY_NAME

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=None, capture_output=True, text=True, check=False, timeout=200)
    # a link to what the site has not is told as INFO
    told = [
        line
        for line in done.stderr.splitlines()
        if re.match(r"WARNING|ERROR|INFO .*(link|not found|not included)", line)
    ]
    assert done.returncode == 0 and not told, done.stderr
    return out


def test_every_verb_stands_in_the_reference(site: Path) -> None:
    text = (site / "reference" / "cli" / "index.html").read_text()
    verbs = {file.stem.rstrip("_") for file in (ROOT / "src" / "trimaran" / "cli" / "verbs").glob("[a-z]*.py")}
    assert "plan" in verbs and {verb for verb in verbs if f"trimaran {verb}<" not in text} == set()


def test_every_column_stands_in_the_reference(site: Path) -> None:
    text = (site / "reference" / "columns" / "index.html").read_text()
    assert all(f"<code>{column.name}</code>" in text for column in BY_NAME.values())


@pytest.mark.parametrize("kind", ["models", "clusters", "stacks"])
def test_every_name_of_the_catalogue_stands_in_the_reference(site: Path, kind: str) -> None:
    text = (site / "reference" / "catalogue" / "index.html").read_text()
    assert [name for name in catalogue_names(kind) if f"<code>{name}</code>" not in text] == []


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert [url for url in loaded if "canonical" not in url] == [], page
