"""What ranks lose by waiting for the slowest of them."""

from __future__ import annotations

import numpy as np
import pytest

from trimaran.api import workload_of
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.estimates import Estimate
from trimaran.cost.meetings import GPU_DEVIATION, KNOWN_GPUS
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.layout.notation import parse_layout


def predicted(cluster: str, stack: str, layout: str, per_replica: int) -> Estimate:
    """An iteration in which every replica has as many sequences, however many there are."""
    shape = parse_layout(layout)
    workload = workload_of("llama3-8b", per_replica * shape.dp, seq=2048)
    return estimate(Case.of(workload, load_cluster(cluster), load_stack(stack)), shape)


@pytest.mark.parametrize("layout", ["dp{},mbs1,fsdp,bf16", "dp{},tp4,mbs1,sp,bf16", "dp{},pp4,mbs1,bf16"])
def test_the_slowest_of_more_gpus_is_slower_as_draws_of_them_are(layout: str) -> None:
    """The largest of a few thousand draws, from which the factor's formula is not taken."""
    stack = "torchtitan" if "fsdp" in layout else "megatron-core"
    # of one micro-batch: of more the head adds up its gradients, of which more replicas have smaller shares
    few, many = (predicted("dgx-h100", stack, layout.format(dp), 1) for dp in (2, 512))
    devices = [parse_layout(layout.format(dp)).devices for dp in (2, 512)]
    draws = np.random.default_rng(0).standard_normal((500, max(devices)))
    largest = [draws[:, :count].max(axis=1).mean() for count in (max(devices[0], KNOWN_GPUS), devices[1])]
    expected = 1.0 + GPU_DEVIATION * (largest[1] - largest[0])
    assert 1.02 < expected < 1.05
    for part in ("forward", "head"):
        assert getattr(many.time, part) / getattr(few.time, part) == pytest.approx(expected, abs=0.002)


def test_gpus_of_a_node_and_cpus_take_what_they_are_known_to_take() -> None:
    one, node = (predicted("dgx-h100", "torchtitan", f"dp{dp},mbs1,fsdp,bf16", 4) for dp in (2, 8))
    assert node.time.forward == pytest.approx(one.time.forward)
    few, many = (predicted("fugaku-a64fx", "megatron-cpu", f"dp{dp},tp4,pp4,mbs1", 4) for dp in (2, 256))
    assert many.time.forward == pytest.approx(few.time.forward)
