"""The pipeline simulator, the recurrence that plays many pipelines at once, and the closed form that ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.cost.calibration import resolve_calibration
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.estimates import TimeParts
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.layers.layer_work import Shapes
from trimaran.cost.pipeline import lockstep
from trimaran.cost.pipeline.closed_form import pipeline_runs, pipeline_time
from trimaran.cost.pipeline.lockstep import play
from trimaran.cost.pipeline.runs import PipelineRuns
from trimaran.cost.pipeline.stage_times import StageTimes
from trimaran.cost.simulate import PipelineRun, SendTimes, simulate
from trimaran.cost.stage_work import stage_work
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.layout.choices import index_of, usual_chunks
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.layout.schedule import actions
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.device import Device
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.hardware.measured import Contention, MatmulRate
from trimaran.nouns.model import Model
from trimaran.nouns.stack import FOLDED, Schedule
from trimaran.nouns.workload import Workload


def run(
    schedule: Schedule, ranks: int, micro_batches: int, stages: int | None = None, link: float = 0.0
) -> PipelineRun:
    count = stages or ranks
    return PipelineRun(
        ranks,
        micro_batches,
        schedule,
        (1.0,) * count,
        (2.0,) * count,
        (1.0,) * count,
        (SendTimes(link, link),) * ranks,
    )


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (4, 8), (4, 3), (7, 20)])
def test_gpipe_and_1f1b_take_m_plus_p_minus_1_slots(ranks: int, micro_batches: int) -> None:
    for schedule in ("gpipe", "1f1b"):
        assert simulate(run(schedule, ranks, micro_batches)).duration_s == 3.0 * (micro_batches + ranks - 1)


def test_interleaving_divides_the_bubble_by_the_chunks() -> None:
    # 2 chunks a rank, so that a virtual stage takes half as long: (p - 1)(F + B) / v of bubble.
    timeline = simulate(run("interleaved", 4, 16, stages=8))
    assert timeline.duration_s == 2 * 3.0 * 16 + 3.0 * 3


def test_zero_bubble_is_shorter_and_keeps_no_more_micro_batches() -> None:
    plain, zero = run("1f1b", 4, 12), run("zero_bubble", 4, 12)
    # F + B - 2W a stage of fill, with F = B_input = W = 1: one slot for each stage but the first.
    assert simulate(zero).duration_s == 3.0 * 12 + 3.0
    assert simulate(plain).duration_s == 3.0 * 12 + 9.0


def test_every_micro_batch_goes_forward_and_backward_once_on_every_stage() -> None:
    for schedule, stages in (("gpipe", 4), ("1f1b", 4), ("zero_bubble", 4), ("interleaved", 8)):
        done = [
            (action.kind, action.stage, action.micro_batch)
            for rank in range(4)
            for action in actions(schedule, rank, 4, stages, 8)
        ]
        assert len(done) == len(set(done))
        for kind in ("forward", "backward"):
            assert sorted((s, m) for k, s, m in done if k == kind) == [(s, m) for s in range(stages) for m in range(8)]


@pytest.mark.parametrize(("eager", "most"), [(False, (4, 3, 2, 1)), (True, (7, 5, 3, 1))])
def test_1f1b_keeps_at_most_p_minus_stage_micro_batches_and_twice_as_many_if_eager(
    eager: bool, most: tuple[int, ...]
) -> None:
    for rank in range(4):
        kept = peak = 0
        for action in actions("1f1b", rank, 4, 4, 16, eager=eager):
            kept += 1 if action.kind == "forward" else -1
            peak = max(peak, kept)
        assert peak == most[rank]


def test_eager_1f1b_hides_its_sends_behind_work() -> None:
    plain = run("1f1b", 4, 40, link=1.0)
    silent = simulate(run("1f1b", 4, 40)).duration_s
    fill_and_drain = 2 * 3 * 1.0
    assert simulate(replace(plain, eager=True)).duration_s == silent + fill_and_drain
    assert simulate(plain).duration_s > silent + 4 * fill_and_drain


def test_no_rank_does_two_things_at_once_and_nothing_starts_before_its_input() -> None:
    timeline = simulate(run("1f1b", 4, 8, link=0.25))
    compute = [event for event in timeline.events if event.kind != "send"]
    for rank in range(4):
        own = sorted((e.start_s, e.end_s) for e in compute if e.rank == rank)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(own))
    ends = {(e.kind, e.stage, e.micro_batch): e.end_s for e in compute}
    for event in compute:
        if event.kind == "forward" and event.stage:
            assert event.start_s >= ends["forward", event.stage - 1, event.micro_batch] + 0.25


@st.composite
def pipelines(draw: st.DrawFn) -> PipelineRun:
    """Stages that differ, or are of two kinds or one; links of their own, some slower than any stage."""
    schedule: Schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble", *FOLDED]))
    ranks = draw(st.integers(2, 6))
    chunks = draw(st.integers(2, 4)) if schedule == "interleaved" else usual_chunks(schedule)
    micro_batches = draw(st.one_of(st.integers(1, 12), st.integers(40, 200)))
    if schedule == "interleaved":
        micro_batches = ranks * max(1, micro_batches // ranks)
    if schedule == "dualpipev":
        micro_batches = max(micro_batches, 2 * ranks)
    seconds = draw(st.sampled_from([st.just(1.0), st.sampled_from([1.0, 2.0]), st.floats(0.25, 4.0)]))
    stages = ranks * chunks
    forward = draw(st.lists(seconds, min_size=stages, max_size=stages))
    backward = [2.0 * one for one in draw(st.lists(seconds, min_size=stages, max_size=stages))]
    held = draw(st.lists(st.sampled_from([0.0, 0.5, 3.0]), min_size=ranks, max_size=ranks))
    late = draw(st.sampled_from([0.0, 0.25, 1.5]))
    return PipelineRun(
        ranks, micro_batches, schedule, tuple(forward), tuple(backward), tuple(0.4 * one for one in backward),
        tuple(SendTimes(one, one + late) for one in held), blocks=draw(st.booleans()),
        eager=draw(st.booleans()),
    )  # fmt: skip


def together(runs: list[PipelineRun]) -> PipelineRuns:
    """Runs that block and are eager or are not, all of them, as one."""
    ranks = max(run.ranks for run in runs)
    chunks = max(len(run.forward_s) // run.ranks for run in runs)

    def stages(name: str) -> np.ndarray:
        table = np.zeros((len(runs), chunks, ranks))
        for row, run in zip(table, runs, strict=True):
            own = np.reshape(getattr(run, name), (-1, run.ranks)).copy()
            if run.schedule in FOLDED:
                own[1] = own[1, ::-1].copy()
            row[: len(own), : run.ranks] = own
        return table

    def links(name: str) -> np.ndarray:
        table = np.zeros((len(runs), ranks))
        for row, run in zip(table, runs, strict=True):
            row[: run.ranks] = [getattr(link, name) for link in run.links]
        return table

    return PipelineRuns(
        np.array([index_of("schedule", run.schedule) for run in runs]), np.array([run.ranks for run in runs]),
        np.array([len(run.forward_s) // run.ranks for run in runs]), np.array([run.micro_batches for run in runs]),
        stages("forward_s"), stages("backward_s"), stages("weight_s"), links("held_s"), links("arrives_s"),
        tuple(get_args(Schedule)) if runs[0].blocks else (), runs[0].eager,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(pipelines(), min_size=1, max_size=4))
def test_many_pipelines_at_once_take_exactly_as_long_as_event_by_event(runs: list[PipelineRun]) -> None:
    runs = [replace(run, blocks=runs[0].blocks, eager=runs[0].eager) for run in runs]
    assert play(together(runs)) == pytest.approx([simulate(run).duration_s for run in runs], rel=1e-9)


@pytest.mark.parametrize("eager", [False, True])
def test_a_steady_state_is_skipped_not_played(eager: bool) -> None:
    # Played whole, 10 million micro-batches would take hours.
    for schedule, stages in (("1f1b", 4), ("zero_bubble", 4), ("interleaved", 8), ("zbv", 8), ("dualpipev", 8)):
        short, longer, longest = (
            play(together([replace(run(schedule, 4, m, stages=stages, link=0.25), eager=eager)]))[0]
            for m in (400, 800, 10_000_000)
        )
        assert (longest - short) / (10_000_000 - 400) == pytest.approx((longer - short) / 400, rel=1e-9)


def test_a_pace_that_does_not_settle_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "_LONGEST", 64)
    monkeypatch.setattr(lockstep, "_SAME", -1.0)  # nothing is ever the same
    for schedule, stages in (("1f1b", 4), ("zero_bubble", 4), ("interleaved", 8), ("zbv", 8), ("dualpipev", 8)):
        one = run(schedule, 4, 2000, stages=stages, link=0.25)
        assert play(together([one]))[0] == pytest.approx(simulate(one).duration_s, rel=1e-3)


def test_a_slow_link_paces_gpipe() -> None:
    # document 003: a link slower than a stage's forward sets the pace of the forward sweep
    assert simulate(run("gpipe", 4, 50, link=1.5)).duration_s == pytest.approx(1.5 * 49 + 2 * 49 + 12 + 6 * 1.5)


LAYOUTS = [
    "dp4,tp8,pp12,mbs2", "dp8,tp4,pp12,mbs4", "dp8,tp8,pp6,mbs1", "dp16,tp2,pp12,mbs2", "dp24,tp8,pp2,mbs1",
    "dp8,tp4,pp12,mbs2,gpipe", "dp4,tp8,pp12,mbs4,gpipe", "dp6,tp8,pp8,mbs4", "dp1,tp1,pp70,mbs1", "dp4,tp2,pp46,mbs2",
    "dp8,tp4,pp12,mbs2,zero_bubble", "dp2,tp4,pp35,mbs1,zero_bubble", "dp8,tp4,pp12,vpp3,mbs1,interleaved",
    "dp4,tp8,pp9,vpp8,mbs1,interleaved", "dp4,tp4,pp24,vpp3,mbs2,interleaved", "dp16,tp8,pp2,vpp6,mbs4,interleaved",
]  # fmt: skip


@pytest.mark.parametrize("label", LAYOUTS)
@pytest.mark.parametrize("stack_name", ["megatron-deepspeed", "trimaran", "gpipe"])
def test_closed_form_and_simulation_agree_within_3_percent(label: str, stack_name: str) -> None:
    layout: Layout = parse_layout(f"{label},recompute-full,bf16")
    model = load_model("bloom-prequel-181b")
    per_step = layout.dp * layout.mbs * (layout.pp if layout.vpp > 1 else 1)
    workload = Workload(model=model, seq_len=2048, global_batch=per_step * max(1, 2048 // per_step))
    cluster, stack = load_cluster("jean-zay-a100-80gb"), load_stack(stack_name)
    calibration = resolve_calibration(cluster, stack)
    grid = LayoutGrid.from_layouts([layout], workload, stack)
    times = stage_work(Case.of(workload, cluster, stack, calibration), grid).times
    assert pipeline_time(grid, times).total[0] == pytest.approx(play(pipeline_runs(grid, times))[0], rel=0.03)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["gpipe", "1f1b", "zero_bubble"]), st.integers(2, 24), st.integers(1, 4), st.integers(1, 300),
    st.floats(1.5, 3.5), st.floats(0.0, 0.5), st.booleans(), st.booleans(),
)  # fmt: skip
def test_closed_form_is_exact_on_equal_stages(
    schedule: Schedule, ranks: int, layers: int, micro_batches: int, ratio: float, send: float, blocks: bool,
    eager: bool,
) -> None:  # fmt: skip
    """Equal stages whose sends take up to half a forward: the paths of the closed form are all there are."""
    model = load_model("gpt2-124m").model_copy(update={"layers": ranks * layers})
    stack = load_stack("megatron")
    workload = Workload(model=model, seq_len=128, global_batch=max(micro_batches, ranks))
    grid = LayoutGrid.from_layouts([Layout(pp=ranks, schedule=schedule)], workload, stack)
    one, none = np.ones(1), np.zeros(1)
    waits = (schedule,) if blocks else ()
    sends = send * one, send * one
    times = StageTimes(one, ratio * one, one * ratio / 2, none, none, none, none, *sends, waits, eager, one)
    assert pipeline_time(grid, times).total[0] == pytest.approx(play(pipeline_runs(grid, times))[0], rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(2, 12), st.integers(2, 4), st.integers(0, 60), st.integers(1, 2), st.floats(1.2, 3.5),
    st.floats(0.0, 0.5), st.lists(st.sampled_from([0.0, 0.3, 1.5]), min_size=4, max_size=4), st.booleans(),
)  # fmt: skip
def test_closed_form_of_interleaved_stages_never_exceeds_their_simulation(
    ranks: int, chunks: int, more: int, groups: int, ratio: float, send: float, ends: list[float], blocks: bool
) -> None:
    """Its ways are ways of the schedule, so none is longer than the longest; on equal stages it is among them.

    One or two groups of micro-batches: of the rounds between more, where they begin and end is not followed.
    """
    layers = ranks * chunks + min(more, 2 * ranks * chunks)
    model = load_model("gpt2-124m").model_copy(update={"layers": layers})
    workload = Workload(model=model, seq_len=128, global_batch=groups * ranks)
    layout = Layout(pp=ranks, vpp=chunks, schedule="interleaved")
    grid = LayoutGrid.from_layouts([layout], workload, load_stack("trimaran"))
    one = np.ones(1)
    own = [end * one for end in ends]
    waits: tuple[Schedule, ...] = ("interleaved",) if blocks else ()
    times = StageTimes(one, ratio * one, one * ratio / 2, *own, send * one, send * one, waits, False, one)
    closed, played = pipeline_time(grid, times).total[0], play(pipeline_runs(grid, times))[0]
    assert closed <= played * (1 + 1e-9)
    if len(set(grid.splits.splits[0].layers)) == 1 and not any(ends):
        assert closed == pytest.approx(played, rel=1e-9)


@pytest.mark.parametrize(
    "label", ["pp48,vpp2,dp32", "pp24,vpp4,dp64", "pp24,vpp5,dp64", "pp12,vpp10,dp256", "pp6,vpp21,dp512"]
)
def test_closed_form_of_a_few_micro_batches_on_uneven_interleaved_stages_is_within_3_percent(label: str) -> None:
    layout = parse_layout(f"{label},tp8,mbs1,interleaved,bf16")
    workload = Workload(model=load_model("gpt-1t"), seq_len=2048, global_batch=3072)
    cluster, stack = load_cluster("dgx-h100").model_copy(update={"nodes": 3200}), load_stack("trimaran")
    grid = LayoutGrid.from_layouts([layout], workload, stack)
    assert len(set(grid.splits.splits[0].layers)) > 1
    times = stage_work(Case.of(workload, cluster, stack, resolve_calibration(cluster, stack)), grid).times
    assert pipeline_time(grid, times).total[0] == pytest.approx(play(pipeline_runs(grid, times))[0], rel=0.03)


@pytest.mark.parametrize("micro_batches", [4, 16, 256])
def test_stages_that_share_cores_take_their_work_or_their_waiting_sweep_by_sweep(micro_batches: int) -> None:
    workload = Workload(model=load_model("gpt2-124m"), seq_len=1024, global_batch=micro_batches)
    cluster, stack = load_cluster("dgx-h100"), load_stack("trimaran")
    grid = LayoutGrid.from_layouts([parse_layout("pp4,mbs1,gpipe")], workload, stack)
    times = stage_work(Case.of(workload, cluster, stack, resolve_calibration(cluster, stack)), grid).times
    own_cores = pipeline_time(grid, times)
    crowded = replace(times, crowding=np.array([2.0]))  # what is there counts the crowd already
    shared = pipeline_time(grid, crowded)
    uncrowded = pipeline_time(grid, replace(crowded.alone(), crowding=np.array([1.0])))
    assert crowded.alone().forward == times.forward / 2
    assert max(shared.busy[0], uncrowded.total[0]) <= shared.total[0] < own_cores.total[0]
    # a link that holds up the forwards alone leaves the cores as busy as ever with the backwards
    forward, backward = 3.0 * times.forward[0], 3.0 * times.backward[0]
    link = np.array([0.5 * (forward + backward)])
    paced = pipeline_time(grid, replace(crowded, send_held=link, send_arrives=link)).total[0]
    assert paced > (micro_batches - 1) * (link[0] + backward)
    slow_link = np.array([10.0 * times.backward[0] * 12])
    waiting = replace(crowded, send_held=slow_link, send_arrives=slow_link)
    assert pipeline_time(grid, waiting).total[0] > 2 * (micro_batches - 1) * slow_link[0]


def test_ranks_that_meet_often_wait_for_each_other_and_activations_feel_less_of_others_than_states() -> None:
    """Sums over TP come every few milliseconds, passes through a stage more seldom, those of replicas once a step."""
    device = Device(kind="cpu", peak_tflops={"fp32": 0.1}, mem_gib=64, mem_bandwidth_gb_s=20, cores=1)
    link = Link(bandwidth_gbps=1e6, latency_us=0.001)
    felt = {"ranks": 2, "matmul": 1.1, "memory": 1.8, "overhead": 1.0}
    model = Model(layers=8, hidden=256, heads=8, vocab=64, max_positions=512)
    workload = Workload(model=model, seq_len=512, global_batch=8)
    rate = MatmulRate(precision="fp32", m=512, n=256, k=256, tflops=0.1)

    def took(label: str, **others: float) -> TimeParts:
        machine = Cluster(
            device=device, nodes=1, devices_per_node=2, intra=link, inter=link, cores_per_node=2, matmul=(rate,),
            contention=(Contention(**(felt | others)),),
        )  # fmt: skip
        return estimate(Case.of(workload, machine, load_stack("trimaran")), parse_layout(label)).time

    def longer(label: str) -> float:
        seldom, often = took(label), took(label, often=1.1 * 1.2)
        return (often.forward + often.backward) / (seldom.forward + seldom.backward) - 1.0

    assert longer("mbs1") == 0.0 <= longer("dp2,mbs1") < min(longer("pp2,mbs1"), 0.02)
    assert longer("tp2,mbs1") > longer("tp2,mbs8") > longer("pp2,mbs8") >= 0.0
    assert longer("tp2,mbs1") <= 0.2 + 1e-9
    alike, apart = took("dp2,mbs1"), took("dp2,mbs1", passes=1.05)
    assert apart.forward < alike.forward and apart.optimizer == alike.optimizer
    alone = took("dp1,mbs1")
    assert alike.optimizer == pytest.approx(1.8 * alone.optimizer)
    # Adam's 24 bytes of states and weights, a gradient, and three passes over it for the norm, at the probed rate
    assert alone.optimizer == pytest.approx(40 * model.parameters / 20e9, rel=0.05)


@pytest.mark.parametrize(("split", "even"), [("2-2-2-2", True), ("5-1-1-1", False), ("3-3-1-1", False)])
def test_stages_that_wait_for_a_fuller_one_leave_it_their_cores(split: str, even: bool) -> None:
    """Four ranks take turns on two cores: no stage is slowed by others that have nothing to do."""
    device = Device(kind="cpu", peak_tflops={"fp32": 0.1}, mem_gib=64, mem_bandwidth_gb_s=1e6, cores=1)
    link = Link(bandwidth_gbps=1e6, latency_us=0.001)
    turns = tuple(Contention(ranks=n, matmul=n / 2, memory=n / 2, overhead=n / 2) for n in (2, 4))
    machine = Cluster(
        device=device, nodes=1, devices_per_node=4, intra=link, inter=link, cores_per_node=2, contention=turns
    )
    model = Model(layers=8, hidden=1024, heads=16, vocab=16, max_positions=128)
    micro_batches = 32
    workload = Workload(model=model, seq_len=128, global_batch=micro_batches)
    case = Case.of(workload, machine, load_stack("trimaran"))
    one, four = (estimate(case, parse_layout(text)) for text in ("mbs1", f"pp4,mbs1,split{split}"))
    layer = (one.time.forward + one.time.backward) / micro_batches / model.layers
    fullest = max(map(int, split.split("-"))) * layer
    shared, alone, crowded = (micro_batches * each for each in (model.layers * layer / 2, fullest, 2 * fullest))
    computed = four.time.forward + four.time.backward + four.time.bubble
    assert 0.999 * max(shared, alone) < computed < 1.2 * max(shared, alone)
    assert (computed > 0.98 * crowded) == even


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-30b-a3b"])
def test_zero_bubble_puts_off_products_of_weights_and_nothing_else_of_a_backward(name: str) -> None:
    """Attention, norms, permutations and what a router does have no weights' gradients to put off."""
    workload, stack = Workload(model=load_model(name), seq_len=8192, global_batch=8), load_stack("trimaran")
    case = Case.of(workload, load_cluster("dgx-h100"), stack)
    grid = LayoutGrid.from_layouts([parse_layout("pp4,mbs1,zero_bubble,bf16")], workload, stack)
    times = stage_work(case, grid).times
    shapes = Shapes(case, grid, lambda case, grid: np.ones(len(grid)))
    made = sum(
        float(shapes.product(operator.backward[1])[0])
        for operator in shapes.layer(case.model.main_kind)
        if operator.kernel == "linear" and operator.backward
    )
    assert 0.9 * made < times.weight[0] < 0.45 * times.backward[0]
