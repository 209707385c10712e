"""Whatever a layout chooses is written for another trainer or refused: nothing is dropped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trimaran.api import workload_of
from trimaran.files.catalogue import load_stack
from trimaran.layout.choice import Choice
from trimaran.layout.choices import CHOICE, IN_GRID
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.workload import Workload
from trimaran.planner.export.exporters import EXPORTERS, export

DENSE, MIXTURE = workload_of("gpt3-1b3", 512), workload_of("deepseek-v3", 512)
# torchtitan 0.3 has no pipeline of a head that shares the embedding's weights.
UNTIED = DENSE.model_copy(update={"model": DENSE.model.model_copy(update={"tied_embedding": False})})
# Where a choice can be felt: some need a pipeline, shards, parts of a sequence, layers made again, or experts.
FELT_IN = {
    "cp_kind": "dp8,cp2,mbs1,bf16",
    "vpp": "dp8,pp2,vpp3,mbs1,bf16",
    "schedule": "dp8,pp2,mbs1,bf16",
    "shard": "dp8,zero3,fsdp,mbs1,bf16",
    "sequence_parallel": "dp8,tp2,mbs1,bf16",
    "recompute_every": "dp8,recompute-full,mbs1,bf16",
    "placement": "dp4,tp2,pp2,mbs1,bf16",
    "outer_delay": "dp8,mbs1,local8,bf16",
    "fragments": "dp8,mbs1,local8,bf16",
    "ep": "dp8,mbs1,bf16",
    "etp": "dp8,tp2,sp,ep8,mbs1,bf16",
    "dispatcher": "dp8,ep8,etp1,mbs1,bf16",
    "ep_overlap": "dp8,ep8,etp1,mbs1,bf16",
}
OF_EXPERTS = ("ep", "etp", "dispatcher", "ep_overlap")
# Those values that other choices leave free: ZeRO says whether replicas are fully sharded, and PP asks for a schedule.
VALUES = {"etp": (1, 4), "dp_kind": ("parameter_server",), "schedule": CHOICE["schedule"].words[1:]}
# Of the devices what is left is data parallel.
FOLLOWS = {("megatron-lm", "dp")}
# Modules that are made again are called as Megatron-Core calls them: a new one is one more of its own.
WORDED = [choice for choice in IN_GRID if isinstance(choice.default, str) and choice.name != "recompute"]
# Every trainer in each of its versions; a manifest starts our own, by the layout's whole notation.
ASKED = [
    (to, version)
    for to, exporter in EXPORTERS.items()
    if not exporter.starts
    for version in exporter.versions or (None,)
]


def written(layout: Layout, workload: Workload, to: str, version: str | None) -> str | None:
    """What is written but for the lines that people alone read, which name the layout; None where it is refused."""
    try:
        text = export(layout, workload, load_stack("trimaran"), to, version)
    except TrimaranError as error:
        assert "cannot be written for" in str(error)
        return None
    return "\n".join(line for line in text.splitlines() if not line.startswith(("#", '"""')))


def others(choice: Choice, usual: Layout) -> Iterator[Layout]:
    """The layout with each other value of a choice, and the schedule or the chunks that go with it."""
    values = VALUES.get(choice.name) or choice.words or ((2, 4) if choice.is_count else (1, 2))
    stated = usual.model_dump(exclude={"pp": {"schedule"}, "schedule": {"vpp"}}.get(choice.name))
    for value in values:
        if value != getattr(usual, choice.name):
            chunks = {"vpp": 2} if value == "interleaved" else {}
            yield Layout.model_validate(stated | chunks | {choice.name: value})


@pytest.mark.parametrize(("to", "version"), ASKED, ids=lambda asked: asked or "alone")
@pytest.mark.parametrize("choice", IN_GRID, ids=[choice.name for choice in IN_GRID])
def test_a_choice_is_written_or_refused(choice: Choice, to: str, version: str | None) -> None:
    workload = MIXTURE if choice.name in OF_EXPERTS else UNTIED if to == "torchtitan" else DENSE
    usual = parse_layout(FELT_IN.get(choice.name, "dp8,mbs1,bf16"))
    said = written(usual, workload, to, version)
    for layout in others(choice, usual):
        asked = written(layout, workload, to, version)
        assert asked is None or asked != said or (to, choice.name) in FOLLOWS, str(layout)


@pytest.mark.parametrize(("to", "version"), ASKED, ids=lambda asked: asked or "alone")
@pytest.mark.parametrize("choice", WORDED, ids=[choice.name for choice in WORDED])
def test_a_word_that_is_new_is_refused_until_the_trainer_has_it(choice: Choice, to: str, version: str | None) -> None:
    """Whoever adds one to a choice need not know of exporters."""
    workload = MIXTURE if choice.name in OF_EXPERTS else UNTIED if to == "torchtitan" else DENSE
    usual = parse_layout(FELT_IN.get(choice.name, "dp8,mbs1,bf16"))
    assert written(usual.model_copy(update={choice.name: "new"}), workload, to, version) is None
