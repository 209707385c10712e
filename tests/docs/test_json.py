"""Every key of the JSON that verbs print stands in docs/json.md, in the words of whoever reads it by a program."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from command import run

ROOT = Path(__file__).parents[2]
JSON_PAGE = ROOT / "docs" / "json.md"
TABLE = ROOT / "src" / "trimaran" / "catalog" / "measurements" / "fugaku_124m.csv"
BLOOM = (
    "plan", "--model", "bloom-176b", "--cluster", "jean-zay-a100-80gb", "--devices", "384", "--gbs", "2048",
    "--stack", "megatron-deepspeed", "--format", "json",
)  # fmt: skip
TRAINED = ("--top", "3", "--tokens", "366e9", "--faults", "llama3-h100", "--ramp-up", "192,32,9000000")


def keys(answer: Any) -> set[str]:
    """The keys of all objects in an answer, whatever they hold."""
    if isinstance(answer, dict):
        return set(answer).union(*(keys(value) for value in answer.values()))
    return set().union(*(keys(value) for value in answer)) if isinstance(answer, list) else set()


@pytest.mark.parametrize("asked", [TRAINED, ("--why", "dp4,tp8,pp12,mbs4")], ids=["ranking", "why"])
def test_the_page_of_json_names_every_key_of_a_plan(asked: tuple[str, ...]) -> None:
    page = JSON_PAGE.read_text()
    plans = page[page.index("## `trimaran plan --format json`") : page.index("## `trimaran report --format json`")]
    told = keys(json.loads(run(*BLOOM, *asked).stdout))
    assert "layout" in told
    assert told - set(re.findall(r"`(\w+)`", plans)) == set()


@pytest.mark.parametrize("verb", ["report", "predict", "import", "store"])
def test_the_page_of_json_names_every_key_of_runs_and_their_scores(verb: str, tmp_path: Path) -> None:
    store = str(tmp_path / "s.sqlite")
    asked = {
        "report": ("report", str(TABLE)),
        "predict": ("predict", str(TABLE)),
        "import": ("import", str(TABLE), "--into", store),
        "store": ("store", store, "list"),
    }
    if verb == "store":
        assert run(*asked["import"]).returncode == 0
    page = JSON_PAGE.read_text()
    # a store lists the keys of reports, too
    verbs = "store|report" if verb == "store" else verb
    sections = [section for section in page.split("\n## ") if re.match(rf"`trimaran ({verbs}) ", section)]
    told = keys(json.loads(run(*asked[verb], "--format", "json").stdout))
    assert len(told) > 5 and told - set(re.findall(r"`(\w+)`", "".join(sections))) == set()
