"""What makes two trials the same trial."""

from __future__ import annotations

import hashlib
import json

from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.model import PLAIN
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload

USUAL_WARMUP_STEPS = 2
# Facts of a stack that say how it is predicted, not what runs.
PREDICTION_FACTS = {
    "source", "kernels_like", "gathers_beside_products", "wide_gradients", "lean_activation", "holds_mlp_gradients",
    "alibi_tensor", "loss_chunk_cpu_tokens", "loss_chunk_gpu_tokens", "heap_keeps_logits", "agrees_every_step",
    "recompute_stops_early", "selective", "rms_norm", "native_gelu", "joint_qkv", "repeats_kv", "frees_logits",
    "selective_keeps", "shards_master", "gathers_ends", "low_gradient_bytes", "copies_context", "keeps_gathered",
    "fragmentation", "sequence_parallel_default",
    "software", "flash_kernel", "gathers_behind_forward", "sums_behind_weights", "fused_accumulation", "overlaps_sends",
    "wide_gradient_stages", "loss_copies", "recompute_modules", "recompute_every", "pipelined_zero_stages",
    "overlapped_zero_stages", "sums_behind_products", "recomputes_by_stage",
    "fp8_scaling", "narrow_as", "keeps_casts", "casts_weights_once", "gathers_casts",
    "model_traits",
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
    stated: dict[str, object] = {
        "workload": workload.model_dump(mode="json", exclude={"tokens": True, "model": {"name", *plain}}),
        "layout": layout.model_copy(update={"stage_split": stage_split}).model_dump(mode="json"),
        "stack": stack.model_dump(mode="json", exclude=PREDICTION_FACTS),
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
    if cluster.shaped is not None:
        stated["network"] = cluster.shaped.model_dump(mode="json", exclude={"name"})
    canonical = json.dumps(stated, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]
