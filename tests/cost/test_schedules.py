"""The pipeline simulator, and the closed form that ranks in its place."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from trimaran.cost.calibration import resolve_calibration
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.pipeline import pipeline_time
from trimaran.cost.simulate import Link, PipelineRun, pipeline_run, simulate, simulated_time
from trimaran.cost.stage_work import stage_work
from trimaran.files import load_cluster, load_model, load_stack
from trimaran.layout import Layout, Schedule
from trimaran.notation import parse_layout
from trimaran.schedule import actions
from trimaran.workload import Workload


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
        (Link(link, link),) * (count - 1),
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


def test_1f1b_keeps_at_most_p_minus_stage_micro_batches() -> None:
    for rank in range(4):
        kept = peak = 0
        for action in actions("1f1b", rank, 4, 4, 16):
            kept += 1 if action.kind == "forward" else -1
            peak = max(peak, kept)
        assert peak == 4 - rank


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


def test_a_long_iteration_is_carried_on_from_its_steady_state() -> None:
    for schedule in ("gpipe", "1f1b", "zero_bubble"):
        long = run(schedule, 5, 103, link=0.4)
        assert simulated_time(long) == pytest.approx(simulate(long).duration_s, rel=1e-9)


def test_a_slow_link_paces_gpipe() -> None:
    # document 003: a link slower than a stage's forward sets the pace of the forward sweep
    assert simulate(run("gpipe", 4, 50, link=1.5)).duration_s == pytest.approx(1.5 * 49 + 2 * 49 + 12 + 6 * 1.5)


LAYOUTS = [
    "dp4,tp8,pp12,mbs2", "dp8,tp4,pp12,mbs4", "dp8,tp8,pp6,mbs1", "dp16,tp2,pp12,mbs2", "dp24,tp8,pp2,mbs1",
    "dp8,tp4,pp12,mbs2,gpipe", "dp4,tp8,pp12,mbs4,gpipe", "dp6,tp8,pp8,mbs4",
]  # fmt: skip


@pytest.mark.parametrize("label", LAYOUTS)
@pytest.mark.parametrize("stack_name", ["megatron-deepspeed", "trimaran", "gpipe"])
def test_closed_form_and_simulation_agree_within_3_percent(label: str, stack_name: str) -> None:
    layout: Layout = parse_layout(f"{label},recompute-full,bf16")
    model = load_model("bloom-prequel-181b")
    workload = Workload(
        model=model, seq_len=2048, global_batch=layout.dp * layout.mbs * (2048 // (layout.dp * layout.mbs))
    )
    cluster, stack = load_cluster("jean-zay-a100-80gb"), load_stack(stack_name)
    calibration = resolve_calibration(cluster, stack)
    grid = LayoutGrid.from_layouts([layout], workload, stack)
    closed = pipeline_time(grid, stage_work(workload, cluster, stack, grid, calibration).times).total[0]
    assert closed == pytest.approx(simulated_time(pipeline_run(workload, cluster, stack, layout)), rel=0.03)


@pytest.mark.parametrize("micro_batches", [4, 16, 256])
def test_stages_that_share_cores_take_their_work_or_their_waiting_whichever_is_longer(micro_batches: int) -> None:
    workload = Workload(model=load_model("gpt2-124m"), seq_len=1024, global_batch=micro_batches)
    cluster, stack = load_cluster("dgx-h100"), load_stack("trimaran")
    grid = LayoutGrid.from_layouts([parse_layout("pp4,mbs1,gpipe")], workload, stack)
    times = stage_work(workload, cluster, stack, grid, resolve_calibration(cluster, stack)).times
    own_cores = pipeline_time(grid, times)
    shared = pipeline_time(grid, replace(times, crowding=np.array([2.0])))  # what is there counts the crowd already
    halved = replace(
        times,
        forward=(times.forward[0] / 2, times.forward[1] / 2, times.forward[2] / 2),
        backward=(times.backward[0] / 2, times.backward[1] / 2, times.backward[2] / 2),
    )
    uncrowded = pipeline_time(grid, halved)
    assert shared.total[0] == max(shared.busy[0], uncrowded.total[0])
    assert shared.total[0] < own_cores.total[0]
    slow_link = np.array([10.0 * times.backward[0][0]])
    waiting = replace(times, crowding=np.array([2.0]), send_held=slow_link, send_arrives=slow_link)
    assert pipeline_time(grid, waiting).total[0] > 2 * (micro_batches - 1) * slow_link[0]
