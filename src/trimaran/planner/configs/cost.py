"""What a configuration of another trainer would cost on a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.estimates import Estimate
from trimaran.cost.memory.limit import memory_limit_gib
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.layout.flops import OWN_FORMULA, mfu, tflops_per_device
from trimaran.layout.layout import Layout
from trimaran.layout.rules import violations
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.stack import Stack
from trimaran.planner.configs.read import read_config
from trimaran.planner.configs.resolve import Given, layout_of
from trimaran.planner.configs.stated import Stated
from trimaran.planner.explain.bottleneck import bottleneck, memory_sentence
from trimaran.planner.export.exporters import EXPORTERS
from trimaran.planner.sizes import on_devices

# The stack of a trainer's configuration that says no more of it: the one that is told by what export writes for it.
_STACKS = {"accelerate": "torch-fsdp"} | {to: exporter.stack for to, exporter in EXPORTERS.items()}
_MARGIN = 0.05


@dataclass(frozen=True)
class ConfigCost:
    """A configuration as a layout, and its cost as the cost model predicts it.

    `remarks` say what was not stated, is not counted or was not read, and how something was read, each after its kind.
    """

    trainer: str
    layout: Layout
    case: Case
    devices: int
    estimate: Estimate
    tflops: float
    mfu: float | None
    bottleneck: str
    memory: str
    remarks: tuple[tuple[str, str], ...]


def cost_of(path: Path, form: str, given: Given) -> ConfigCost:
    """Read a configuration and predict it. Raises TrimaranError naming everything that is not stated and is needed."""
    stated = read_config(path, form)
    stack = _stack(stated, given, path.name)
    layout, workload, remarks = layout_of(stated, given, stack, path.name)
    cluster = on_devices(load_cluster(given.cluster), layout.devices)
    case = Case.of(workload, cluster, stack)
    broken = list(violations(layout, workload, cluster, stack))
    if impossible := [violation.sentence for violation in broken if violation.of == "arithmetic"]:
        raise TrimaranError(f"{path.name} is {layout}, which cannot be: {impossible[0]}")
    remarks += [("not as known", violation.sentence) for violation in broken]
    remarks += [("not counted", f"{trait} of the model") for trait in workload.model.uncounted]
    predicted = estimate(case, layout, simulate=True)
    limit = float(memory_limit_gib(cluster, np.array([layout.devices]), _MARGIN)[0])
    peak = cluster.device.peak(layout.precision)
    seconds = predicted.sec_per_it
    return ConfigCost(
        trainer=stated.trainer,
        layout=layout,
        case=case,
        devices=layout.devices,
        estimate=predicted,
        tflops=tflops_per_device(workload, layout.tp, layout.devices, seconds, OWN_FORMULA),
        mfu=None if peak is None else mfu(workload, layout.tp, layout.devices, seconds, peak),
        bottleneck=bottleneck(layout, case, predicted),
        memory=memory_sentence(predicted, limit, _MARGIN),
        remarks=tuple(remarks),
    )


def _stack(stated: Stated, given: Given, file: str) -> Stack:
    """The trainer's stack with what its configuration switches on or off; one that is given by name as it is."""
    if given.stack is not None:
        return load_stack(given.stack)
    name = stated.stack_name or _STACKS.get(stated.trainer)
    if name is None:
        words = {"dp": stated.replicas, **stated.layout}
        layout = ", ".join(f"{axis} {words[axis]}" for axis in ("dp", "tp", "cp", "pp", "mbs") if words.get(axis))
        raise TrimaranError(
            f"{file} is {stated.trainer}'s, of {layout}: no stack here is that software, name the nearest, as --stack "
            f"megatron-core"
        )
    stack = load_stack(name)
    return stack.model_copy(update=stated.stack)
