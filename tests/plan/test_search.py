"""The search finds what asking every layout by itself would find."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimaran import api
from trimaran.api import workload_of
from trimaran.cost.calibration import prior
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate_many, simulated_many
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.likeness import Similar
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.layout.axes import PLACEMENTS, places_so
from trimaran.layout.choices import CHOICE, usual_precision
from trimaran.layout.layout import Layout, resolve_split
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import violations
from trimaran.layout.stages import even_split, weighted_split
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.device import Device
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.stack import FOLDED, Stack
from trimaran.nouns.workload import Workload
from trimaran.operators.counts import head_in_layers
from trimaran.planner import planner
from trimaran.planner.plan import Plan
from trimaran.planner.planner import plan
from trimaran.planner.search import search
from trimaran.planner.search.settings import settings_from

STACKS = {
    name: load_stack(name)
    for name in ("trimaran", "megatron", "megatron-deepspeed", "torch-fsdp", "torch-pipe", "gpipe")
}
# recompute by module has a test of its own (tests/cost/test_recompute_modules.py), which keeps the brute force short
STACKS["trimaran"] = STACKS["trimaran"].model_copy(update={"recomputes": ("none", "selective", "full")})
ALL = 10_000


def small_cluster(nodes: int, per_node: int, mem_gib: float) -> Cluster:
    device = Device(
        name="small", kind="gpu", peak_tflops={"fp32": 20.0, "fp16": 100.0, "bf16": 100.0}, mem_gib=mem_gib,
        mem_bandwidth_gb_s=1000.0, multiprocessors=80,
    )  # fmt: skip
    fast, slow = Link(bandwidth_gbps=1000, latency_us=5), Link(bandwidth_gbps=100, latency_us=20)
    return Cluster(name="small", device=device, nodes=nodes, devices_per_node=per_node, intra=fast, inter=slow)


def every_layout(workload: Workload, cluster: Cluster, stack: Stack) -> list[Layout]:
    """Brute force: the noun itself for every combination, asked through `violations`."""
    n, model = cluster.devices, workload.model
    precision = usual_precision(cluster, stack)
    found = []
    degrees = [(d, t, p) for d, t, p in product(range(1, n + 1), repeat=3) if d * t * p <= n]
    for (dp, tp, pp), mbs in product(degrees, range(1, workload.global_batch + 1)):
        if workload.global_batch % (dp * mbs) or model.heads % tp or pp > model.layers:
            continue  # these three only keep the brute force short; violations would say the same
        pipes = product(range(1, model.layers // pp + 1), CHOICE["schedule"].words)
        # folded schedules are asked about with their own two chunks alone, which keeps the brute force short
        for vpp, schedule in (pipe for pipe in pipes if pipe[1] not in FOLDED or pipe[0] == 2):
            for zero, kind, sp, recompute in product(
                range(4), ("all_reduce", "parameter_server", "fully_sharded"), (False, True),
                ("none", "selective", "full"),
            ):  # fmt: skip
                layout = Layout(
                    dp=dp, tp=tp, pp=pp, vpp=vpp, mbs=mbs, schedule=schedule, zero_stage=zero, dp_kind=kind,
                    sequence_parallel=sp, recompute=recompute, precision=precision,
                )  # fmt: skip
                if not any(violations(layout, workload, cluster, stack)):
                    found.append(layout)
    return list(dict.fromkeys(found))


def with_splits_and_placements(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> list[Layout]:
    stages = layout.pp * layout.vpp
    layers = workload.model.layers
    splits: list[tuple[int, ...]] = [()]
    if stack.uneven_stages:
        head = head_in_layers(workload.model, workload.seq_len, layout.tp)
        splits += [even_split(layers, stages), weighted_split(layers, stages, head)]
    return [
        layout.model_copy(update={"stage_split": split, "placement": placement})
        for split, placement in product(splits, filter(partial(places_so, stack), PLACEMENTS))
    ]


def key(layout: Layout) -> tuple[object, ...]:
    """A ranking tells layouts apart by all but placement and split; a lone replica has no data parallelism."""
    zero = (0, "all_reduce") if layout.dp == 1 else (layout.zero_stage, layout.dp_kind)
    return (
        layout.dp, layout.tp, layout.pp, layout.vpp, layout.mbs, *zero, layout.sequence_parallel, layout.recompute,
        layout.schedule,
    )  # fmt: skip


def by_brute_force(
    workload: Workload, cluster: Cluster, stack: Stack, margin: float
) -> dict[tuple[object, ...], float]:
    variants = [
        variant
        for layout in every_layout(workload, cluster, stack)
        for variant in with_splits_and_placements(layout, workload, cluster, stack)
    ]
    grid = LayoutGrid.from_layouts(variants, workload, stack)
    case = Case.of(workload, cluster, stack)
    found = estimate_many(case, grid)
    fits = found.mem_gib <= cluster.device.mem_gib * (1 - margin)
    best: dict[tuple[object, ...], int] = {}
    by_itself: dict[tuple[object, ...], int] = {}
    for row in np.flatnonzero(fits).tolist():
        one = key(variants[row])
        for of in (best, *([by_itself] if not variants[row].stage_split else [])):
            if one not in of or found.sec_per_it[row] < found.sec_per_it[of[one]]:
                of[one] = row
    # the split that the software makes by itself stands where another gains no more than 1%
    best |= {one: row for one, row in by_itself.items() if found.sec_per_it[row] <= 1.01 * found.sec_per_it[best[one]]}
    rows = np.array(list(best.values()), dtype=np.int64)
    some = grid.take(rows)
    played = simulated_many(case, some, estimate_many(case, some))
    return dict(zip(best, played.sec_per_it.tolist(), strict=True))


@pytest.mark.usefixtures("all_told")
@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
@pytest.mark.parametrize(
    ("heads", "layers", "gbs", "nodes", "per_node", "mem_gib"),
    [
        pytest.param(6, 3, 6, 2, 2, 4.0, marks=pytest.mark.proof),
        pytest.param(4, 4, 4, 2, 3, 2.6, marks=pytest.mark.proof),
        (2, 2, 8, 1, 4, 2.2),
    ],
)
def test_search_finds_exactly_what_brute_force_through_the_rules_finds(
    stack: Stack, heads: int, layers: int, gbs: int, nodes: int, per_node: int, mem_gib: float
) -> None:
    model = Model(name="m", layers=layers, hidden=heads * 64, heads=heads, vocab=50_000, max_positions=256)
    workload = Workload(model=model, seq_len=256, global_batch=gbs)
    cluster = small_cluster(nodes, per_node, mem_gib)
    expected = by_brute_force(workload, cluster, stack, 0.05)
    found = plan(workload, cluster, stack, top=ALL)
    ranked = {key(entry.layout): entry.sec_per_it for entry in found.entries}
    assert set(ranked) == set(expected)
    assert ranked == pytest.approx(expected)
    # Asked for a few, the search leaves out what the closed form puts far behind them.
    few = [entry.sec_per_it for entry in plan(workload, cluster, stack, top=3).entries]
    assert few == pytest.approx(in_order(expected)[:3])


def in_order(seconds: dict[tuple[object, ...], float]) -> list[float]:
    """Seconds as a ranking gives them: the plainest within 1% of the fastest first, then the others by time."""

    def unusual(one: tuple[object, ...]) -> int:
        _, _, _, vpp, _, _, kind, _, recompute, schedule = one
        return (vpp != 1) + (kind != "all_reduce") + (recompute != "none") + (schedule in ("gpipe", "zero_bubble"))

    fastest = min(seconds.values())
    first = min((unusual(one), time) for one, time in seconds.items() if time <= 1.01 * fastest)[1]
    others = sorted(seconds.values())
    others.remove(first)
    return [first, *others]


@pytest.mark.parametrize("gbs", [64, *(pytest.param(gbs, marks=pytest.mark.proof) for gbs in (512, 2048))])
@pytest.mark.parametrize("cluster", ["dgx-h100", "jean-zay-a100-80gb", "aws-p3-16xlarge"])
def test_a_tiny_model_gets_the_plain_layout_where_it_is_as_fast(cluster: str, gbs: int) -> None:
    tiny = Model(name="tiny", layers=4, hidden=128, heads=4, vocab=512, max_positions=256)
    workload = Workload(model=tiny, seq_len=256, global_batch=gbs)
    found = plan(workload, load_cluster(cluster), STACKS["trimaran"], top=40)
    best = found.best.layout
    assert (best.dp_kind, best.recompute, best.schedule, best.vpp) == ("all_reduce", "none", "none", 1)
    assert found.best.sec_per_it <= 1.01 * min(entry.sec_per_it for entry in found.entries)
    others = [entry.sec_per_it for entry in found.entries[1:]]
    assert others == pytest.approx(sorted(others), rel=1e-6)
    # A server that is asked for is given, and equals go by time there.
    served = plan(workload, load_cluster(cluster), STACKS["trimaran"], fixed={"dp_kind": "parameter_server"}, top=1)
    assert served.best.layout.dp_kind == "parameter_server"


def test_what_measured_runs_add_to_their_likes_ranks_them_and_bounds_hold() -> None:
    model = Model(name="m", layers=4, hidden=256, heads=4, vocab=50_000, max_positions=256)
    workload, stack = Workload(model=model, seq_len=256, global_batch=8), STACKS["trimaran"]
    cluster = small_cluster(2, 2, 4.0)
    usual = plan(workload, cluster, stack, top=ALL)
    first, last = usual.entries[0], usual.entries[-1]
    # the best is said to be slower, and the last much faster, than the model has them
    similar = tuple(
        Similar(layout=str(entry.layout), hidden=256, layers=4, heads=4, seq_len=256, global_batch=8, time=weight)
        for entry, weight in ((first, 0.5), (last, -1.5))
    )
    known = prior(cluster, stack).model_copy(update={"similar": similar})
    ranked = plan(workload, cluster, stack, calibration=known, top=ALL).entries
    assert {key(entry.layout) for entry in ranked} == {key(entry.layout) for entry in usual.entries}
    assert str(ranked[0].layout) != str(first.layout)
    grid = LayoutGrid.from_layouts([entry.layout for entry in ranked], workload, stack)
    case = Case.of(workload, cluster, stack, known)
    played = simulated_many(case, grid, estimate_many(case, grid)).sec_per_it
    assert played.tolist() == pytest.approx([entry.sec_per_it for entry in ranked])
    few = [entry.sec_per_it for entry in plan(workload, cluster, stack, calibration=known, top=3).entries]
    expected = dict(zip((key(entry.layout) for entry in ranked), played.tolist(), strict=True))
    assert few == pytest.approx(in_order(expected)[:3])


@st.composite
def questions(draw: st.DrawFn) -> tuple[Workload, Cluster, Stack]:
    heads = draw(st.integers(1, 8))
    model = Model(
        name="m", layers=draw(st.integers(1, 8)), hidden=heads * 32 * draw(st.integers(1, 4)), heads=heads,
        vocab=draw(st.integers(100, 60_000)), max_positions=512, tied_embedding=draw(st.booleans()),
    )  # fmt: skip
    workload = Workload(
        model=model, seq_len=draw(st.sampled_from([64, 96, 512])), global_batch=draw(st.integers(1, 24))
    )
    cluster = small_cluster(draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.floats(1.8, 6.0)))
    return workload, cluster, STACKS[draw(st.sampled_from(sorted(STACKS)))]


def plan_or_none(workload: Workload, cluster: Cluster, stack: Stack, **settings: object) -> Plan | None:
    try:
        return plan(workload, cluster, stack, **settings)
    except TrimaranError:
        return None


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(questions(), st.sampled_from(["time", "cost"]))
def test_bounds_prune_nothing_that_belongs_to_the_best(question: tuple[Workload, Cluster, Stack], goal: str) -> None:
    def ranking(top: int) -> list[float] | None:
        try:
            found = planner.searched(Case.of(*question), settings_from(top=top, goal=goal))[1]
        except TrimaranError:
            return None
        return found.value[:3].tolist()

    # By the closed form alone, which is what is bounded.
    with patch.object(search.Search, "simulate", lambda *_: None), patch.object(planner, "SIMULATED", 1):
        whole = ranking(ALL)
        with patch.object(search, "BLOCK", 4):  # small questions then need several blocks, as large ones do
            few = ranking(3)
    assert few == (None if whole is None else pytest.approx(whole))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(questions())
def test_every_ranked_layout_is_valid_fits_and_stands_in_order(question: tuple[Workload, Cluster, Stack]) -> None:
    workload, cluster, stack = question
    found = plan_or_none(workload, cluster, stack, top=40)
    if found is None:
        return
    assert not [v for entry in found.entries for v in violations(entry.layout, workload, cluster, stack)]
    assert all(entry.mem_gib <= cluster.device.mem_gib * 0.95 for entry in found.entries)
    seconds = [entry.sec_per_it for entry in found.entries]
    assert seconds[0] <= 1.01 * min(seconds)
    assert seconds[1:] == pytest.approx(sorted(seconds[1:]), rel=1e-6)
    for entry in found.entries:
        assert entry.estimate.stage_split == resolve_split(entry.layout, workload, stack)
        assert entry.sec_per_it_low < entry.sec_per_it < entry.sec_per_it_high
    assert found.measure[0] == found.best.layout
    if found.nearest_unfit:
        assert found.nearest_unfit.estimate.mem_gib > cluster.device.mem_gib * 0.95
        assert found.nearest_unfit.estimate.sec_per_it < found.best.sec_per_it
        assert not list(violations(found.nearest_unfit.layout, workload, cluster, stack))


@pytest.mark.parametrize(
    ("model", "cluster", "stack", "devices", "gbs"),
    [
        ("qwen3-235b-a22b", "jean-zay-a100-80gb", "torchtitan-0.2-compiled", 17, 777),
        ("mixtral-8x7b", "dgx-h100", "megatron", 8, 512),
        ("deepseek-v3", "h20-8x-node", "megatron", 17, 777),
    ],
)
def test_the_nearest_where_nothing_fits_is_one_that_every_rule_allows(
    model: str, cluster: str, stack: str, devices: int, gbs: int
) -> None:
    workload, on = workload_of(model, gbs, seq=4096), load_cluster(cluster)
    with pytest.raises(TrimaranError) as refused:
        planner.plan_with(Case.of(workload, on, load_stack(stack)), settings_from(devices=devices))
    found = re.search(r"fits; the nearest is (\S+): .* needs ([\d.]+) GiB, .* may use ([\d.]+) GiB", str(refused.value))
    assert found, refused.value
    assert float(found[2]) > float(found[3])
    assert not list(violations(parse_layout(found[1]), workload, on, load_stack(stack)))


def every_mixture_layout(
    workload: Workload, cluster: Cluster, stack: Stack, pipes: Sequence[dict[str, object]] = ({},)
) -> list[Layout]:
    """Brute force over the experts' axes as well, under the words that the stack proposes and a few pipelines."""
    n, model, own = cluster.devices, workload.model, (1, 0) if stack.own_expert_tensor else (0,)
    found = []
    for dp, tp, pp in product(range(1, n + 1), repeat=3):
        if dp * tp * pp > n or workload.global_batch % dp or model.heads % tp or pp > model.layers:
            continue
        for mbs, zero, sp, recompute, ep, etp, dispatcher, pipe in product(
            range(1, workload.global_batch + 1), stack.zero_stages, (False, True),
            ("none", "full", "layernorm+moe_act", "layernorm+moe"), range(1, model.experts + 1), own,
            stack.dispatchers, pipes,
        ):  # fmt: skip
            fields = {
                "dp": dp, "tp": tp, "pp": pp, "mbs": mbs, "zero_stage": zero, "sequence_parallel": sp,
                "recompute": recompute, "ep": ep, "etp": etp, "dispatcher": dispatcher, "precision": "bf16",
                "dp_kind": "fully_sharded" if zero == 3 else "all_reduce",
            }  # fmt: skip
            layout = Layout.model_validate(fields | (pipe if pp > 1 else {}))
            same = (
                (tp == 1 and etp != own[0])
                or (ep == 1 and dispatcher != stack.dispatchers[0])
                or (dp == 1 and zero > 0)
            )
            if not same and not any(violations(layout, workload, cluster, stack)):
                found.append(layout)
    return list(dict.fromkeys(found))


