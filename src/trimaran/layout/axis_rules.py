"""Rules of validity on axes that few layouts have: hybrid sharding, parts of sequences, experts.

Each takes (layout, workload, cluster, stack) and gives the sentence for the user, or None; `RULES` of
trimaran.layout.rules lists them with what they read.
"""

from __future__ import annotations

from trimaran.layout.axes import in_words, places_so, stated_placement
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.precision import PRECISIONS
from trimaran.nouns.recompute import modules_of
from trimaran.nouns.stack import Offload, Stack
from trimaran.nouns.workload import Workload

# What lies in the host's memory by ZeRO's own means, and not without it.
OFFLOADED_BY_ZERO: tuple[Offload, ...] = ("optimizer", "weights")


def placement(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Ranks are laid out in an order that the stack has."""
    if places_so(stack, layout.placement):
        return None
    return (
        f"placement {'-'.join(stated_placement(layout.placement))} is not one that {stack.name} lays out ranks in "
        f"({', '.join(stack.placements)}): choose one of them"
    )


def shard(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Shards are made of equal groups of replicas."""
    if layout.dp % layout.size("shard") == 0:
        return None
    return f"shard {layout.shard} does not divide DP {layout.dp}: choose a shard that divides it, or leave it out"


def hybrid_sharding(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """ZeRO shares out among a part of the replicas where the stack does so."""
    if layout.shard in (0, layout.dp if layout.zero_stage else 1) or (layout.shard == 1 and layout.cp > 1):
        return None
    if layout.zero_stage == 0:
        return f"shard {layout.shard} shares out what ZeRO shards, but ZeRO stage is 0: raise it or leave shard out"
    if layout.shard == 1:
        return f"shard 1 shares out nothing, but ZeRO stage is {layout.zero_stage}: set it to 0, or shard to 2 or more"
    if layout.zero_stage not in stack.hybrid_zero_stages:
        has = f"stages {', '.join(map(str, stack.hybrid_zero_stages))} alone" if stack.hybrid_zero_stages else "none"
        return (
            f"shard {layout.shard} of DP {layout.dp} with ZeRO stage {layout.zero_stage}: of stages that shard among a "
            f"part of the replicas {stack.name} has {has}: leave shard out or choose another stack"
        )
    return None


def context_parallel(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """The stack splits sequences, and in the way that is asked for."""
    if layout.cp == 1:
        return None
    if not stack.context_parallel:
        return f"CP {layout.cp}, but {stack.name} does CP 1 only: choose another layout or stack"
    if layout.cp_kind not in stack.context_parallel:
        return (
            f"context parallelism by {layout.cp_kind} is not one of {stack.name}'s "
            f"{', '.join(stack.context_parallel)}: choose one of them"
        )
    return None


def context_tokens(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """All ranks of a sequence have as many tokens."""
    if workload.seq_len % layout.cp == 0:
        return None
    return f"seq_len {workload.seq_len} is not a multiple of CP {layout.cp}: choose a CP that divides it"


def context_halves(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Under a causal mask late tokens have more to attend to, so that each rank has an early and a late block."""
    if layout.cp == 1 or layout.cp_kind == "ulysses" or workload.seq_len % (2 * layout.cp) == 0:
        return None
    return (
        f"seq_len {workload.seq_len} is not a multiple of 2 x CP {layout.cp}, as each rank has an early and a late "
        f"block of the sequence: choose a CP whose double divides it"
    )


def context_traits(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Windows, sinks, caps and latent attention go with those kinds of context parallelism that the stack has so."""
    if layout.cp == 1 or not stack.context_parallel:
        return None
    traits = workload.model.traits
    for trait, kinds in stack.context_limits:
        if trait in traits and layout.cp_kind not in kinds:
            ways_out = " or ".join([*(f"cp-{kind}" for kind in kinds), "CP 1"])
            return (
                f"model.{trait} is {_briefly(traits[trait])}, but over CP {layout.cp} by {layout.cp_kind} {stack.name} "
                f"attends without: take {ways_out}"
            )
    return None


def _briefly(value: object) -> str:
    """A trait's value where it is a number, else that it is there."""
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else "stated"


def context_heads(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Ulysses deals out whole heads."""
    heads, ranks = workload.model.heads, layout.tp * layout.cp
    if layout.cp == 1 or layout.cp_kind != "ulysses" or heads % ranks == 0:
        return None
    return (
        f"heads {heads} are not a multiple of TP {layout.tp} x CP {layout.cp} = {ranks}, among which ulysses deals "
        f"them out: lower CP or choose another kind of context parallelism"
    )


def context_kv_heads(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Ulysses deals out whole heads of keys and values, where the stack does not repeat them."""
    kv_heads, ranks = workload.model.kv_heads, layout.tp * layout.cp
    if layout.cp == 1 or layout.cp_kind != "ulysses" or stack.context_repeats_kv or kv_heads % ranks == 0:
        return None
    return (
        f"kv_heads {kv_heads} are not a multiple of TP {layout.tp} x CP {layout.cp} = {ranks}, among which ulysses "
        f"deals them out: lower CP or choose another kind of context parallelism"
    )


def tensor_slices(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Ranks of TP have slices of the sequence where the stack knows no other TP."""
    if layout.tp == 1 or layout.sequence_parallel or not stack.tensor_wants_slices:
        return None
    return (
        f"TP {layout.tp} without sequence parallelism, but {stack.name} has each TP rank hold a slice of the "
        f"sequence: turn sequence parallelism on"
    )


def whole_context(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Ranks that share a sequence have whole weights where the stack does not share these out among them."""
    if not stack.whole_weights_alone or layout.cp == 1 or layout.zero_stage:
        return None
    return (
        f"CP {layout.cp} with ZeRO stage 0, but {stack.name} shards weights over CP: set zero_stage to 3 (fsdp) or CP "
        f"to 1"
    )


def _ranks_of_whole(layout: Layout, stack: Stack) -> int:
    """Ranks of a replica whose weights are whole where the stack knows such of one rank alone; 1 elsewhere.

    What a single rank along DP and CP shards is whole, whatever the ZeRO stage.
    """
    sharded = layout.zero_stage > 0 and layout.dp * layout.cp > 1
    return 1 if not stack.whole_weights_alone or sharded else layout.tp * layout.pp


def whole_replicas(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Replicas of several ranks each have whole weights where the stack can sum these."""
    ranks = _ranks_of_whole(layout, stack)
    if layout.dp == 1 or ranks == 1:
        return None
    return (
        f"DP {layout.dp} with ZeRO stage 0 and TP x PP = {ranks}, but {stack.name} sums whole weights of replicas of "
        f"one rank each alone: set zero_stage to 3 (fsdp) or TP and PP to 1"
    )


def whole_precision(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """What is not sharded computes in 16 bit or less where the stack casts it, or where it is held so."""
    ranks = _ranks_of_whole(layout, stack)
    if not PRECISIONS[layout.precision].master or ranks == 1:
        return None
    alone = f" of DP x CP = {layout.dp * layout.cp}" if layout.zero_stage else ""
    return (
        f"precision {layout.precision} with ZeRO stage {layout.zero_stage}{alone} and TP x PP = {ranks}, but "
        f"{stack.name} casts there what it shards alone: set zero_stage to 3 (fsdp) with DP of 2 or more, TP and PP to "
        f"1, or precision to fp32"
    )


def experts(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Experts and their inner width are dealt out evenly."""
    model, etp = workload.model, layout.size("etp")
    if not model.experts:
        if layout.ep > 1 or layout.etp > 1:
            name, degree = ("EP", layout.ep) if layout.ep > 1 else ("ETP", layout.etp)
            return f"{name} {degree} lays out experts, but the model has none: leave it out"
        return None
    if model.experts % layout.ep:
        return f"experts {model.experts} are not a multiple of EP {layout.ep}: choose an EP that divides them"
    if model.moe_ffn_hidden % etp:
        return f"moe_ffn_hidden {model.moe_ffn_hidden} is not a multiple of ETP {etp}: choose an ETP that divides it"
    if (shared := model.shared_experts * model.moe_ffn_hidden) % layout.tp:
        return (
            f"shared_experts {model.shared_experts} x moe_ffn_hidden {model.moe_ffn_hidden} = {shared} are not a "
            f"multiple of TP {layout.tp}: choose a TP that divides them"
        )
    return None


def expert_fold(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Axes of the experts are laid over the ranks of a stage."""
    ranks, etp = layout.dp * layout.cp * layout.tp, layout.size("etp")
    if not workload.model.experts or ranks % (layout.ep * etp) == 0:
        return None
    return (
        f"DP {layout.dp} x CP {layout.cp} x TP {layout.tp} = {ranks} ranks of a stage are not a multiple of EP "
        f"{layout.ep} x ETP {etp} = {layout.ep * etp}: lower EP or ETP"
    )


def expert_parallel(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """The stack lays out experts so."""
    if not workload.model.experts:
        return None
    if layout.ep > 1 and not stack.expert_parallel:
        return f"EP {layout.ep}, but {stack.name} does EP 1 only: choose another layout or stack"
    if layout.size("etp") not in (1, layout.tp) and not stack.own_expert_tensor:
        return f"ETP {layout.etp}, but {stack.name} has ETP 1 or that of TP {layout.tp}: choose one of them"
    if layout.ep > 1 and layout.dispatcher not in stack.dispatchers:
        return (
            f"dispatcher {layout.dispatcher} is not one of {stack.name}'s {', '.join(stack.dispatchers)}: choose one "
            f"of them"
        )
    return None


def expert_overlap(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Exchanges hide as the stack can hide them.

    Of Megatron-Core: core_v0.15.0, megatron/core/transformer/transformer_config.py, __post_init__, and 0.16.1,
    there lines 1889 to 1896 and transformer/moe/token_dispatcher.py, MoEFlexTokenDispatcher.set_shared_experts; of
    torchtitan 0.2.2: distributed/dual_pipe_v.py, lines 32 to 51.
    """
    word, model = layout.ep_overlap, workload.model
    if word == "none":
        return None
    modules, further = modules_of(layout.recompute), stack.trained(model).mtp_depth
    has = " or ".join(schedule for schedule in stack.overlaps_batches if schedule != "none")
    checks = (
        (word not in stack.expert_overlaps, f"{stack.name} has {', '.join(stack.expert_overlaps) or 'none'}"),
        (not model.experts, "the model has no experts"),
        (layout.ep == 1, "EP is 1 and nothing is exchanged"),
        (layout.dispatcher == "allgather", "the dispatcher allgather has nothing run beside it"),
        (word == "shared" and not model.shared_experts, "the model has no shared experts"),
        (
            word == "shared" and layout.dispatcher != "alltoall",
            f"shared experts run beside the dispatcher alltoall alone, and not beside {layout.dispatcher}",
        ),
        (
            word == "batch" and layout.schedule not in stack.overlaps_batches,
            f"PP {layout.pp} runs {layout.schedule} and not {has}",
        ),
        (
            word == "batch" and layout.schedule == "dualpipev" and layout.recompute != "none",
            f"recompute {layout.recompute} does not go with that of dualpipev",
        ),
        (
            word == "batch" and (layout.recompute == "full" or "moe" in modules),
            f"recompute {layout.recompute} makes exchanges again",
        ),
        (
            word == "batch" and further > min(layout.pp - 1, 1),
            f"multi-token prediction of depth {further} over PP {layout.pp} does not go with that, but of depth 1 in a "
            f"pipeline",
        ),
    )
    reason = next((reason for broken, reason in checks if broken), None)
    return reason and f"ep_overlap {word} hides exchanges of tokens, but {reason}: set it to none"


def offload(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """The stack offloads so.

    Activations: Megatron-Core, core_v0.15.0, megatron/core/transformer/transformer_config.py, lines 887 to 902. The
    optimizer: DeepSpeed, deepspeed/runtime/zero/config.py, "Valid for ZeRO stage 1, 2, 3"; Megatron-Core,
    megatron/training/arguments.py, validate_args, asks for the precision-aware optimizer, which by
    megatron/core/optimizer/optimizer_config.py, lines 218 to 224, asks for the distributed one.
    """
    word = layout.offload
    if word == "none":
        return None
    if word not in stack.offloads:
        has = ", ".join(stack.offloads) or "none"
        return f"offload {word} is not one of {stack.name}'s ({has}): choose one of them or another stack"
    if word == "activations" and (layout.pp > 1 or layout.recompute != "none"):
        return (
            f"offload activations goes with one stage and no recompute, not with PP {layout.pp} and recompute "
            f"{layout.recompute}: set pp to 1 and recompute to none"
        )
    if word == "optimizer" and layout.zero_stage == 0:
        return "offload optimizer goes with ZeRO stage 1 or more, not 0: set zero_stage to 1"
    if word == "weights" and layout.zero_stage != 3:
        return (
            f"offload weights goes with ZeRO stage 3, which gathers them, not {layout.zero_stage}: set zero_stage to 3"
        )
    return None


def offload_alone(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """A lone rank runs what offloads: ZeRO, of which the stack may make nothing there."""
    if layout.offload not in OFFLOADED_BY_ZERO or layout.dp * layout.cp > 1:
        return None
    if layout.zero_stage in (0, *stack.lone_zero_stages):
        return None
    return (
        f"offload {layout.offload} with DP {layout.dp} x CP {layout.cp} = 1: {stack.name} offloads what ZeRO stage "
        f"{layout.zero_stage} shards, and shards nothing on one rank: raise dp to 2 or set offload to none"
    )


def offload_link(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Device and host have figures for what is offloaded."""
    device = cluster.device
    if layout.offload == "none" or (device.host_link_gb_s and device.host_mem_gb_s):
        return None
    return (
        f"offload {layout.offload} passes the host's link, but {device.name or 'the device'} states host_link_gb_s "
        f"{device.host_link_gb_s:g} and host_mem_gb_s {device.host_mem_gb_s:g}: state both in the device's file"
    )


def expert_slices(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Each TP rank routes tokens of its own."""
    if not (workload.model.experts and stack.experts_want_slices) or layout.tp == 1 or layout.sequence_parallel:
        return None
    return (
        f"TP {layout.tp} without sequence parallelism, but {stack.name} has each TP rank send tokens of its own to "
        f"experts: turn sequence parallelism on, or set TP to 1"
    )


def placed(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Every rank has a device of its own that the cluster has."""
    devices = layout.placed
    if not devices:
        return None
    if len(devices) != layout.devices:
        return (
            f"placed names {len(devices)} devices, but {in_words(vars(layout))} = {layout.devices} ranks: name one for "
            f"each rank, or leave it out"
        )
    if len(set(devices)) < len(devices):
        twice = next(device for device in devices if devices.count(device) > 1)
        return f"placed names device {twice} {devices.count(twice)} times: a rank needs a device of its own"
    if max(devices) >= cluster.devices:
        return (
            f"placed names device {max(devices)}, but {cluster.name or 'the cluster'} has {cluster.devices}, numbered "
            f"from 0: name others"
        )
    return None
