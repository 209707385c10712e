"""What makes two trials the same trial."""

from __future__ import annotations

import hashlib
import json

from trimaran.layout.axes import stated_placement
from trimaran.layout.choices import CHOICE
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.model import PLAIN
from trimaran.nouns.recompute import modules_of
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload

USUAL_WARMUP_STEPS = 2
# Facts of a stack that say what runs, as they were when stores began: all others say how it is predicted.
RUN_FACTS = {
    "name", "framework", "flash_attention", "fused_softmax", "fused_softmax_max_seq", "fused_gelu", "dropout",
    "keeps_freed_memory", "fused_layernorm", "fused_optimizer", "fp32_softmax", "fp32_loss", "overlap_dp", "overlap_pp",
    "splits_sends", "recomputes_stage", "master_weight_bytes", "grad_bytes_16bit", "bucket_elements", "uneven_stages",
    "ends_count_as_layers", "head_weighted_stages", "tied_embedding_replicated", "pads_vocab", "schedules",
    "zero_stages", "dp_kinds", "precisions", "recomputes", "sequence_parallel", "tensor_parallel", "pipeline_parallel",
    "memory_report",
}  # fmt: skip

# Choices that layouts had when stores began. Those from later on are said where they are not as usual, so that one more
# leaves stored trials what they are.
_FIRST_CHOICES = {
    "dp", "tp", "pp", "vpp", "mbs", "zero_stage", "dp_kind", "sequence_parallel", "recompute", "recompute_every",
    "precision", "schedule", "stage_split", "placement",
}  # fmt: skip


def trial_key(
    workload: Workload,
    layout: Layout,
    stack: Stack,
    cluster: Cluster,
    *,
    stage_split: tuple[int, ...],
    steps: int,
    warmup_steps: int = USUAL_WARMUP_STEPS,
    document_mask: bool = False,
    variant: str = "",
) -> str:
    """A hash of all that defines a trial, the same in every process and on every day.

    The cluster counts by what it is (device, slots, cores), not by what a probe measured on it:
    a second probe differs by a per cent and must not make finished trials look new. Names of
    models and the extent of the training (`tokens`) do not change a trial either. A stage split
    that is left to the stack and the same split written out are one trial.
    """
    device = cluster.device
    # traits are said where a model has them, so that stores from before there were any still know their trials
    plain = PLAIN.keys() - workload.model.traits.keys()
    unsaid = {"tokens"} | ({"capacity_factor"} if workload.capacity_factor is None else set())
    unsaid |= {"expert_imbalance"} if workload.expert_imbalance == 1.0 else set()
    chosen = layout.model_copy(update={"stage_split": stage_split}).model_dump(mode="json")
    chosen = {name: value for name, value in chosen.items() if not _is_later_default(name, value)}
    chosen["placement"] = list(stated_placement(layout.placement))
    stated: dict[str, object] = {
        "workload": workload.model_dump(
            mode="json", exclude={**dict.fromkeys(unsaid, True), "model": {"name", "mtp_depth", *plain}}
        ),
        "layout": chosen,
        "stack": _run_facts(stack),
        "device": {"name": device.name, "kind": device.kind, "cores": device.cores, "clock_ghz": device.clock_ghz},
        "node": {
            "devices": cluster.devices_per_node,
            "cores": cluster.cores_per_node,
            "used": -(-layout.devices // cluster.devices_per_node),
        },
        "steps": steps,
        "variant": variant,
    }
    # said where they are not as usual, so that stores from before they counted still know their trials
    if warmup_steps != USUAL_WARMUP_STEPS:
        stated["warmup_steps"] = warmup_steps
    if document_mask:
        stated["document_mask"] = True
    if cluster.groups:
        stated["groups"] = [
            {"name": group.name, "nodes": group.nodes, "devices": group.devices_per_node, "device": group.device.name}
            for group in cluster.groups
        ]
    if cluster.shaped is not None:
        unsaid = {"name"} if cluster.shaped.nodes else {"name", "nodes"}
        stated["network"] = cluster.shaped.model_dump(mode="json", exclude=unsaid)
    canonical = json.dumps(stated, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def _run_facts(stack: Stack) -> dict[str, object]:
    """What runs, without what a stack learned to do later: modules that it makes again and 8 bit, which layouts say."""
    facts = stack.model_dump(mode="json", include=RUN_FACTS)
    return facts | {
        "recomputes": [word for word in stack.recomputes if not modules_of(word)],
        "precisions": [word for word in stack.precisions if word != "fp8"],
    }


def _is_later_default(name: str, value: object) -> bool:
    plain = CHOICE[name].default
    return name not in _FIRST_CHOICES and value == (list(plain) if isinstance(plain, tuple) else plain)