@pytest.mark.usefixtures("all_told")
@pytest.mark.parametrize("mem_gib", [80.0, pytest.param(1.4, marks=pytest.mark.proof)])
def test_search_over_folded_schedules_finds_what_brute_force_finds(mem_gib: float) -> None:
    """DualPipeV with and without the overlap of exchanges that it is made for, ZB-V and 1F1B."""
    model = Model(
        name="m", layers=4, hidden=256, heads=4, ffn_hidden=1024, vocab=8_192, max_positions=256, mlp="swiglu",
        norm="rmsnorm", positions="rotary", bias=False, experts=4, top_k=2, moe_ffn_hidden=2048,
    )  # fmt: skip
    workload, cluster = Workload(model=model, seq_len=256, global_batch=8), small_cluster(1, 4, mem_gib)
    stack = load_stack("torchtitan").model_copy(
        update={
            "schedules": ("1f1b", *FOLDED), "context_parallel": (), "uneven_stages": False, "recompute_every": (1,),
            "recomputes": ("none", "full"), "hybrid_zero_stages": (), "dispatchers": ("alltoall",),
        }
    )  # fmt: skip
    case = Case.of(workload, cluster, stack)
    pipes = [
        {"schedule": "1f1b"},
        *({"schedule": word, "ep_overlap": hides} for word in FOLDED for hides in ("none", "batch")),
    ]
    layouts = every_mixture_layout(workload, cluster, stack, pipes)
    assert {layout.schedule for layout in layouts} == {"none", "1f1b", *FOLDED}
    assert {layout.schedule for layout in layouts if layout.ep_overlap == "batch"} == {"dualpipev"}
    grid = LayoutGrid.from_layouts(layouts, workload, stack)
    fits = np.flatnonzero(estimate_many(case, grid).mem_gib <= mem_gib * 0.95)
    assert len(fits) > 0 and (mem_gib > 10 or len(fits) < len(layouts))
    some = grid.take(fits)
    seconds = simulated_many(case, some, estimate_many(case, some)).sec_per_it
    expected = {layouts[row].label(): each for row, each in zip(fits.tolist(), seconds.tolist(), strict=True)}
    found = plan(workload, cluster, stack, top=ALL, fixed={"precision": "bf16"})
    ranked = {entry.layout.model_copy(update={"stage_split": ()}).label(): entry.sec_per_it for entry in found.entries}
    assert set(ranked) == set(expected)
    assert ranked == pytest.approx(expected)


