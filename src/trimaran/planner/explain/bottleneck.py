"""Bottleneck: what a layout loses most time to, and what would have to change."""

from __future__ import annotations

from trimaran.cost.estimate import MEMORY_PARTS, Estimate
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.workload import Workload

# Time parts that a different layout or faster hardware could avoid.
_LOSSES = ("recompute", "head", "tp", "pp", "bubble", "dp", "optimizer", "overhead")
# Where no loss takes this share of an iteration, the matrix products themselves are the bottleneck.
_SMALL = 0.05


def bottleneck(layout: Layout, workload: Workload, cluster: Cluster, predicted: Estimate) -> str:
    """One sentence: the largest loss of time, its share, where it comes from and what would lessen it."""
    name = max(_LOSSES, key=lambda part: float(getattr(predicted.time, part)))
    share = getattr(predicted.time, name) / predicted.sec_per_it
    if share < _SMALL:
        useful = (predicted.time.forward + predicted.time.backward) / predicted.sec_per_it
        return f"compute {useful:.0%}: forward and backward themselves; only a faster device or more of them helps"
    return f"{name} {share:.0%}: {_cause(name, layout, workload, cluster, predicted)}"


def _cause(name: str, layout: Layout, workload: Workload, cluster: Cluster, predicted: Estimate) -> str:
    per_node, m = cluster.devices_per_node, predicted.micro_batches
    across = layout.tp * layout.stride("tp") > per_node
    causes = {
        "recompute": "activations are computed twice to save memory; more memory or a smaller micro-batch",
        "head": f"the logits over {workload.model.vocab} words sit on the slowest stage; fewer layers there, more TP",
        "tp": f"TP {layout.tp} reduces activations {'across nodes' if across else 'inside the node'}; a smaller TP",
        "pp": f"{layout.pp} stages wait for sends; a faster network between them, or fewer stages",
        "bubble": f"{layout.pp} stages fill and drain over {m} micro-batches; more of them (a larger global batch, a "
        f"smaller DP x micro-batch), fewer stages, or a better split",
        "dp": f"{layout.dp} replicas agree on gradients; a larger global batch, more overlap or a faster network",
        "optimizer": "the step passes through all states; a higher ZeRO stage or a larger global batch",
        "overhead": f"{m} micro-batches each cost launches; a larger micro-batch"
        if m > 1
        else "launches and the loop itself; a larger batch or model",
    }
    return causes[name]


def memory_sentence(predicted: Estimate, limit_gib: float, margin: float) -> str:
    """Why a layout does not fit (or that it does): the fullest stage, its largest part and the limit."""
    fullest = max(predicted.memory, key=lambda stage: stage.total)
    largest = max(MEMORY_PARTS, key=lambda part: float(getattr(fullest, part)))
    needs = f"stage {fullest.stage} needs {predicted.mem_gib:.1f} GiB, {largest} {getattr(fullest, largest):.1f} of it"
    free = f"{limit_gib:.1f} GiB (margin {margin:.0%} left free)"
    if predicted.mem_gib <= limit_gib:
        return f"{needs}, of {free}"
    return f"{needs}, but a rank may use {free}: lower it by {predicted.mem_gib - limit_gib:.1f} GiB"
