"""The search over shared sequences and parts of replicas finds what asking every layout by itself would find."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimaran.api import workload_of
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate_many, simulated_many
from trimaran.cost.grid import LayoutGrid
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.layout import axes
from trimaran.layout.axes import PROPOSED_PLACEMENTS
from trimaran.layout.layout import Layout
from trimaran.layout.rules import violations
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.device import Device
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload
from trimaran.planner import sizes
from trimaran.planner.explain.ways_out import ways_out
from trimaran.planner.planner import plan, searched
from trimaran.planner.search import search
from trimaran.planner.search.search import Search
from trimaran.planner.search.settings import PlanSettings, settings_from
from trimaran.planner.sizes import MANY_DEVICES, WORTH_DOUBLING, search_of, with_sensible_size

# All that a search can choose of axes, and little else, which other tests hold.
STACK = Stack(
    name="axes", flash_attention=True, zero_stages=(0, 1, 3), dp_kinds=("all_reduce", "fully_sharded"),
    schedules=("1f1b",), precisions=("bf16",), recomputes=("none", "full"), overlap_dp=0.5,
    context_parallel=("all_gather", "ring", "ulysses"), hybrid_zero_stages=(1, 3), uneven_stages=False,
)  # fmt: skip
ALL = 10_000


def small_cluster(nodes: int, per_node: int, mem_gib: float) -> Cluster:
    device = Device(
        name="small", kind="gpu", peak_tflops={"bf16": 100.0}, mem_gib=mem_gib, mem_bandwidth_gb_s=1000.0,
        multiprocessors=80,
    )  # fmt: skip
    fast, slow = Link(bandwidth_gbps=1000, latency_us=5), Link(bandwidth_gbps=100, latency_us=20)
    return Cluster(name="small", device=device, nodes=nodes, devices_per_node=per_node, intra=fast, inter=slow)


def every_layout(workload: Workload, cluster: Cluster) -> list[Layout]:
    """Brute force: the noun itself for every combination that is worth proposing, asked through `violations`."""
    n, found = cluster.devices, []
    degrees = [d for d in product(range(1, n + 1), repeat=4) if np.prod(d) <= n]
    for (dp, tp, cp, pp), mbs in product(degrees, range(1, workload.global_batch + 1)):
        if workload.global_batch % (dp * mbs) or workload.seq_len % cp or workload.seq_len // cp < axes.LEAST_TOKENS:
            continue
        kinds = ("ring", "all_gather", "ulysses") if cp > 1 else ("ring",)
        zeros = ((0, "all_reduce"), (1, "all_reduce"), (3, "fully_sharded")) if dp * cp > 1 else ((0, "all_reduce"),)
        for kind, (zero, dp_kind), recompute, shard in product(kinds, zeros, ("none", "full"), (0, 2, 3, 4, 8)):
            nodes = shard * cp * tp / cluster.devices_per_node
            if shard and (zero == 0 or shard >= dp or nodes not in (1, 4, 16)):
                continue
            layout = Layout(
                dp=dp, tp=tp, cp=cp, pp=pp, mbs=mbs, cp_kind=kind, zero_stage=zero, dp_kind=dp_kind, shard=shard,
                recompute=recompute, precision="bf16",
            )  # fmt: skip
            if not any(violations(layout, workload, cluster, STACK)):
                orders = PROPOSED_PLACEMENTS if not shard else PROPOSED_PLACEMENTS[:1]
                found += [layout.model_copy(update={"placement": order}) for order in orders]
    return found


def key(layout: Layout) -> tuple[object, ...]:
    """A ranking tells layouts apart by all but placement, the way of sharing sequences and parts of replicas."""
    return (layout.dp, layout.tp, layout.cp, layout.pp, layout.mbs, layout.zero_stage, layout.recompute)


def by_brute_force(workload: Workload, cluster: Cluster) -> dict[tuple[object, ...], float]:
    layouts, case = every_layout(workload, cluster), Case.of(workload, cluster, STACK)
    grid = LayoutGrid.from_layouts(layouts, workload, STACK)
    found = estimate_many(case, grid)
    best: dict[tuple[object, ...], int] = {}
    for row in np.flatnonzero(found.mem_gib <= cluster.device.mem_gib * 0.95).tolist():
        one = key(layouts[row])
        if one not in best or found.sec_per_it[row] < found.sec_per_it[best[one]]:
            best[one] = row
    some = grid.take(np.array(list(best.values()), dtype=np.int64))
    played = simulated_many(case, some, estimate_many(case, some))
    return dict(zip(best, played.sec_per_it.tolist(), strict=True))


@pytest.fixture(autouse=True)
def _every_gain_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of a test are short, and gains that nobody would see are tried too."""
    monkeypatch.setattr(axes, "LEAST_TOKENS", 64)
    monkeypatch.setattr(search, "LEAST_GAIN", 0.0)


