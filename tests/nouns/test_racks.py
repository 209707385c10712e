"""Racks of several hosts: what of each a job has."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from command import run
from trimaran.cost.table.predict_table import predict_table
from trimaran.files.catalogue import load_cluster
from trimaran.files.row_table import parse_table
from trimaran.planner.sizes import on_devices

RACKS = load_cluster("gb200-nvl72")


@pytest.mark.parametrize(("devices", "of_a_rack"), [(64, 72), (72, 72), (96, 48), (256, 64), (576, 72), (1024, 64)])
def test_a_job_has_as_many_hosts_of_every_rack(devices: int, of_a_rack: int) -> None:
    assert RACKS.of_a_job(devices).devices_per_node == of_a_rack


@given(devices=st.integers(1, 40_000))
def test_a_job_s_part_of_a_rack_is_whole_hosts_with_their_share_of_its_links(devices: int) -> None:
    used = on_devices(RACKS, devices)
    part = used.devices_per_node
    assert 36 < part <= 72 and part % RACKS.devices_per_host == 0
    assert used.devices >= devices
    assert devices <= 72 or part == 72 or devices % part == 0
    assert used.inter.bandwidth_gbps / part == pytest.approx(RACKS.inter.bandwidth_gbps / 72)
    assert used.cards_per_node == part
    assert used.of_a_job(devices) == used


def test_nodes_of_one_host_are_filled_one_after_the_other() -> None:
    nodes = load_cluster("dgx-h100")
    assert nodes.of_a_job(12) is nodes


def test_experts_of_64_devices_stay_within_racks_of_72() -> None:
    """Of 72, 72, 72 and 40 devices three groups of four would have to send their tokens from rack to rack."""
    head = "cluster,stack,model,dp,pp,ep,mbs,gbs,seq_len,precision,devices_per_node,sec_per_it,status\n"
    rows = "".join(
        f"{cluster},megatron-core,qwen3-235b-a22b,64,4,64,1,1024,4096,bf16,{of_a_node},1,ok\n"
        for cluster, of_a_node in (("gb200-nvl72", 4), ("gb200-nvl72", ""), ("gb200-nvl72", 64), ("gb200-nvl72", 72))
    )
    as_hosts, unsaid, as_64, as_72 = predict_table(parse_table(head + rows, "rows"))
    assert as_hosts.estimate is not None and unsaid.estimate is not None, as_hosts.error
    assert as_64.estimate is not None and as_72.estimate is not None
    assert as_hosts.estimate == unsaid.estimate == as_64.estimate
    assert as_72.estimate.sec_per_it > as_64.estimate.sec_per_it


def test_a_plan_counts_the_racks_that_its_job_has() -> None:
    asked = "--model qwen3-235b-a22b --cluster gb200-nvl72 --seq 4096 --gbs 1024 --devices 1024 --top 1 --format json"
    (best,) = json.loads(run("plan", *asked.split()).stdout)["layouts"]
    assert (best["devices"], best["nodes"]) == (1024, 16)
