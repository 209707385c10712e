"""Every layout that layout.py allows the trimaran stack is trained, whatever it mixes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise, product
from math import prod

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pool import Pool, Run
from shapes import BLOOM, GEMMA, LATENT, LLAMA, NEOX, OLMO, QWEN, SMALL
from trimaran.files.catalogue import load_stack
from trimaran.layout.layout import Layout
from trimaran.layout.rules import violations
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.device import Device
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.model import Model
from trimaran.nouns.workload import Workload
from trimaran.protocol.job import TrainJob

STACK = load_stack("trimaran")
RANKS, BATCH = 8, 24
# Of a replica a step: each costs time, and more of them show what so many show.
MOST_MICRO_BATCHES = 8
DEVICE = Device(name="slot", kind="cpu", peak_tflops={"fp32": 0.1}, mem_gib=4.0, mem_bandwidth_gb_s=20.0)
LINK = Link(bandwidth_gbps=10, latency_us=100)
CLUSTER = Cluster(name="c", device=DEVICE, nodes=1, devices_per_node=RANKS, intra=LINK, inter=LINK)
DEGREES = [degrees for degrees in product(range(1, RANKS + 1), repeat=4) if prod(degrees) <= RANKS]
UNBIASED = SMALL.model_copy(update={"tied_embedding": False, "bias": False})
# Few layers for most, since each costs every step time; one model is deep enough for eight stages.
FAMILIES = (SMALL, BLOOM, LLAMA, QWEN, OLMO, GEMMA, NEOX, LATENT, UNBIASED)
MODELS = st.sampled_from([SMALL, *(family.model_copy(update={"layers": 4}) for family in FAMILIES)])


@st.composite
def splits(draw: st.DrawFn, layers: int, stages: int) -> tuple[int, ...]:
    """Some split of the layers over the stages, or the stack's own choice."""
    if stages > layers or draw(st.booleans()):
        return ()
    cuts = draw(st.sets(st.integers(1, layers - 1), min_size=stages - 1, max_size=stages - 1)) if stages > 1 else set()
    bounds = [0, *sorted(cuts), layers]
    return tuple(end - begin for begin, end in pairwise(bounds))


def _micro_batches(sequences: int) -> list[int]:
    return [m for m in range(1, sequences + 1) if sequences % m == 0 and sequences // m <= MOST_MICRO_BATCHES]


@st.composite
def layouts(draw: st.DrawFn, model: Model) -> Layout:
    """A layout of at most eight ranks that the rules allow."""
    dp, tp, cp, pp = draw(st.sampled_from([d for d in DEGREES if not model.kv_heads % d[1] and not BATCH % d[0]]))
    schedule = draw(st.sampled_from(STACK.schedules)) if pp > 1 else "none"
    vpp = draw(st.integers(2, max(2, model.layers // pp))) if schedule == "interleaved" else 1
    kind = draw(st.sampled_from(STACK.dp_kinds))
    recompute = draw(st.sampled_from(STACK.recomputes))
    return Layout.model_validate(
        {
            "dp": dp, "tp": tp, "cp": cp, "pp": pp, "vpp": vpp, "schedule": schedule, "dp_kind": kind,
            "shard": draw(st.sampled_from([0, *(shard for shard in range(1, dp + 1) if dp % shard == 0)])),
            "cp_kind": draw(st.sampled_from(STACK.context_parallel)),
            "mbs": draw(st.sampled_from(_micro_batches(BATCH // dp))),
            "zero_stage": 3 if kind == "fully_sharded" else draw(st.sampled_from(STACK.zero_stages)),
            "sequence_parallel": draw(st.booleans()) if tp > 1 else False,
            "recompute": recompute,
            "recompute_every": draw(st.integers(1, 3)) if recompute == "full" else 1,
            "stage_split": draw(splits(model.layers, pp * vpp)),
            "placement": tuple(draw(st.permutations(("tp", "cp", "dp", "pp")))),
        }
    )  # fmt: skip


def allowed(layout: Layout, model: Model) -> bool:
    workload = Workload(model=model, seq_len=16, global_batch=BATCH)
    return not any(violations(layout, workload, CLUSTER, STACK))


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_layouts_drawn_at_random_agree_with_one_process(pool: Pool, make_job: Callable[..., TrainJob]) -> None:
    """Two steps each: the first shows losses and gradients, the second what the optimizer made of them."""

    @cache
    def reference(model: Model) -> Run:
        return pool.run(make_job(f"dp1,mbs{BATCH}", model=model, steps=2))

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    @given(data=st.data(), model=MODELS)
    def agrees(data: st.DataObject, model: Model) -> None:
        layout = data.draw(layouts(model).filter(lambda found: allowed(found, model)))
        machines = data.draw(st.sampled_from(("one", "several")), label="machines")
        run = pool.run(make_job(layout.label(), model=model, steps=2), machines)
        expected = reference(model)
        assert run.losses == pytest.approx(expected.losses, rel=1e-5)
        assert run.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4)

    agrees()