@pytest.mark.usefixtures("all_told")
@pytest.mark.parametrize(
    ("mem_gib", "experts", "dense"), [(80.0, 8, 0), (1.22, 8, 1), (1.2, 4, 0)], ids=["roomy", "tight", "tighter"]
)
def test_search_over_experts_finds_what_brute_force_finds(mem_gib: float, experts: int, dense: int) -> None:
    model = Model(
        name="m", layers=3, hidden=256, heads=4, ffn_hidden=1024, vocab=8_192, max_positions=256, mlp="swiglu",
        norm="rmsnorm", positions="rotary", bias=False, experts=experts, top_k=2, moe_ffn_hidden=2048,
        dense_layers=dense,
    )  # fmt: skip
    workload = Workload(model=model, seq_len=256, global_batch=4)
    cluster = small_cluster(2, 4, mem_gib)
    usual = load_stack("megatron-core").recomputes
    stack = load_stack("megatron-core").model_copy(
        update={
            "schedules": ("1f1b",), "context_parallel": (), "uneven_stages": False, "recompute_every": (1,),
            "recomputes": tuple(word for word in usual if word not in ("selective", "mlp")),
        }
    )  # fmt: skip
    case = Case.of(workload, cluster, stack)
    layouts = every_mixture_layout(workload, cluster, stack)
    grid = LayoutGrid.from_layouts(layouts, workload, stack)
    closed = estimate_many(case, grid)
    fits = np.flatnonzero(closed.mem_gib <= mem_gib * 0.95)
    assert len(fits) > 0 and (mem_gib > 10 or len(fits) < len(layouts))
    some = grid.take(fits)
    seconds = simulated_many(case, some, estimate_many(case, some)).sec_per_it
    expected = {layouts[row].label(): each for row, each in zip(fits.tolist(), seconds.tolist(), strict=True)}
    found = plan(workload, cluster, stack, top=ALL, fixed={"placement": "tp-dp-pp", "precision": "bf16"})
    ranked = {entry.layout.model_copy(update={"stage_split": ()}).label(): entry.sec_per_it for entry in found.entries}
    assert set(ranked) == set(expected)
    assert ranked == pytest.approx(expected)
    few = plan(workload, cluster, stack, top=3, fixed={"placement": "tp-dp-pp", "precision": "bf16"})
    assert [entry.sec_per_it for entry in few.entries] == pytest.approx(sorted(expected.values())[:3], rel=1e-2)


