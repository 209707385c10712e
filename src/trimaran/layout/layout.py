"""Layout: one way to lay a workload on a cluster; trimaran.layout.rules say whether it is valid."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from trimaran.layout.axes import DEGREES_IN_WORDS, USUAL_PLACEMENT, AxisName, Laid, full_placement
from trimaran.layout.choices import CHOICES, field, usual_chunks, usual_schedule
from trimaran.layout.stages import stack_split
from trimaran.nouns.dispatcher import DispatcherName
from trimaran.nouns.noun import Noun
from trimaran.nouns.precision import PrecisionName
from trimaran.nouns.recompute import Recompute
from trimaran.nouns.stack import (
    Compression,
    ContextParallelKind,
    DataParallelKind,
    ExpertOverlap,
    Offload,
    Schedule,
    Stack,
)
from trimaran.nouns.workload import Workload
from trimaran.operators.counts import head_in_layers


class Layout(Noun, Laid[int]):
    """Degrees of parallelism and the choices that go with them.

    `stage_split` gives the layers of each stage (each virtual stage in pipeline order under
    vpp > 1); empty means the split that the stack would choose. `replica_batches` gives the micro-batches that each
    replica takes in an iteration; empty means all as many. `placement` orders the axes
    from the innermost (neighbouring ranks, inside a node) to the outermost. A `shard` of 0 is DP where ZeRO shards
    anything, else 1; an `etp` of 0 is TP. `size` answers with what they stand for. `placed` has the number of each
    rank's device in the cluster, in order of rank; empty means the devices in their order.
    """

    dp: int = field("dp")
    shard: int = field("shard")
    tp: int = field("tp")
    cp: int = field("cp")
    cp_kind: ContextParallelKind = field("cp_kind")
    pp: int = field("pp")
    ep: int = field("ep")
    etp: int = field("etp")
    dispatcher: DispatcherName = field("dispatcher")
    ep_overlap: ExpertOverlap = field("ep_overlap")
    vpp: int = field("vpp")
    mbs: int = field("mbs")
    zero_stage: int = field("zero_stage")
    dp_kind: DataParallelKind = field("dp_kind")
    sequence_parallel: bool = field("sequence_parallel")
    recompute: Recompute = field("recompute")
    recompute_every: int = field("recompute_every")
    offload: Offload = field("offload")
    compression: Compression = field("compression")
    local_steps: int = field("local_steps")
    fragments: int = field("fragments")
    outer_delay: int = field("outer_delay")
    precision: PrecisionName = field("precision")
    schedule: Schedule = field("schedule")
    stage_split: tuple[Annotated[int, Field(ge=0, le=100_000)], ...] = field("stage_split")
    replica_batches: tuple[Annotated[int, Field(ge=1, le=100_000)], ...] = field("replica_batches")
    placement: tuple[AxisName, ...] = field("placement")
    placed: tuple[Annotated[int, Field(ge=0)], ...] = field("placed")

    @model_validator(mode="before")
    @classmethod
    def _default_schedule(cls, data: object) -> object:
        """A pipeline needs a schedule: the usual one unless one is named, whose chunks are then the usual ones."""
        if not isinstance(data, dict):
            return data
        if data.get("schedule") not in (None, "", "none"):
            return {"vpp": usual_chunks(data["schedule"]), **data}
        pp, vpp = data.get("pp", 1), data.get("vpp", 1)
        known = isinstance(pp, int) and isinstance(vpp, int)
        return {**data, "schedule": usual_schedule(pp, vpp) if known else "none"}

    @field_validator("placement", mode="before")
    @classmethod
    def _name_all_axes(cls, stated: object) -> object:
        return full_placement(tuple(stated)) if isinstance(stated, list | tuple) else stated

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sorted(self.placement) != sorted(USUAL_PLACEMENT):
            raise ValueError(f"placement {self.placement} must name {DEGREES_IN_WORDS} once each")
        return self

    def lies_inside(self, inner: str, outer: str) -> int:
        """1 where the placement has `inner` inside `outer`, else 0."""
        return int(self.placement.index(inner) < self.placement.index(outer))

    def chose(self, choice: str, *words: object) -> Any:
        """Whether a choice is one of `words`."""
        return getattr(self, choice) in words

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches of the replica that has most of them; its last is not full where that does not divide."""
        return max(self.replica_batches, default=0) or -(-global_batch // (self.dp * self.mbs))

    def all_as(self, replica: int) -> Self:
        """The layout whose replicas all take as many micro-batches as this one does."""
        if not self.replica_batches:
            return self
        return self.model_copy(update={"replica_batches": (self.replica_batches[replica],) * self.dp})

    def samples_of(self, replica: int, global_batch: int) -> tuple[int, int]:
        """The first sample of an iteration that a replica takes, counted from 0, and how many it takes."""
        if not self.replica_batches:
            each = global_batch // self.dp
            return replica * each, each
        return self.mbs * sum(self.replica_batches[:replica]), self.mbs * self.replica_batches[replica]

    @property
    def departures(self) -> str:
        """What of it makes the loss another than on other layouts, in short notation; empty where nothing does."""
        inexact = (choice.word.writes(vars(self)) for choice in CHOICES if not choice.exact)
        return ",".join(filter(None, inexact))

    def label(self) -> str:
        """The short notation, `dp2,tp2,pp2,mbs1,...`, with only what differs from the default."""
        return ",".join(filter(None, (choice.word.writes(vars(self)) for choice in CHOICES)))

    def __str__(self) -> str:
        return self.label()


def resolve_split(layout: Layout, workload: Workload, stack: Stack) -> tuple[int, ...]:
    """The stage split that will really run: the layout's own, or the stack's choice."""
    if layout.stage_split:
        return layout.stage_split
    stages = layout.pp * layout.vpp
    model = stack.trained(workload.model)
    return stack_split(stack, model.layers, stages, lambda: head_in_layers(model, workload.seq_len, layout.tp))
