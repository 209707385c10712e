"""Rules of replicas that take unlike shares, or agree rarely or roughly: steps made apart, compressed gradients."""

from __future__ import annotations

from trimaran.layout.axes import groups
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.stack import FOLDED, Stack
from trimaran.nouns.workload import Workload

# Of more replicas a sentence names the first ones.
_NAMED = 16


def compression(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Gradients are compressed where the stack does so, between copies of whole weights or of the same shards."""
    if layout.compression == "none":
        return None
    if layout.compression not in stack.compressions:
        has = ", ".join(stack.compressions) or "none"
        return f"{stack.name} has no compression {layout.compression} of gradients ({has}): choose another stack"
    if reason := _no_copies(layout, workload):
        return f"compression {layout.compression} is of what replicas send each other, but {reason}: set it to none"
    if layout.compression == "powersgd" and (layout.zero_stage or layout.dp_kind == "fully_sharded"):
        return "compression powersgd is of whole matrices, and shards are parts of them: choose int8, or no ZeRO"
    if layout.precision in ("fp16", "bf16_pure"):
        why = "scales its loss anew" if layout.precision == "fp16" else "has no gradients in fp32"
        return (
            f"compression {layout.compression} keeps in fp32 what it has not sent, and precision {layout.precision} "
            f"{why}: choose bf16 or fp32"
        )
    return None


def local_steps(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Replicas train apart where the stack has the optimizer by which they agree."""
    if not layout.local_steps:
        return None
    if not stack.local_steps:
        return f"local_steps is {layout.local_steps}, and {stack.name} has no outer optimizer: choose another stack"
    if reason := _no_copies(layout, workload):
        return f"local_steps {layout.local_steps} are of replicas that train apart, but {reason}: set it to 0"
    if layout.precision == "bf16_pure":
        return (
            f"local_steps {layout.local_steps} move weights by small differences, and precision bf16_pure keeps none "
            f"in fp32: choose bf16"
        )
    return None


def fragments(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Parts of the model are summed in turns, each at a step of a round, and a sum is there before the next begins."""
    parts, steps, delay = layout.fragments, layout.local_steps, layout.outer_delay
    if parts == 1 and not delay:
        return None
    if not steps:
        return f"fragments {parts} and outer_delay {delay} are of rounds of local steps, and local_steps is 0: set it"
    if steps % parts:
        return f"local_steps {steps} are no whole number of turns for fragments {parts}: choose a divisor of {steps}"
    if parts > workload.model.layers // layout.pp:
        return (
            f"fragments {parts} are of layers, and a stage of PP {layout.pp} has {workload.model.layers // layout.pp} "
            f"of {workload.model.layers}: lower fragments"
        )
    if delay > steps // parts:
        return (
            f"outer_delay {delay} is more than the {steps // parts} steps from one fragment's sum to the next one's "
            f"(local_steps {steps} / fragments {parts}): lower it"
        )
    return None


def replica_batches(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Every replica has a number of micro-batches, and together they are the global batch."""
    stated, dealt = layout.replica_batches, sum(layout.replica_batches)
    if not stated:
        return None
    if len(stated) != layout.dp:
        return f"{_named(layout)} has {len(stated)} numbers, but DP is {layout.dp}: state one for each replica"
    if dealt * layout.mbs != workload.global_batch:
        return (
            f"{_named(layout)} adds up to {dealt} micro-batches of {layout.mbs} = {dealt * layout.mbs} sequences, but "
            f"the global batch is {workload.global_batch}: deal out as many, or leave it out"
        )
    return None


def unlike_replicas(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Replicas take unlike numbers of micro-batches where the stack has them so and they meet once an iteration."""
    if not layout.replica_batches:
        return None
    if not stack.unlike_replicas:
        return f"{_named(layout)}, but all replicas of {stack.name} take as many: leave it out or choose another stack"
    if workload.ramp_up is not None:
        return f"{_named(layout)} deals out one global batch, and a ramp-up has several: leave one of the two out"
    reason = _in_step(layout)
    return reason and f"{_named(layout)} is of replicas that meet at the end of an iteration alone, but {reason}"


def _named(layout: Layout) -> str:
    stated = layout.replica_batches
    return f"replica_batches {'-'.join(map(str, stated[:_NAMED]))}{'-...' if len(stated) > _NAMED else ''}"


def _in_step(layout: Layout) -> str | None:
    """What has replicas meet at other times or otherwise than in one sum of whole gradients, with the way out."""
    etp = layout.size("etp")
    checks = (
        (
            layout.zero_stage > 1,
            f"ZeRO stage {layout.zero_stage} has them meet in each micro-batch: choose ZeRO stage 0 or 1",
        ),
        (layout.dp_kind != "all_reduce", f"the data-parallel kind is {layout.dp_kind}: choose all_reduce"),
        (
            layout.chose("schedule", *FOLDED),
            f"the schedule {layout.schedule} is folded: choose 1f1b, gpipe, interleaved or zero_bubble",
        ),
        (layout.compression != "none", f"compression is {layout.compression}: set it to none"),
        (layout.local_steps > 0, f"local_steps is {layout.local_steps}: set it to 0"),
        (
            layout.ep * etp > 1 and _experts_over_replicas(layout),
            f"EP {layout.ep} x ETP {etp} has ranks of several replicas exchange tokens: set EP to 1",
        ),
    )
    return next((reason for broken, reason in checks if broken), None)


def _experts_over_replicas(layout: Layout) -> bool:
    """Whether ranks that exchange tokens are of several replicas."""
    return any(len({layout.coordinate("dp", rank) for rank in ranks}) > 1 for ranks in groups(layout, "ep", "etp"))


def _no_copies(layout: Layout, workload: Workload) -> str | None:
    """Why no two replicas hold the same weights, or do so in a way that is not built."""
    if layout.dp == 1:
        return "DP is 1"
    if layout.size("replicate") == 1:
        return f"ZeRO stage {layout.zero_stage} shards over all DP {layout.dp} replicas, so that none has a copy"
    if layout.dp_kind == "parameter_server":
        return "dp_kind is parameter_server, which sums on its first rank"
    if layout.cp > 1:
        return f"CP is {layout.cp}, and ranks that share a sequence sum together with replicas"
    if workload.model.experts:
        return f"the model has {workload.model.experts} experts, whose replicas are others"
    return None
