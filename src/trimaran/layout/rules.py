"""Rules: what makes a layout valid for a workload, a cluster and a stack.

A rule has a name, a sentence with both numbers in it, and takes (layout, workload, cluster,
stack): a rule of one stack is not a rule of another. Nothing else in Trimaran decides validity.

What breaks a rule of arithmetic cannot be. What breaks one of the software, or of the machine, is not offered and not
started here, but somebody may have run it: a measured row of it is answered, with the sentence as a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from trimaran.layout import axis_rules, replica_rules, stop_rules
from trimaran.layout.axes import DEGREES, in_words
from trimaran.layout.layout import Layout
from trimaran.layout.places import peak_tflops
from trimaran.layout.schedule import NEEDS
from trimaran.layout.stages import even_split, most_stages
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload

# What a rule is about: sizes that cannot be, what the stack does, or what the cluster has.
RuleOf = Literal["arithmetic", "software", "machine"]


@dataclass(frozen=True)
class Rule:
    """One rule of validity, and what it is `of`. `broken` returns the sentence for the user, or None.

    `reads` names the layout fields that decide it, and no others (`dp*mbs`: only their product does; none where
    workload and stack decide alone): a search asks a rule once for each distinct combination of them.
    """

    name: str
    of: RuleOf
    reads: tuple[str, ...]
    broken: Callable[[Layout, Workload, Cluster, Stack], str | None]


@dataclass(frozen=True)
class Violation:
    """A rule that a layout breaks, what the rule is of, and the sentence that says so."""

    rule: str
    of: RuleOf
    sentence: str


def _devices(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    if layout.devices <= cluster.devices:
        return None
    return (
        f"{in_words(vars(layout))} = {layout.devices} devices, but the cluster "
        f"has {cluster.devices}: lower a degree or state more nodes"
    )


def _global_batch(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    per_step = layout.dp * layout.mbs
    if workload.global_batch % per_step == 0 or layout.replica_batches:
        return None
    nearest = max(per_step, round(workload.global_batch / per_step) * per_step)
    return (
        f"global batch {workload.global_batch} is not a multiple of DP {layout.dp} x micro-batch "
        f"{layout.mbs} = {per_step}: the nearest that divides is {nearest}"
    )


def _ramp_up(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    if workload.ramp_up is None or layout.replica_batches:
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
        between = layout.stage_split[1:-1] if stack.bare_ends else layout.stage_split
        if len(layout.stage_split) != stages or sum(layout.stage_split) != layers or min(between, default=1) < 1:
            return (
                f"stage_split {'-'.join(map(str, layout.stage_split))} has {len(layout.stage_split)} stages of "
                f"{sum(layout.stage_split)} layers, but PP {layout.pp} x VPP {layout.vpp} = {stages} stages and "
                f"{layers} layers are needed, at least one a stage{' but the ends' if stack.bare_ends else ''}"
            )
        return None
    if stages > most_stages(stack, layers):
        return f"PP {layout.pp} x VPP {layout.vpp} = {stages} stages, but the model has {layers} layers: lower PP"
    return None


def _even_stages(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    stages, layers = layout.pp * layout.vpp, workload.model.layers
    if stack.uneven_stages:
        return None
    # Where this holds, even_split gives the first and the last stage one layer fewer than the others.
    ends_lighter = stack.ends_count_as_layers and (layers + 2) % stages == 0
    if layout.stage_split:
        usual = ends_lighter and layout.stage_split == even_split(layers, stages)
        if len(set(layout.stage_split)) > 1 and not usual:
            return (
                f"stage_split {'-'.join(map(str, layout.stage_split))} is uneven, and {stack.name} needs "
                f"{layers} / {stages} layers on every stage: leave stage_split out"
            )
        return None
    if layers % stages and not ends_lighter:
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
        has = f"one of {stack.name}'s {', '.join(stack.schedules)}" if stack.schedules else f"known to {stack.name}"
        return f"schedule {layout.schedule} is not {has}: choose another schedule or stack"
    if NEEDS[layout.schedule].chunks == 1 and layout.vpp > 1:
        return f"schedule {layout.schedule} has one chunk a stage, but VPP is {layout.vpp}: write interleaved"
    return None


def _chunks(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    chunks = NEEDS[layout.schedule].chunks
    if chunks == 0 and layout.vpp == 1:
        return f"the {layout.schedule} schedule needs VPP of 2 or more, but it is 1: raise VPP or write 1f1b"
    if chunks > 1 and layout.vpp != chunks:
        return (
            f"the {layout.schedule} schedule folds {chunks} chunks onto each rank, but VPP is {layout.vpp}: set it to "
            f"{chunks} or write interleaved"
        )
    return None


def _micro_batches(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    needs, name, ramp = NEEDS[layout.schedule], layout.schedule.replace("_", "-"), workload.ramp_up
    batches = ramp.steps(workload.global_batch) if ramp else (workload.global_batch,)
    stated = [(workload.global_batch, each) for each in dict.fromkeys(layout.replica_batches)]
    for batch, micro_batches in stated or ((batch, layout.micro_batches(batch)) for batch in batches):
        if micro_batches % needs.turn(layout.pp):
            return (
                f"the {name} schedule needs micro-batches in multiples of PP {layout.pp}, but there are "
                f"{micro_batches} in a global batch of {batch}: change the micro-batch or PP"
            )
        if micro_batches < (least := needs.least(layout.pp)):
            least_in_words = f"{needs.each} x PP {layout.pp} = {least}" if needs.each > 1 else f"PP {least}"
            return (
                f"the {name} schedule needs at least {least_in_words} micro-batches, but there are {micro_batches} in "
                f"a global batch of {batch}: lower the micro-batch or PP"
            )
    return None


def _zero(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    if layout.zero_stage not in stack.zero_stages:
        return (
            f"ZeRO stage {layout.zero_stage} is not one of {stack.name}'s "
            f"{', '.join(map(str, stack.zero_stages))}: choose one of them"
        )
    if layout.pp > 1 and layout.zero_stage not in stack.pipelined_zero_stages:
        return (
            f"ZeRO stage {layout.zero_stage} with PP {layout.pp}: in a pipeline {stack.name} has ZeRO stages "
            f"{', '.join(map(str, stack.pipelined_zero_stages))}: choose one of them or PP 1"
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
            not stack.can_recompute(layout.recompute),
            f"recompute {layout.recompute} is not one of {stack.name}'s {', '.join(stack.recomputes)}, "
            "or of modules that these name",
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


def _recompute_every(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    every, stages = layout.recompute_every, layout.pp * layout.vpp
    if every > 1 and layout.recompute != "full":
        return (
            f"recompute_every {every} is of layers that are made again whole, but recompute is {layout.recompute}: "
            f"set recompute to full, or recompute_every to 1"
        )
    fewest = workload.model.layers // stages
    if not stack.recomputes_by_stage or every <= max(fewest, 1):
        return None
    return (
        f"recompute of one layer in {every}, but {stack.name} counts the layers of each of PP {layout.pp} x VPP "
        f"{layout.vpp} = {stages} stages, and some have {fewest}: recompute more of them, or lower VPP"
    )


def _model(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    model = workload.model
    if stack.framework != "trimaran":
        return None
    if model.mlp == "relu2":
        return f"model.mlp is relu2, and {stack.name} trains gelu, swiglu and geglu: choose one or another stack"
    if model.head != "vocabulary":
        return (
            f"model.head is {model.head}, and {stack.name} trains a head over the vocabulary: set it to vocabulary "
            f"or choose another stack"
        )
    if model.qk_norm == "all_heads" and model.norm != "rmsnorm":
        return (
            f"model.qk_norm is all_heads and model.norm {model.norm}, and {stack.name} norms all heads as one by their "
            f"root mean square alone: set norm to rmsnorm or qk_norm to head, or choose another stack"
        )
    if model.dropout:
        return (
            f"model.dropout is {model.dropout:g}, and {stack.name} trains without: set it to 0 or choose another stack"
        )
    if workload.capacity_factor is not None:
        return (
            f"workload.capacity_factor is {workload.capacity_factor:g}, and {stack.name} drops no token: leave it out "
            f"or choose another stack"
        )
    if model.latent_attention is not None and (trait := _beside_latent(model)):
        return f"{trait}, and {stack.name} trains latent attention without: leave it out or choose another stack"
    if model.experts and model.bias:
        return (
            f"model.bias is true, and {stack.name} trains {model.experts} experts without biases: set it to false or "
            f"choose another stack"
        )
    return None


def _beside_latent(model: Model) -> str | None:
    """What a model with latent attention has beside it that such attention has no place for."""
    beside = (
        (model.biased_attention != "none", f"model.attention_bias is {model.biased_attention}"),
        (model.qk_norm != "none", f"model.qk_norm is {model.qk_norm}"),
        (model.kv_heads != model.heads, f"model.kv_heads is {model.kv_heads} of {model.heads} heads"),
    )
    return next((stated for is_there, stated in beside if is_there), None)


def trait_it_lacks(model: Model, stack: Stack) -> str | None:
    """The first trait of the model that the stack does not train, as `model.qk_norm is head`; None: it has them all."""
    known = model.traits if stack.model_traits is None else stack.model_traits
    return next((f"model.{trait} is {value}" for trait, value in model.traits.items() if trait not in known), None)


def _model_traits(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    trait = trait_it_lacks(workload.model, stack)
    return f"{trait}, and {stack.name} trains no such model: choose another stack or model" if trait else None


def _sequence_parallel(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    if not layout.sequence_parallel:
        return None
    if layout.tp == 1:
        return "sequence parallelism splits what TP repeats, but TP is 1: raise TP to 2 or turn it off"
    if workload.seq_len % (layout.tp * layout.cp):
        of_ranks = f"TP {layout.tp}" + (f" x CP {layout.cp} = {layout.tp * layout.cp}" if layout.cp > 1 else "")
        return (
            f"seq_len {workload.seq_len} is not a multiple of {of_ranks}, as sequence parallelism needs: "
            f"choose a TP that divides it"
        )
    return None


def _precision(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    if peak_tflops(layout, cluster) is not None:
        return None
    under = [group.device for group in cluster.groups] if layout.placed else [cluster.device]
    device = next(each for each in (*under, cluster.device) if each.peak(layout.precision) is None)
    has = ", ".join(device.peak_tflops)
    return f"precision {layout.precision} is not one that {device.name} computes in ({has}): choose one of them"


# What decides whether replicas hold the same, and in what.
_COPIES = ("dp", "shard", "zero_stage", "dp_kind", "cp", "precision")

RULES: tuple[Rule, ...] = (
    Rule("model", "software", (), _model),
    Rule("model_traits", "software", (), _model_traits),
    Rule("devices", "machine", ("*".join(DEGREES),), _devices),
    Rule("global_batch", "software", ("dp*mbs",), _global_batch),
    Rule("ramp_up", "software", ("dp*mbs",), _ramp_up),
    Rule("heads", "arithmetic", ("tp",), _heads),
    Rule("kv_heads", "software", ("tp",), _kv_heads),
    Rule("ffn_hidden", "arithmetic", ("tp",), _ffn),
    Rule("hidden", "software", ("tp",), _hidden),
    Rule("stages", "arithmetic", ("pp", "vpp", "stage_split"), _stages),
    Rule("even_stages", "software", ("pp", "vpp", "stage_split"), _even_stages),
    Rule("schedule", "software", ("pp", "vpp", "schedule"), _schedule),
    Rule("chunks", "arithmetic", ("vpp", "schedule"), _chunks),
    Rule("micro_batches", "software", ("dp*mbs", "pp", "schedule", "replica_batches"), _micro_batches),
    # no search proposes these, so that it need not tell apart what else they read
    Rule("replica_batches", "arithmetic", ("replica_batches",), replica_rules.replica_batches),
    Rule("unlike_replicas", "software", ("replica_batches",), replica_rules.unlike_replicas),
    Rule("zero_stage", "software", ("zero_stage", "dp_kind", "schedule", "pp"), _zero),
    Rule("stack", "software", ("tp", "pp", "dp_kind", "recompute", "precision", "sequence_parallel"), _capability),
    Rule("recompute_every", "software", ("recompute", "recompute_every", "pp", "vpp"), _recompute_every),
    Rule("sequence_parallel", "software", ("tp", "cp", "sequence_parallel"), _sequence_parallel),
    Rule("tensor_slices", "software", ("tp", "sequence_parallel"), axis_rules.tensor_slices),
    Rule("whole_context", "software", ("cp", "zero_stage"), axis_rules.whole_context),
    Rule("whole_replicas", "software", ("dp", "tp*pp", "zero_stage"), axis_rules.whole_replicas),
    Rule("whole_precision", "software", ("dp*cp", "tp*pp", "zero_stage", "precision"), axis_rules.whole_precision),
    Rule("shard", "arithmetic", ("dp", "shard", "zero_stage"), axis_rules.shard),
    Rule("hybrid_sharding", "software", ("dp", "cp", "shard", "zero_stage"), axis_rules.hybrid_sharding),
    Rule("context_parallel", "software", ("cp", "cp_kind"), axis_rules.context_parallel),
    Rule("context_tokens", "arithmetic", ("cp",), axis_rules.context_tokens),
    Rule("context_halves", "software", ("cp", "cp_kind"), axis_rules.context_halves),
    Rule("context_traits", "software", ("cp", "cp_kind"), axis_rules.context_traits),
    Rule("context_heads", "arithmetic", ("tp", "cp", "cp_kind"), axis_rules.context_heads),
    Rule("context_kv_heads", "software", ("tp", "cp", "cp_kind"), axis_rules.context_kv_heads),
    Rule("experts", "arithmetic", ("tp", "ep", "etp"), axis_rules.experts),
    Rule("expert_fold", "arithmetic", ("dp*tp*cp", "tp", "ep", "etp"), axis_rules.expert_fold),
    Rule("expert_slices", "software", ("tp", "sequence_parallel"), axis_rules.expert_slices),
    Rule("expert_parallel", "software", ("tp", "ep", "etp", "dispatcher"), axis_rules.expert_parallel),
    Rule(
        "expert_overlap",
        "software",
        ("ep", "pp", "schedule", "dispatcher", "ep_overlap", "recompute"),
        axis_rules.expert_overlap,
    ),
    Rule("offload", "software", ("offload", "zero_stage", "pp", "recompute"), axis_rules.offload),
    Rule("offload_alone", "software", ("offload", "zero_stage", "dp*cp"), axis_rules.offload_alone),
    Rule("offload_link", "machine", ("offload",), axis_rules.offload_link),
    Rule("compression", "software", ("compression", *_COPIES), replica_rules.compression),
    Rule("local_steps", "software", ("local_steps", *_COPIES), replica_rules.local_steps),
    Rule("fragments", "software", ("local_steps", "fragments", "outer_delay", "pp"), replica_rules.fragments),
    Rule("precision", "machine", ("precision", "placed"), _precision),
    Rule("placement", "software", ("placement",), axis_rules.placement),
    Rule("delayed_recompute", "software", ("recompute", "precision"), stop_rules.delayed_recompute),
    Rule("biased_slices", "software", ("tp", "etp"), stop_rules.biased_slices),
    Rule("graphs_again", "software", ("recompute",), stop_rules.graphs_again),
    Rule("graphs_offloaded", "software", ("offload",), stop_rules.graphs_offloaded),
    Rule("ulysses_halves", "software", ("cp", "cp_kind"), stop_rules.ulysses_halves),
    Rule("halves_of_slices", "software", ("tp", "cp"), stop_rules.halves_of_slices),
    Rule("narrow_blocks", "software", ("tp", "cp", "mbs", "sequence_parallel", "precision"), stop_rules.narrow_blocks),
    Rule("further_positions", "software", (), stop_rules.further_positions),
    Rule("whole_experts", "software", ("dp", "zero_stage", "ep"), stop_rules.whole_experts),
    Rule(
        "experts_over_copies",
        "software",
        ("dp*tp*cp", "dp", "tp", "shard", "zero_stage", "ep", "etp"),
        stop_rules.experts_over_copies,
    ),
    Rule(
        "stages_among_experts",
        "software",
        ("dp*tp*cp", "dp", "tp", "pp", "ep", "etp", "placement"),
        stop_rules.stages_among_experts,
    ),
    Rule("placed", "arithmetic", ("*".join(DEGREES), "placed"), axis_rules.placed),
)


def violations(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> Iterator[Violation]:
    """Every rule that the layout breaks, in the order of RULES."""
    for rule in RULES:
        if sentence := rule.broken(layout, workload, cluster, stack):
            yield Violation(rule.name, rule.of, sentence)


def check_layout(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> None:
    """Raise TrimaranError with the first broken rule's sentence, if any."""
    for violation in violations(layout, workload, cluster, stack):
        raise TrimaranError(f"layout {layout}: {violation.sentence}")


def odd_but_possible(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> tuple[str, ...]:
    """What is odd about a layout that somebody has run: the sentences of rules of software and machine that it breaks.

    Raises TrimaranError with the first sentence of arithmetic, if any: nobody can have run that.
    """
    broken = tuple(violations(layout, workload, cluster, stack))
    for violation in broken:
        if violation.of == "arithmetic":
            raise TrimaranError(f"layout {layout}: {violation.sentence}")
    return tuple(violation.sentence for violation in broken)
