"""Every field of a recipe's section stands on the page that tells of the section, so that nobody reads code for it."""

import re
from pathlib import Path

import pytest

from trimaran.nouns.noun import Noun
from trimaran.recipe.data_settings import DataSettings
from trimaran.recipe.sweep_settings import SweepSettings
from trimaran.recipe.train_settings import TrainSettings

DOCS = Path(__file__).parents[2] / "docs"


def first_cells(page: str, head: str) -> str:
    """The first column of the table whose head begins so."""
    table = (DOCS / page).read_text().partition(f"| {head} |")[2].partition("\n\n")[0]
    return "".join(line.split(" | ")[0] for line in table.splitlines())


@pytest.mark.parametrize(
    ("section", "told"),
    [
        (TrainSettings, first_cells("training.md", "field")),
        (SweepSettings, first_cells("measuring.md", "field of `[sweep]`")),
        (DataSettings, (DOCS / "data-and-weights.md").read_text()),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_page_names_every_field_of_a_section(section: type[Noun], told: str) -> None:
    assert [name for name in section.model_fields if not re.search(rf"\b{name}\b", told)] == []
