"""Claims about what a trial is known by."""

from __future__ import annotations

from typing import Any

from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.device import Device
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.model import Model
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload
from trimaran.store import trial_key

LINK = Link(bandwidth_gbps=10, latency_us=1)
CLUSTER = Cluster(
    device=Device(name="cpu", kind="cpu", peak_tflops={"fp32": 0.1}, mem_gib=4, mem_bandwidth_gb_s=10, cores=1),
    nodes=1, devices_per_node=4, intra=LINK, inter=LINK, cores_per_node=2,
)  # fmt: skip
WORKLOAD = Workload(model=Model(layers=4, hidden=64, heads=4, vocab=256), seq_len=32, global_batch=8)


def key(
    layout: str = "dp2,mbs1", workload: Workload = WORKLOAD, cluster: Cluster = CLUSTER, steps: int = 6, **other: Any
) -> str:
    parsed: Layout = parse_layout(layout)
    split = parsed.stage_split or ((4,) if parsed.pp == 1 else (2, 2))
    return trial_key(workload, parsed, Stack(name="s"), cluster, stage_split=split, steps=steps, **other)


def test_a_trial_is_the_same_after_another_probe_and_under_another_name() -> None:
    device = CLUSTER.device.model_copy(update={"peak_tflops": {"fp32": 0.11}, "mem_bandwidth_gb_s": 11.0})
    assert key(cluster=CLUSTER.model_copy(update={"device": device, "source": "probe"})) == key()
    named = WORKLOAD.model_copy(update={"model": WORKLOAD.model.model_copy(update={"name": "mine"}), "tokens": 5000})
    assert key(workload=named) == key()
    assert key("dp1,pp2,mbs1") == key("dp1,pp2,mbs1,split2-2")


def test_trials_that_differ_in_anything_that_matters_have_different_keys() -> None:
    other_device = CLUSTER.model_copy(update={"device": CLUSTER.device.model_copy(update={"cores": 2})})
    keys = [
        key(), key("dp2,mbs2"), key("dp2,mbs1,recompute-full"), key("dp1,pp2,mbs1"), key("dp1,pp2,mbs1,split3-1"),
        key(steps=7), key(variant="OMP_NUM_THREADS=2"), key(cluster=other_device),
        key(warmup_steps=3), key(document_mask=True),
        key(workload=WORKLOAD.model_copy(update={"global_batch": 16})),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)


def test_a_trial_of_an_earlier_version_keeps_its_key() -> None:
    workload = Workload(model=load_model("gpt2-124m"), seq_len=1024, global_batch=16)
    layout = parse_layout("dp2,tp2,pp2,mbs1,zero1,sp,bf16")
    cluster, stack = load_cluster("dgx-a100-80gb"), load_stack("trimaran")
    assert (
        trial_key(workload, layout, stack, cluster, stage_split=(6, 6), steps=6) == "f637fc1844c8dc6f1bd2dacf2a995b00"
    )
