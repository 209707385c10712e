"""Space: the values that each choice of a layout may take before any rule is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from trimaran.cost.grid import DP_KINDS, EVEN_SPLIT, PLACEMENTS, RECOMPUTES, STACK_SPLIT, WEIGHTED_SPLIT
from trimaran.layout.layout import SCHEDULES, Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError, first_error
from trimaran.nouns.precision import PRECISIONS, PrecisionName
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload

# Micro-batches beyond this are considered only where one is fixed.
LARGEST_MBS = 4096
# With a tolerance on the global batch nearly every micro-batch makes some batch: the useful ones only.
LARGEST_TOLERANT_MBS = 64

Fixed = Mapping[str, object]
_SHORT = {"zero": "zero_stage", "sp": "sequence_parallel"}
FIXABLE = (
    "dp", "tp", "pp", "vpp", "mbs", "zero_stage", "dp_kind", "sequence_parallel", "recompute", "recompute_every",
    "precision", "schedule", "placement",
)  # fmt: skip


@dataclass(frozen=True)
class Space:
    """Candidate values of every choice; words are indices as in LayoutGrid. `free` choices have several."""

    dp: tuple[int, ...]
    tp: tuple[int, ...]
    pp: tuple[int, ...]
    mbs: tuple[int, ...]
    vpp: tuple[int, ...] | None
    zero_stage: tuple[int, ...]
    dp_kind: tuple[int, ...]
    sequence_parallel: tuple[int, ...]
    recompute: tuple[int, ...]
    recompute_every: tuple[int, ...]
    precision: tuple[int, ...]
    schedule: tuple[int, ...]
    placement: tuple[int, ...]
    split: tuple[int, ...]
    fixed: frozenset[str]


def usual_precision(cluster: Cluster, stack: Stack) -> PrecisionName:
    """What a layout trains in when nobody says: 16 bit where device and stack have it; fp32 on a CPU."""
    order: tuple[PrecisionName, ...] = ("fp32", "bf16") if cluster.device.kind == "cpu" else ("bf16", "fp16", "fp32")
    for precision in order:
        if cluster.device.peak(precision) is not None and precision in stack.precisions:
            return precision
    raise TrimaranError(
        f"{cluster.device.name or 'the device'} computes in {', '.join(cluster.device.peak_tflops)} and {stack.name} "
        f"in {', '.join(stack.precisions)}: they share no precision, choose another stack"
    )


def space_of(
    workload: Workload, cluster: Cluster, stack: Stack, devices: int, fixed: Fixed, *, tolerant: bool = False
) -> Space:
    """All values worth proposing; `fixed` choices have their stated values alone.

    TP is at most the heads, PP the layers and DP the global batch, since each must divide or fill the
    other; the micro-batch is at most LARGEST_MBS, or LARGEST_TOLERANT_MBS where
    `tolerant` lets the global batch differ. Raises TrimaranError naming a fixed field that is
    not known or a value that it cannot take.
    """
    stated = {_SHORT.get(name, name): values for name, values in fixed.items()}
    held = {name: _fixed_values(name, values) for name, values in stated.items()}
    model = workload.model
    proposed: dict[str, tuple[int, ...] | None] = {
        "dp": tuple(range(1, min(devices, workload.global_batch) + 1)),
        "tp": tuple(range(1, min(devices, model.heads) + 1)) if stack.tensor_parallel else (1,),
        "pp": tuple(range(1, min(devices, model.layers) + 1)) if stack.pipeline_parallel else (1,),
        "mbs": tuple(range(1, min(workload.global_batch, LARGEST_TOLERANT_MBS if tolerant else LARGEST_MBS) + 1)),
        "vpp": None,
        "zero_stage": stack.zero_stages,
        "dp_kind": tuple(i for i, kind in enumerate(DP_KINDS) if kind in stack.dp_kinds),
        "sequence_parallel": (0, 1) if stack.sequence_parallel else (0,),
        "recompute": tuple(i for i, word in enumerate(RECOMPUTES) if word in stack.recomputes),
        "recompute_every": (1,),
        "precision": held.get("precision") or (tuple(PRECISIONS).index(usual_precision(cluster, stack)),),
        "schedule": tuple(i for i, word in enumerate(SCHEDULES) if word == "none" or word in stack.schedules),
        "placement": tuple(range(len(PLACEMENTS))),
    }
    other = EVEN_SPLIT if stack.head_weighted_stages else WEIGHTED_SPLIT
    split = (STACK_SPLIT, other) if stack.uneven_stages else (STACK_SPLIT,)
    return Space(**{**proposed, **held}, split=split, fixed=frozenset(held))  # type: ignore[arg-type]


def _fixed_values(name: str, values: object) -> tuple[int, ...]:
    """The values of one fixed choice, each checked as Layout checks it; words as indices."""
    if name not in FIXABLE:
        raise TrimaranError(f"fixed field {name!r} is not one of {', '.join(FIXABLE)}: choose one of them")
    several = values if isinstance(values, list | tuple) else str(values).split(",")
    return tuple(dict.fromkeys(_fixed_value(name, value) for value in several))


def _fixed_value(name: str, value: object) -> int:
    text = str(value).strip().lower()
    given: object = tuple(text.split("-")) if name == "placement" else text
    if name == "placement" and given not in PLACEMENTS:
        raise TrimaranError(f"fixed placement {text!r} does not name dp, tp and pp once each: write tp-dp-pp")
    try:
        layout = Layout.model_validate({name: given})
    except ValidationError as error:
        raise TrimaranError(f"fixed {name}: {first_error(error)}") from None
    found = getattr(layout, name)
    words = {"dp_kind": DP_KINDS, "recompute": RECOMPUTES, "precision": tuple(PRECISIONS), "schedule": SCHEDULES}
    if name == "placement":
        return PLACEMENTS.index(found)
    if name in words:
        return words[name].index(found)
    return int(found)
