"""Every field of a file's section stands on the page that tells of the section, so that nobody reads code for it."""

import re
from pathlib import Path

import pytest

from trimaran.nouns.cluster import Cluster
from trimaran.nouns.faults import Faults
from trimaran.nouns.hardware.node_group import NodeGroup
from trimaran.nouns.model import Model
from trimaran.nouns.noun import Noun
from trimaran.nouns.shaped_network import ShapedNetwork
from trimaran.nouns.slurm_settings import SlurmSettings
from trimaran.nouns.variant import Variant
from trimaran.recipe.data_settings import DataSettings
from trimaran.recipe.manifest_settings import ManifestSettings
from trimaran.recipe.ray_settings import RaySettings
from trimaran.recipe.sweep_settings import SweepSettings
from trimaran.recipe.train_settings import TrainSettings

DOCS = Path(__file__).parents[2] / "docs"
# What a file's own name says, or whoever writes the file, a probe for instance.
OF_FILES = {"name", "source", "matmul", "collectives", "attention", "contention", "models", "shaped"}


def first_cells(page: str, head: str) -> str:
    """The first column of the table whose head begins so."""
    table = (DOCS / page).read_text().partition(f"| {head} |")[2].partition("\n\n")[0]
    return "".join(line.split(" | ")[0] for line in table.splitlines())


def chapter(page: str, title: str) -> str:
    """What stands below a title, up to the next one."""
    return re.split(r"^## ", (DOCS / page).read_text().partition(f"## {title}\n")[2], flags=re.MULTILINE)[0]


OWN_CLUSTER = chapter("planning.md", "A cluster of your own")
DIFFERING = chapter("planning.md", "Machines and networks that differ")


@pytest.mark.parametrize(
    ("section", "told"),
    [
        (TrainSettings, first_cells("training.md", "field")),
        (SweepSettings, first_cells("measuring.md", "field of `[sweep]`")),
        (Variant, chapter("measuring.md", "Variants")),
        (SlurmSettings, chapter("measuring.md", "Slurm")),
        (RaySettings, chapter("measuring.md", "Ray")),
        (DataSettings, chapter("data-and-weights.md", "Text")),
        (Model, chapter("data-and-weights.md", "Models")),
        (ShapedNetwork, (DOCS / "network.md").read_text()),
        (Cluster, f"{OWN_CLUSTER}{DIFFERING}"),
        (NodeGroup, f"{OWN_CLUSTER}{DIFFERING}"),
        (Faults, chapter("planning.md", "Machines that fail")),
        (ManifestSettings, chapter("planning.md", "A manifest that starts the training")),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_page_names_every_field_of_a_section(section: type[Noun], told: str) -> None:
    fields = [name for name in section.model_fields if name not in OF_FILES]
    assert [name for name in fields if not re.search(rf"`{name}\b|\b{name}( *=|\])", told)] == []
