"""Layout: one way to lay a workload on a cluster, and every rule that makes it valid.

A rule has a name, a sentence with both numbers in it, and takes (layout, workload, cluster,
stack): a rule of one stack is not a rule of another. Nothing else in Trimaran decides validity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trimaran.layout.stages import even_split, weighted_split
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import Noun, TrimaranError
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


@dataclass(frozen=True)
class Rule:
    """One rule of validity. `broken` returns the sentence for the user, or None.

    `reads` names the layout fields that decide it, and no others (`dp*mbs`: only their product does; none where
    workload and stack decide alone): a search asks a rule once for each distinct combination of them.
    """

    name: str
    reads: tuple[str, ...]
    broken: Callable[[Layout, Workload, Cluster, Stack], str | None]


@dataclass(frozen=True)
class Violation:
    """A rule that a layout breaks, with the sentence that says so."""

    rule: str
    sentence: str


def _devices(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    if layout.devices <= cluster.devices:
        return None
    return (
        f"DP {layout.dp} x TP {layout.tp} x PP {layout.pp} = {layout.devices} devices, but the cluster "
        f"has {cluster.devices}: lower a degree or state more nodes"
    )


def _global_batch(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    per_step = layout.dp * layout.mbs
    if workload.global_batch % per_step == 0:
        return None
    nearest = max(per_step, round(workload.global_batch / per_step) * per_step)
    return (
        f"global batch {workload.global_batch} is not a multiple of DP {layout.dp} x micro-batch "
        f"{layout.mbs} = {per_step}: the nearest that divides is {nearest}"
    )


def _ramp_up(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    if workload.ramp_up is None:
        return None
    per_step = layout.dp * layout.mbs
    for batch in workload.ramp_up.steps(workload.global_batch):
        if batch % per_step:
            return (
                f"ramp-up reaches a global batch of {batch}, not a multiple of DP {layout.dp} x "
                f"micro-batch {layout.mbs} = {per_step}: lower the micro-batch or change the increment"
            )
    return None


def _divides(what: str, value: int, layout: Layout) -> str | None:
    if value % layout.tp == 0:
        return None
    return f"{what} {value} is not a multiple of TP {layout.tp}: choose a TP that divides it"


def _heads(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    return _divides("heads", workload.model.heads, layout)


def _kv_heads(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    return _divides("kv_heads", workload.model.kv_heads, layout)


def _ffn(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    return _divides("ffn_hidden", workload.model.ffn_hidden, layout)


def _hidden(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    return _divides("hidden", workload.model.hidden, layout)


def _stages(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    stages, layers = layout.pp * layout.vpp, workload.model.layers
    if layout.stage_split:
        if len(layout.stage_split) != stages or sum(layout.stage_split) != layers or min(layout.stage_split) < 1:
            return (
                f"stage_split {'-'.join(map(str, layout.stage_split))} has {len(layout.stage_split)} stages of "
                f"{sum(layout.stage_split)} layers, but PP {layout.pp} x VPP {layout.vpp} = {stages} stages and "
                f"{layers} layers are needed, at least one a stage"
            )
        own = layout.stage_split == even_split(layers, stages) and (layers + 2) % stages == 0
        if not stack.uneven_stages and len(set(layout.stage_split)) > 1 and not (stack.ends_count_as_layers and own):
            return (
                f"stage_split {'-'.join(map(str, layout.stage_split))} is uneven, and {stack.name} needs "
                f"{layers} / {stages} layers on every stage: leave stage_split out"
            )
        return None
    if stages > layers:
        return f"PP {layout.pp} x VPP {layout.vpp} = {stages} stages, but the model has {layers} layers: lower PP"
    # even_split then gives the first and the last stage one layer fewer than the others
    ends_lighter = stack.ends_count_as_layers and (layers + 2) % stages == 0
    if layers % stages and not ends_lighter and not stack.uneven_stages:
        return (
            f"layers {layers} do not split evenly over PP {layout.pp} x VPP {layout.vpp} = {stages} stages, "
            f"which {stack.name} needs: choose a PP that divides {layers}"
        )
    return None


def _schedule(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    if layout.pp == 1:
        if layout.schedule != "none" or layout.vpp > 1:
            return (
                f"schedule {layout.schedule} with VPP {layout.vpp} needs a pipeline, but PP is 1: "
                f"raise PP to 2 or leave both out"
            )
        return None
    if layout.schedule == "none":
        return f"PP {layout.pp} needs a schedule, but it is none: choose one of {', '.join(stack.schedules)}"
    if layout.schedule not in stack.schedules:
        return (
            f"schedule {layout.schedule} is not one of {stack.name}'s {', '.join(stack.schedules)}: choose one of them"
        )
    if (layout.schedule == "interleaved") != (layout.vpp > 1):
        return (
            f"schedule {layout.schedule} with VPP {layout.vpp}: the interleaved schedule needs VPP of 2 or more, "
            f"and the others VPP 1"
        )
    return None


def _micro_batches(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    ramp = workload.ramp_up
    for batch in ramp.steps(workload.global_batch) if ramp else (workload.global_batch,):
        micro_batches = layout.micro_batches(batch)
        if layout.schedule == "interleaved" and micro_batches % layout.pp:
            return (
                f"the interleaved schedule needs micro-batches in multiples of PP {layout.pp}, but there are "
                f"{micro_batches} in a global batch of {batch}: change the micro-batch or PP"
            )
        if layout.schedule == "zero_bubble" and micro_batches < layout.pp:
            return (
                f"the zero-bubble schedule needs at least PP {layout.pp} micro-batches, but there are "
                f"{micro_batches} in a global batch of {batch}: lower the micro-batch or PP"
            )
    return None


def _zero(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    if layout.zero_stage not in stack.zero_stages:
        return (
            f"ZeRO stage {layout.zero_stage} is not one of {stack.name}'s "
            f"{', '.join(map(str, stack.zero_stages))}: choose one of them"
        )
    if (layout.dp_kind == "fully_sharded") != (layout.zero_stage == 3):
        return (
            f"data-parallel kind {layout.dp_kind} with ZeRO stage {layout.zero_stage}: fully sharded means ZeRO "
            f"stage 3, and ZeRO stage 3 means fully sharded: write fsdp for both, or another ZeRO stage"
        )
    if layout.zero_stage >= 2 and layout.schedule == "zero_bubble":
        return (
            f"the zero-bubble schedule puts weight gradients off and keeps them whole, but ZeRO stage "
            f"{layout.zero_stage} shards them: choose ZeRO stage 1 or the schedule 1f1b"
        )
    if layout.dp_kind == "parameter_server" and layout.zero_stage:
        return f"the parameter server keeps the whole optimizer, but ZeRO stage is {layout.zero_stage}: set it to 0"
    return None


def _capability(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    checks: tuple[tuple[bool, str], ...] = (
        (layout.tp > 1 and not stack.tensor_parallel, f"TP {layout.tp}, but {stack.name} does TP 1 only"),
        (layout.pp > 1 and not stack.pipeline_parallel, f"PP {layout.pp}, but {stack.name} does PP 1 only"),
        (
            layout.dp_kind not in stack.dp_kinds,
            f"data-parallel kind {layout.dp_kind} is not one of {stack.name}'s {', '.join(stack.dp_kinds)}",
        ),
        (
            layout.recompute not in stack.recomputes,
            f"recompute {layout.recompute} is not one of {stack.name}'s {', '.join(stack.recomputes)}",
        ),
        (
            layout.precision not in stack.precisions,
            f"precision {layout.precision} is not one of {stack.name}'s {', '.join(stack.precisions)}",
        ),
        (
            layout.sequence_parallel and not stack.sequence_parallel,
            f"sequence parallelism is on, and {stack.name} has none",
        ),
    )
    return next((f"{sentence}: choose another layout or stack" for broken, sentence in checks if broken), None)


def _model(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    model = workload.model
    if stack.framework != "trimaran":
        return None
    if model.head != "vocabulary":
        return (
            f"model.head is {model.head}, and {stack.name} trains a head over the vocabulary: set it to vocabulary "
            f"or choose another stack"
        )
    if model.dropout:
        return (
            f"model.dropout is {model.dropout:g}, and {stack.name} trains without: set it to 0 or choose another stack"
        )
    return None


def _sequence_parallel(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    if not layout.sequence_parallel:
        return None
    if layout.tp == 1:
        return "sequence parallelism splits what TP repeats, but TP is 1: raise TP to 2 or turn it off"
    if workload.seq_len % layout.tp:
        return (
            f"seq_len {workload.seq_len} is not a multiple of TP {layout.tp}, as sequence parallelism needs: "
            f"choose a TP that divides it"
        )
    return None


def _precision(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    if cluster.device.peak(layout.precision) is not None:
        return None
    has = ", ".join(cluster.device.peak_tflops)
    return f"precision {layout.precision} is not one that {cluster.device.name} computes in ({has}): choose one of them"


RULES: tuple[Rule, ...] = (
    Rule("model", (), _model),
    Rule("devices", ("dp*tp*pp",), _devices),
    Rule("global_batch", ("dp*mbs",), _global_batch),
    Rule("ramp_up", ("dp*mbs",), _ramp_up),
    Rule("heads", ("tp",), _heads),
    Rule("kv_heads", ("tp",), _kv_heads),
    Rule("ffn_hidden", ("tp",), _ffn),
    Rule("hidden", ("tp",), _hidden),
    Rule("stages", ("pp", "vpp", "stage_split"), _stages),
    Rule("schedule", ("pp", "vpp", "schedule"), _schedule),
    Rule("micro_batches", ("dp*mbs", "pp", "schedule"), _micro_batches),
    Rule("zero_stage", ("zero_stage", "dp_kind", "schedule"), _zero),
    Rule("stack", ("tp", "pp", "dp_kind", "recompute", "precision", "sequence_parallel"), _capability),
    Rule("sequence_parallel", ("tp", "sequence_parallel"), _sequence_parallel),
    Rule("precision", ("precision",), _precision),
)


def violations(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> Iterator[Violation]:
    """Every rule that the layout breaks, in the order of RULES."""
    for rule in RULES:
        if sentence := rule.broken(layout, workload, cluster, stack):
            yield Violation(rule.name, sentence)


def check_layout(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> None:
    """Raise TrimaranError with the first broken rule's sentence, if any."""
    for violation in violations(layout, workload, cluster, stack):
        raise TrimaranError(f"layout {layout}: {violation.sentence}")