@pytest.mark.parametrize(
    ("stack", "overlap"), [("megatron-core", "batch"), ("megatron-core", "none,batch"), ("torchtitan", "none,batch")]
)
def test_bounds_know_of_exchanges_that_hide(stack: str, overlap: str) -> None:
    workload, cluster = workload_of("qwen3-30b-a3b", 64, seq=4096), load_cluster("dgx-h100")
    case = Case.of(workload, cluster, load_stack(stack))
    asked = {"devices": 16, "fixed": {"ep_overlap": overlap, "vpp": (1, 2), "recompute": "none"}}

    def ranking(top: int) -> list[float]:
        return planner.searched(case, settings_from(top=top, **asked))[1].value[:3].tolist()

    with patch.object(search.Search, "simulate", lambda *_: None), patch.object(planner, "SIMULATED", 1):
        whole = ranking(ALL)
        with patch.object(search, "BLOCK", 4):
            assert ranking(3) == pytest.approx(whole)


@pytest.mark.parametrize("fixed", [{"tp": 8, "pp": 16}, {"tp": 8, "pp": 16, "vpp": 8}], ids=["sought", "fixed"])
def test_virtual_stages_may_leave_the_ends_to_embedding_and_head(fixed: dict[str, object]) -> None:
    """126 layers are 128 virtual stages: that was not sought, and fixed it was refused for want of two layers."""
    found = api.plan(
        "llama3.1-405b", "dgx-h100", 2048, devices=16384, seq=8192, stack="megatron-core", fix=fixed, top=1
    )
    assert found.best.layout.vpp == 8
    assert found.best.estimate.stage_split == (0,) + 126 * (1,) + (0,)