@pytest.mark.parametrize("per_node", [6, 8, 72])
def test_parts_of_replicas_that_share_fill_nodes_of_any_number_of_devices(per_node: int) -> None:
    """Powers of two alone fill no node of 6 devices, and no rack of 72."""
    model = Model(name="m", layers=4, hidden=2048, heads=16, vocab=20_000, max_positions=1024)
    workload = Workload(model=model, seq_len=1024, global_batch=4 * per_node)
    held = {"tp": 1, "pp": 1, "cp": 1, "dp": 4 * per_node, "zero_stage": 3, "dp_kind": "fully_sharded"}
    slow = Link(bandwidth_gbps=5, latency_us=20)
    cluster = small_cluster(4, per_node, 80.0).model_copy(update={"inter": slow})
    assert plan(workload, cluster, STACK, fixed=held, top=1).best.layout.shard == per_node


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@pytest.mark.usefixtures("all_told")
@given(
    st.integers(1, 4), st.integers(1, 4), st.sampled_from([128, 256, 1024]), st.sampled_from([1, 2, 4, 6]),
    st.integers(1, 3), st.sampled_from([2, 3, 4]), st.floats(1.6, 4.0),
)  # fmt: skip
def test_search_finds_what_brute_force_finds(
    heads: int, layers: int, seq: int, gbs: int, nodes: int, per_node: int, mem_gib: float
) -> None:
    model = Model(name="m", layers=layers, hidden=heads * 128, heads=heads, vocab=20_000, max_positions=seq)
    workload = Workload(model=model, seq_len=seq, global_batch=gbs)
    cluster = small_cluster(nodes, per_node, mem_gib)
    expected = by_brute_force(workload, cluster)
    try:
        found = plan(workload, cluster, STACK, top=ALL)
    except TrimaranError:
        assert not expected
        return
    ranked = {key(entry.layout): entry.sec_per_it for entry in found.entries}
    assert ranked == pytest.approx(expected)
    few = plan(workload, cluster, STACK, top=3).entries
    assert few[0].sec_per_it <= 1.01 * min(expected.values())
    others = sorted(expected.values())
    others.remove(min(others, key=lambda seconds: abs(seconds - few[0].sec_per_it)))  # which others may take too
    assert [entry.sec_per_it for entry in few[1:]] == pytest.approx(others[: len(few) - 1], rel=0.01)


