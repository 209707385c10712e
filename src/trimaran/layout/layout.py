"""Layout: one way to lay a workload on a cluster; trimaran.layout.rules say whether it is valid."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trimaran.layout.stages import even_split, weighted_split
from trimaran.nouns.noun import Noun
from trimaran.nouns.precision import PrecisionName
from trimaran.nouns.stack import DataParallelKind, Recompute, Schedule, Stack
from trimaran.nouns.workload import Workload
from trimaran.operators.counts import head_in_layers

Axis = Literal["tp", "pp", "dp"]
SCHEDULES: tuple[Schedule, ...] = ("none", "gpipe", "1f1b", "interleaved", "zero_bubble")
# Longer runs of equal stages are written `6x10` in the short notation.
_LONG_RUN = 4


class Layout(Noun):
    """Degrees of parallelism and the choices that go with them.

    `stage_split` gives the layers of each stage (each virtual stage in pipeline order under
    vpp > 1); empty means the split that the stack would choose. `placement` orders the axes
    from the innermost (neighbouring ranks, inside a node) to the outermost.
    """

    dp: int = Field(default=1, gt=0, le=10_000_000)
    tp: int = Field(default=1, gt=0, le=10_000_000)
    pp: int = Field(default=1, gt=0, le=10_000_000)
    vpp: int = Field(default=1, gt=0, le=100_000)
    mbs: int = Field(default=1, gt=0, le=100_000_000)
    zero_stage: int = Field(default=0, ge=0, le=3)
    dp_kind: DataParallelKind = "all_reduce"
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    recompute_every: int = Field(default=1, gt=0, description="full recompute of every n-th layer")
    precision: PrecisionName = "fp32"
    schedule: Schedule = "none"
    stage_split: tuple[Annotated[int, Field(gt=0, le=100_000)], ...] = ()
    placement: tuple[Axis, Axis, Axis] = ("tp", "dp", "pp")

    @model_validator(mode="before")
    @classmethod
    def _default_schedule(cls, data: object) -> object:
        """A pipeline needs a schedule: 1F1B (interleaved when vpp > 1) unless one is named."""
        if not isinstance(data, dict) or data.get("schedule") not in (None, "", "none"):
            return data
        pp, vpp = data.get("pp", 1), data.get("vpp", 1)
        if isinstance(pp, int) and isinstance(vpp, int) and pp > 1:
            return {**data, "schedule": "interleaved" if vpp > 1 else "1f1b"}
        return {**data, "schedule": "none"}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sorted(self.placement) != ["dp", "pp", "tp"]:
            raise ValueError(f"placement {self.placement} must name dp, tp and pp once each")
        return self

    @property
    def devices(self) -> int:
        """Ranks that the layout uses: DP x TP x PP."""
        return self.dp * self.tp * self.pp

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches of one replica in one iteration (rounded down where it does not divide)."""
        return global_batch // (self.dp * self.mbs)

    def stride(self, axis: Axis) -> int:
        """Distance in ranks between two neighbours of a group along `axis`."""
        degrees = {"dp": self.dp, "tp": self.tp, "pp": self.pp}
        stride = 1
        for name in self.placement:
            if name == axis:
                return stride
            stride *= degrees[name]
        raise AssertionError(axis)

    def rank_of(self, dp: int, tp: int, pp: int) -> int:
        """Global rank of the given coordinates."""
        return dp * self.stride("dp") + tp * self.stride("tp") + pp * self.stride("pp")

    def label(self) -> str:
        """The short notation, `dp2,tp2,pp2,mbs1,...`, with only what differs from the default."""
        parts = [f"dp{self.dp}", f"tp{self.tp}", f"pp{self.pp}"]
        if self.vpp > 1:
            parts.append(f"vpp{self.vpp}")
        parts.append(f"mbs{self.mbs}")
        if self.zero_stage:
            parts.append(f"zero{self.zero_stage}")
        if self.dp_kind != "all_reduce":
            parts.append({"parameter_server": "ps", "fully_sharded": "fsdp"}[self.dp_kind])
        if self.sequence_parallel:
            parts.append("sp")
        if self.recompute != "none":
            every = str(self.recompute_every) if self.recompute_every > 1 else ""
            parts.append(f"recompute-{self.recompute}{every}")
        if self.precision != "fp32":
            parts.append(self.precision)
        usual = "none" if self.pp == 1 else ("interleaved" if self.vpp > 1 else "1f1b")
        if self.schedule != usual:
            parts.append(self.schedule)
        if self.stage_split:
            parts.append("split" + _runs(self.stage_split))
        if self.placement != ("tp", "dp", "pp"):
            parts.append("place-" + "-".join(self.placement))
        return ",".join(parts)

    def __str__(self) -> str:
        return self.label()


def _runs(split: tuple[int, ...]) -> str:
    """A stage split in short: `5-6x10-5`, where `6x10` stands for ten stages of 6 layers."""
    lengths = [(layers, len(list(same))) for layers, same in groupby(split)]
    words = [[f"{layers}x{n}"] if n > _LONG_RUN else [str(layers)] * n for layers, n in lengths]
    return "-".join(word for run in words for word in run)


def resolve_split(layout: Layout, workload: Workload, stack: Stack) -> tuple[int, ...]:
    """The stage split that will really run: the layout's own, or the stack's choice."""
    if layout.stage_split:
        return layout.stage_split
    stages = layout.pp * layout.vpp
    model = workload.model
    if stack.head_weighted_stages:
        return weighted_split(model.layers, stages, head_in_layers(model, workload.seq_len, layout.tp))
    return even_split(model.layers, stages)
