"""Mixtures of experts where ranks are slots of a CPU: code that is generated for products, cores that are shared."""

from __future__ import annotations

import pytest

from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.estimates import Estimate
from trimaran.files.catalogue import load_stack
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.device import Device
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.hardware.measured import Contention
from trimaran.nouns.model import Model
from trimaran.nouns.workload import Workload


def predicted(case: Case, text: str) -> Estimate:
    return estimate(case, parse_layout(text))


def test_generated_code_of_experts_products_takes_memory_and_fills_blocks_on_a_cpu() -> None:
    """Where a probe found code: two matrices' of it, and half a block a local expert more to compute."""
    model = Model(layers=4, hidden=384, heads=6, vocab=4096, experts=8, top_k=2, moe_ffn_hidden=512, mlp="swiglu")
    cpu = Device(kind="cpu", cores=1, peak_tflops={"fp32": 0.2, "bf16": 0.4}, mem_gib=12, mem_bandwidth_gb_s=20)
    fast, stack = Link(bandwidth_gbps=80, latency_us=5), load_stack("trimaran")
    plain = Cluster(device=cpu, nodes=1, devices_per_node=2, intra=fast, inter=fast)
    probed = plain.model_copy(update={"device": cpu.model_copy(update={"experts_code_mib": {"fp32": 26.0}})})
    asked = Workload(model=model, seq_len=256, global_batch=8)
    for text, generates in (("dp1,mbs4", True), ("dp2,mbs4,ep2", True), ("dp1,mbs4,bf16", False)):
        before, after = (predicted(Case.of(asked, cluster, stack), text) for cluster in (plain, probed))
        if not generates:
            assert after == before
            continue
        assert after.memory[0].buffers - before.memory[0].buffers == pytest.approx(2 * 26.0 / 1024)
        # 256 rows an expert, or 512 of two ranks' tokens, and half a block of 32
        more = 16 / (512 if "ep2" in text else 256)
        assert 1.0 < after.memory[0].activations / before.memory[0].activations < 1.0 + more
        assert 1.0 < after.time.forward / before.time.forward < 1.2
    dense = asked.model_copy(update={"model": model.model_copy(update={"experts": 0, "top_k": 0})})
    alike = [predicted(Case.of(dense, cluster, stack), "dp1,mbs4") for cluster in (plain, probed)]
    assert alike[0] == alike[1]


@pytest.mark.parametrize(
    ("cores", "ep", "busy"),
    # On cores of their own the others' work takes nothing from the busiest rank. Of four ranks on two cores it runs at
    # half its speed until they have done theirs, (4 - 2) / 3 of the mean each, and then at its own.
    [(4, 4, 2.0), (2, 4, 2 / 3 + (2 - 2 / 3) / 2), (2, 2, 1.0)],
)
def test_the_busiest_rank_has_a_core_to_itself_once_the_others_wait(cores: int, ep: int, busy: float) -> None:
    device = Device(kind="cpu", peak_tflops={"fp32": 0.1}, mem_gib=16, mem_bandwidth_gb_s=1e6, cores=1)
    turns = [(n, max(1.0, n / cores)) for n in (2, 4)]
    slower = tuple(Contention(ranks=n, matmul=slow, memory=slow, overhead=slow) for n, slow in turns)
    link = Link(bandwidth_gbps=1e6, latency_us=0.0)
    machine = Cluster(device=device, nodes=1, devices_per_node=4, intra=link, inter=link, contention=slower)
    model = Model(layers=2, hidden=1024, heads=8, vocab=64, max_positions=64, experts=8, top_k=2, moe_ffn_hidden=8192)
    stack = load_stack("trimaran")

    def experts_s(load: float) -> float:
        asked = Workload(model=model, seq_len=64, global_batch=8, expert_imbalance=load)
        return estimate(Case.of(asked, machine, stack), parse_layout(f"dp4,ep{ep},mbs2")).time.forward

    without = experts_s(1.0)
    # an expert's products are all but a few per cent of the forward
    assert experts_s(2.0) / without == pytest.approx(busy, rel=0.08)