@pytest.mark.parametrize("model", ["llama3-8b", "llama3-70b"])
@pytest.mark.parametrize("stack", ["megatron-core", "torchtitan"])
def test_long_sequences_on_64_gpus_are_shared_out(model: str, stack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = plan(workload_of(model, 64, seq=131_072), load_cluster("dgx-h100"), load_stack(stack), devices=64, top=3)
    assert found.best.layout.cp > 1
    assert found.best.estimate.fits


def test_where_nothing_fits_the_sentence_says_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    workload, cluster = workload_of("llama3-70b", 64, seq=131_072), load_cluster("dgx-h100")
    says = r"what would help: CP \d+ .*torch-fsdp has not, torchtitan, .*, others have\)"
    with pytest.raises(TrimaranError, match=says):
        plan(workload, cluster, load_stack("torch-fsdp"), devices=64)
    with pytest.raises(TrimaranError, match=r"what would help: .*where cp is not held at 1.*"):
        plan(workload, cluster, load_stack("megatron-core"), devices=64, fixed={"cp": 1, "recompute": "none"})
    large = workload_of("llama3-405b", 64, seq=131_072)
    with pytest.raises(TrimaranError, match=r"what would help: 512 devices$"):
        plan(large, cluster, load_stack("megatron-core"), devices=64)
    assert plan(large, cluster, load_stack("megatron-core"), devices=512, top=1).best.layout.cp > 1


def test_a_way_out_is_what_the_cost_model_says_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    case = Case.of(workload_of("llama3-8b", 8, seq=131_072), load_cluster("dgx-h100"), load_stack("megatron-core"))
    layout = Layout(dp=8, tp=1, zero_stage=1, precision="bf16", recompute="full")
    assert ways_out(layout, case, 1e9, {}, 0).startswith("; what would help: CP 2 (")
    assert ways_out(layout, case, 1.0, {}, 0) == ""


def test_a_means_that_a_rule_refuses_is_no_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    # ZeRO 2 and 3 without a pipeline alone
    case = Case.of(workload_of("gpt3-1b3", 64), load_cluster("dgx-h100"), load_stack("megatron-deepspeed-2025"))
    alone = Layout(dp=8, zero_stage=1, precision="bf16")
    assert "ZeRO stage 3 (" in ways_out(alone, case, 1e9, {}, 0)
    piped = ways_out(Layout(dp=4, pp=2, zero_stage=1, precision="bf16"), case, 1e9, {}, 0)
    assert "recompute of whole layers (" in piped and "ZeRO stage 3" not in piped


def test_shared_sequences_are_no_way_out_where_as_many_devices_help_as_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    # weights and their states are what is too large of a mixture on 4 A100, not what its sequences take
    workload = workload_of("mixtral-8x7b", 64, seq=4096)
    with pytest.raises(TrimaranError, match=r"what would help: 32 devices$"):
        plan(workload, load_cluster("dgx-a100-40gb"), load_stack("trimaran"), devices=4)
    # a batch of one sequence makes no more replicas
    with pytest.raises(TrimaranError, match=r"what would help: CP 8 \(.* GiB, on 32 devices\), 32 devices$"):
        plan(workload_of("mixtral-8x7b", 2, seq=4096), load_cluster("dgx-a100-40gb"), load_stack("trimaran"), devices=4)


def test_a_search_within_a_value_finds_all_up_to_it_and_nothing_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    case = Case.of(workload_of("llama3-8b", 64), load_cluster("dgx-h100"), load_stack("megatron-core"))
    whole = replace(searched(case, settings_from(devices=16))[0], top=20, shown=20)
    values = whole.search().value
    for limit in (values[5] * (1 + 1e-9), values[0] * (1 - 1e-9)):
        assert replace(whole, within=limit).search().value.tolist() == values[values <= limit].tolist()


@pytest.mark.proof
@pytest.mark.parametrize(("model", "batch"), [("mixtral-8x7b", 64), ("llama3-8b", 16), ("llama3-8b", 1)])
def test_a_size_is_worth_its_double_too_little_and_the_largest_are_not_searched(
    model: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    workload = workload_of(model, batch).model_copy(update={"seq_len": 4096})
    case = Case.of(workload, load_cluster("dgx-h100"), load_stack("megatron-core"))
    asked = []

    def recorded(case: Case, settings: PlanSettings, *others: Any) -> Search:
        asked.append(settings.devices)
        return search_of(case, settings, *others)

    monkeypatch.setattr(sizes, "search_of", recorded)
    size = with_sensible_size(case, settings_from())[0].devices
    assert size is not None
    assert max(asked) <= 8 * size < case.cluster.devices / 4

    def seconds(devices: int) -> float:
        found = search_of(case, settings_from(devices=devices, top=1), 1).search().value
        return float(found[0]) if len(found) else math.inf

    assert seconds(size) < WORTH_DOUBLING * seconds(2 * size)
    assert size == case.cluster.devices_per_node or seconds(size // 2) >= WORTH_DOUBLING * seconds(size)


@pytest.mark.proof
def test_on_a_cluster_of_thousands_a_sensible_number_of_devices_is_planned_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    workload, cluster, stack = workload_of("llama3-8b", 512), load_cluster("dgx-h100"), load_stack("megatron-core")
    assert cluster.devices > MANY_DEVICES
    found = plan(workload, cluster, stack, top=1)
    assert found.devices < cluster.devices / 4
    assert found.best.mfu > 0.3
    (note,) = [note for note in found.notes if "planned on" in note]
    assert f"{found.devices} of the {cluster.devices} devices" in note
    seconds = {
        times: plan(workload, cluster, stack, devices=int(found.devices * times), top=1).best.sec_per_it
        for times in (0.5, 1, 2)
    }
    # the simulation of pipelines decides the last per cents
    assert seconds[0.5] / seconds[1] > 0.97 * WORTH_DOUBLING
    assert seconds[1] / seconds[2] < 1.03 * WORTH_DOUBLING
    whole = plan(workload, cluster, stack, top=1, devices=cluster.devices)
    assert whole.devices == cluster.devices
