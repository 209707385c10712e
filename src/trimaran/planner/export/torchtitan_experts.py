"""How experts are laid out in torchtitan's settings (config/job_config.py of 0.2.2, config/configs.py of 0.3.0)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimaran.layout.layout import Layout
from trimaran.nouns.dispatcher import DispatcherName
from trimaran.nouns.model import Model

# Words of 0.2's expert_parallel_comm_backend, and of what 0.3's models take as moe_comm_backend.
BACKENDS: Mapping[DispatcherName, str] = {"alltoall": "standard", "deepep": "deepep", "hybridep": "hybridep"}

# Of 0.2 alone: DualPipeV runs one micro-batch's exchanges beside another's layers, which it does unless told not to.
OVERLAPS = "pipeline_parallel_expert_parallel_overlap"


def untold_experts(layout: Layout, model: Model, version: str) -> tuple[tuple[bool, str], ...]:
    """What of the experts' layout torchtitan has no setting for, as what refuse_first takes."""
    if not model.experts:
        return ()
    etp, known = layout.size("etp"), (1, layout.tp) if version == "0.2" and layout.ep > 1 else (1,)
    return (
        (layout.ep > 1 and etp not in known, f"ETP {etp} beside TP {layout.tp}"),
        (layout.ep == 1 and etp != layout.tp, f"ETP {etp} beside TP {layout.tp} without EP"),
        (layout.ep > 1 and layout.dispatcher not in BACKENDS, f"dispatcher {layout.dispatcher}"),
        (
            layout.ep > 1 and layout.dispatcher == "hybridep" and version == "0.2",
            "dispatcher hybridep (0.3 has: --for-version 0.3)",
        ),
    )


def expert_settings(layout: Layout, model: Model, version: str) -> dict[str, Any]:
    """The degrees; 0.3 has experts' tensor parallelism 1 alone, and takes the dispatcher with the model."""
    if not model.experts or layout.ep == 1:
        return {}
    settings: dict[str, Any] = {"expert_parallel_degree": layout.ep}
    if version == "0.2":
        settings["expert_tensor_parallel_degree"] = layout.size("etp")
        settings["expert_parallel_comm_backend"] = BACKENDS[layout.dispatcher]
        if layout.schedule == "dualpipev":
            settings[OVERLAPS] = layout.ep_overlap == "batch"
    return settings
