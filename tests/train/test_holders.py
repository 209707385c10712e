"""Which rank holds what: weights among those that share and copy them, and tokens among those that share a sequence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shapes import LLAMA, SMALL
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.layout.layout import resolve_split
from trimaran.layout.notation import parse_layout
from trimaran.nouns.model import Model
from trimaran.nouns.stack import ContextParallelKind
from trimaran.nouns.workload import Workload
from trimaran.protocol.job import TrainJob
from trimaran.train.comm.group import Group, GroupFactory
from trimaran.train.comm.mesh import build_mesh
from trimaran.train.comm.sequence_share import SequenceShare
from trimaran.train.engine.flat_weights import FlatWeights
from trimaran.train.engine.optimizers import make_optimizer
from trimaran.train.model.gpt import Stage
from trimaran.train.model.weight import drawn
from trimaran.train.run.memory import memory_parts

CPU, STACK = torch.device("cpu"), load_stack("trimaran")
WIDE = {"hidden": 96, "ffn_hidden": 384, "head_dim": 4}


class Unconnected(GroupFactory):
    """Groups of which one rank alone exists."""

    def get(self, ranks: tuple[int, ...], me: int, *, returning: bool = False, beside: bool = False) -> Group | None:
        return Group(ranks, ranks.index(me), None) if me in ranks else None


def weights_of(text: str, rank: int, model: Model) -> FlatWeights:
    """The weights of one rank of a layout."""
    layout, workload = parse_layout(text), Workload(model=model, seq_len=16, global_batch=24)
    mesh = build_mesh(layout, rank, range(layout.devices), Unconnected(CPU))
    assert mesh is not None
    stage = Stage(model, layout, resolve_split(layout, workload, STACK), mesh)
    return FlatWeights(stage, layout, mesh, drawn(1), CPU)


@pytest.mark.parametrize(
    "layout",
    ["dp4", "dp4,zero1", "dp4,shard2,zero3", "dp2,cp2,zero2", "dp2,tp2,cp2", "dp4,shard2,cp2,zero1", "dp2,cp2,ps",
     "dp2,shard1,cp2,tp2,zero3", "dp2,pp2,cp2,zero1", "dp6,shard3,zero2"],
)  # fmt: skip
@pytest.mark.parametrize("model", [SMALL, LLAMA], ids=["tied", "untied"])
def test_every_weight_is_counted_by_one_rank(layout: str, model: Model) -> None:
    counted: dict[str, int] = {}
    for rank in range(parse_layout(layout).devices):
        flat = weights_of(layout, rank, model)
        # what is counted is owned
        assert all(any(len(part.within(owned)) == len(part) for owned in flat.owned) for part in flat.counted)
        for name, place in flat.places.items():
            own = sum(len(place.span.within(span)) for span in flat.counted)
            counted[name] = counted.get(name, 0) + own
    specs = {name: place.spec for name, place in weights_of("dp1", 0, model).places.items()}
    for name, spec in specs.items():
        rows, *rest = spec.shape
        rows += -rows % 256 if spec.real_rows is not None and "tp2" in layout else 0
        assert counted.pop(name) == torch.Size((rows, *rest)).numel(), name
    # a copy of the tied embedding on the last stage
    assert not any(counted.values())


@pytest.mark.parametrize(
    "layout",
    ["dp8,shard2,zero1", "dp8,shard4,zero2", "dp8,shard2,fsdp", "dp4,shard2,cp2,fsdp", "dp2,cp4,zero1",
     "dp2,cp2,tp2", "dp2,shard1,cp2,zero3", "dp4,zero2"],
)  # fmt: skip
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rank_holds_the_bytes_that_the_cost_model_says(
    make_job: Callable[..., TrainJob], layout: str, precision: str
) -> None:
    model = SMALL.model_copy(update=WIDE)
    job = make_job(f"{layout},mbs3,{precision}", model=model)
    flat = weights_of(f"{layout},mbs3,{precision}", 1, model)
    optimizer = make_optimizer("adam", flat, job.train)
    held = memory_parts(flat, optimizer.state, {"peak": 1.0, "baseline": 0.0})
    # between steps no unit's gradients are whole; the places stay at which two layers' are while they are summed
    stack = STACK.model_copy(update={"sums_by_unit": False})
    predicted = estimate(Case.of(job.workload, load_cluster("jean-zay-a100-80gb"), stack), job.layout).memory[0]
    layer = next(len(unit.span) * unit.grads.element_size() for unit in flat.units if unit.name == "layers.0")
    for names in (("gradients",), ("optimizer",), ("weights",)):
        beside = 2 * layer / 2**30 if flat.zero_stage >= 2 and names == ("gradients",) else 0.0
        # each weight begins on a line of 64 elements, and each shard of a unit
        said = sum(getattr(predicted, name) for name in names) + beside
        assert sum(held[name] for name in names) == pytest.approx(said, rel=0.03), names


@pytest.mark.parametrize("kind", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ranks_of_a_sequence_hold_each_token_once_and_attend_to_as_many(kind: ContextParallelKind, ranks: int) -> None:
    tokens = 2 * ranks * 3
    shares = [SequenceShare(Group(tuple(range(ranks)), index, None), kind) for index in range(ranks)]
    places = [share.positions(tokens // ranks, CPU) for share in shares]
    assert sorted(torch.cat(places).tolist()) == list(range(tokens))
    assert all(torch.equal(place, place.sort().values) for place in places)
    attended = {(place + 1).sum().item() for place in places}
    assert len(attended) == 1 or kind == "ulysses"
    whole = torch.arange(2 * tokens).view(2, tokens)
    assert all(torch.equal(share.of(whole, 1), whole[:, place]) for share, place in zip(shares, places, strict=True))
