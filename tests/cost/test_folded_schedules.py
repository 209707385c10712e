"""Folded schedules (ZB-V and DualPipeV): PyTorch's own order, and what ranks hold and wait for under them."""

from __future__ import annotations

import cProfile
from collections import Counter
from typing import Any

import numpy as np
import pytest

from trimaran.cost.calibration import resolve_calibration
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate, memory_per_stage
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.memory.stage import in_flight
from trimaran.cost.pipeline.closed_form import pipeline_runs, pipeline_time
from trimaran.cost.pipeline.folded import _times, order_of, play_order
from trimaran.cost.pipeline.lockstep import play
from trimaran.cost.simulate import PipelineRun, SendTimes, simulate
from trimaran.cost.stage_work import stage_work
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import violations
from trimaran.layout.schedule import Action, actions
from trimaran.nouns.stack import FOLDED, Schedule
from trimaran.nouns.workload import Workload

KINDS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


class Stage:
    """What PyTorch's schedules ask of a stage before anything runs."""

    def __init__(self, ranks: int, index: int) -> None:
        self.group_size, self.group_rank, self.num_stages, self.stage_index = ranks, 0, 2 * ranks, index
        self.is_first, self.is_last = index == 0, index == 2 * ranks - 1
        self.has_backward, self.submod = True, None
        self.stage_index_to_group_rank = {stage: stage % ranks for stage in range(2 * ranks)}


def by_pytorch(schedule: Schedule, ranks: int, micro_batches: int) -> dict[int, tuple[Action, ...]]:
    """The order that PyTorch's class of the schedule makes, forwards beside backwards one behind the other."""
    from torch.distributed.pipelining import schedules  # takes seconds, which all who collect tests would wait for

    made: Any = {"zbv": schedules.ScheduleZBVZeroBubble, "dualpipev": schedules.ScheduleDualPipeV}[schedule]
    order = made([Stage(ranks, 0), Stage(ranks, 2 * ranks - 1)], micro_batches, loss_fn=lambda *_: None).pipeline_order
    plain = {
        rank: [each for one in todo if one is not None for each in (one.sub_actions or (one,))]
        for rank, todo in order.items()
    }
    return {
        rank: tuple(Action(KINDS[one.computation_type.value], one.microbatch_index, one.stage_index) for one in todo)
        for rank, todo in plain.items()
    }


@pytest.mark.parametrize("schedule", FOLDED)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_rank_does_what_pytorch_has_it_do(schedule: Schedule, ranks: int) -> None:
    for micro_batches in (1, 2, 3, 2 * ranks - 1, 2 * ranks, 2 * ranks + 1, 5 * ranks + 3):
        if schedule == "dualpipev" and micro_batches < 2 * ranks:
            continue
        expected = by_pytorch(schedule, ranks, micro_batches)
        for rank in range(ranks):
            assert actions(schedule, rank, ranks, 2 * ranks, micro_batches) == expected[rank]


def run(schedule: Schedule, ranks: int, micro_batches: int, chunks: int, link: float = 0.0) -> PipelineRun:
    """Stages of which all of a rank's take 6 seconds, a third of it each kind of work."""
    stages = ranks * chunks
    forward, backward, weight = ((seconds / chunks,) * stages for seconds in (2.0, 4.0, 2.0))
    return PipelineRun(ranks, micro_batches, schedule, forward, backward, weight, (SendTimes(link, link),) * ranks)


@pytest.mark.parametrize("schedule", FOLDED)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 19), (8, 40)])
def test_equal_work_leaves_the_chunks_that_fill_as_the_only_bubble(
    schedule: Schedule, ranks: int, micro_batches: int
) -> None:
    taken = simulate(run(schedule, ranks, micro_batches, 2)).duration_s
    fewer = simulate(run(schedule, ranks, 1, 2)).events
    assert Counter(event.stage for event in fewer if event.kind == "forward") == dict.fromkeys(range(2 * ranks), 1)
    assert taken == pytest.approx(6.0 * micro_batches + (ranks - 1) * 1.0)
    assert taken < simulate(run("zero_bubble", ranks, micro_batches, 1)).duration_s
    assert taken < simulate(run("1f1b", ranks, micro_batches, 1)).duration_s


@pytest.mark.parametrize("schedule", FOLDED)
def test_neighbours_alone_send_to_each_other_and_a_fold_sends_nothing(schedule: Schedule) -> None:
    events = simulate(run(schedule, 4, 9, 2, link=0.25)).events
    sent = Counter(event.stage for event in events if event.kind == "send")
    # Each of stages 0 to 7 sends its activations on and its gradients back, but between 3 and 4, both on rank 3.
    assert sent == {0: 9, 1: 18, 2: 18, 3: 9, 4: 9, 5: 18, 6: 18, 7: 9}


def peak(schedule: Schedule, rank: int, ranks: int, micro_batches: int, layers: tuple[int, ...]) -> int:
    """Most layers' activations that a rank keeps, each from its forward until its weight gradients are made."""
    kept = most = 0
    for action in actions(schedule, rank, ranks, 2 * ranks, micro_batches):
        held = layers[action.stage]
        kept += held if action.kind == "forward" else 0
        most = max(most, kept)
        kept -= held if action.kind in ("backward", "backward_weight") else 0
    assert kept == 0
    return most


@pytest.mark.parametrize("schedule", FOLDED)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 1), (2, 4), (4, 3), (4, 8), (4, 30), (7, 14)])
@pytest.mark.parametrize("heavy", [0, 1, 2])
def test_ranks_keep_as_many_micro_batches_as_the_order_has_in_flight(
    schedule: Schedule, ranks: int, micro_batches: int, heavy: int
) -> None:
    if schedule == "dualpipev" and micro_batches < 2 * ranks:
        return
    layers = tuple(1 + (heavy == 1) * (stage < ranks) + (heavy == 2) * (stage >= ranks) for stage in range(2 * ranks))
    model = load_model("gpt2-124m").model_copy(update={"layers": sum(layers)})
    workload = Workload(model=model, seq_len=128, global_batch=micro_batches)
    layout = Layout(pp=ranks, schedule=schedule, stage_split=layers)
    grid = LayoutGrid.from_layouts([layout], workload, load_stack("torchtitan"))
    for rank in range(ranks):
        on_rank = layers[rank] + layers[-1 - rank]
        kept = in_flight(grid, np.array([float(rank)]))[0] * on_rank
        assert kept == pytest.approx(peak(schedule, rank, ranks, micro_batches, layers))


def case_of(model: str, global_batch: int, stack: str = "torchtitan") -> Case:
    workload = Workload(model=load_model(model), seq_len=2048, global_batch=global_batch)
    cluster, software = load_cluster("dgx-h100").model_copy(update={"nodes": 512}), load_stack(stack)
    return Case.of(workload, cluster, software, resolve_calibration(cluster, software))


@pytest.mark.parametrize("schedule", FOLDED)
def test_both_ends_are_on_the_first_rank(schedule: Schedule) -> None:
    case = case_of("llama3-8b", 64)
    folded, plain = parse_layout(f"dp2,pp4,{schedule},mbs1,bf16"), parse_layout("dp2,pp4,mbs1,bf16")
    assert folded.vpp == 2 and "vpp2" in str(folded) and parse_layout(str(folded)) == folded
    (first, *others), (_, *_, last) = (
        memory_per_stage(case, LayoutGrid.from_layouts([one], case.workload, case.stack))[0] for one in (folded, plain)
    )
    assert first.logits == last.logits > 0 and not any(stage.logits for stage in others)
    assert estimate(case, folded).mem_gib >= first.total > max(stage.total for stage in others)


@pytest.mark.parametrize("schedule", FOLDED)
@pytest.mark.parametrize(
    "label", ["pp2,mbs2", "pp4,mbs1", "pp8,mbs1,recompute-full", "pp10,tp8,sp,mbs1", "pp20,mbs2,tp8,sp"]
)
@pytest.mark.parametrize("times", [2, 3, 8])
def test_closed_form_is_within_8_percent_of_the_simulation(schedule: Schedule, label: str, times: int) -> None:
    layout = parse_layout(f"dp8,{label},{schedule},bf16")
    case = case_of("llama3-70b", 8 * layout.mbs * layout.pp * times)
    grid = LayoutGrid.from_layouts([layout], case.workload, case.stack)
    stages = stage_work(case, grid).times
    played = play(pipeline_runs(grid, stages))[0]
    assert pipeline_time(grid, stages).total[0] == pytest.approx(played, rel=0.08)


def test_dualpipev_hides_exchanges_behind_the_other_micro_batch_and_no_more_than_it_computes() -> None:
    case = case_of("qwen3-30b-a3b", 512)
    hidden = parse_layout("dp8,pp4,ep8,etp1,dualpipev,overlap-batch,mbs1,bf16")
    shown = hidden.model_copy(update={"ep_overlap": "none"})
    first, second = estimate(case, hidden).time, estimate(case, shown).time
    assert 0 < first.ep < second.ep
    # of 2 x 64 forwards of the first rank 3 x 4 - 1 have no other micro-batch beside them
    assert first.ep >= second.ep * 11 / 128
    computed = second.forward + second.backward + second.tp
    assert second.ep - first.ep <= computed
    # a network so slow that exchanges are longer than all there is to hide behind
    links = case.cluster.inter.model_copy(update={"bandwidth_gbps": 1.0})
    slow = Case.of(case.workload, case.cluster.model_copy(update={"intra": links, "inter": links}), case.stack)
    apart = estimate(slow, shown).time
    assert apart.ep - estimate(slow, hidden).time.ep <= apart.forward + apart.backward + apart.tp


@pytest.mark.parametrize(
    ("label", "why"),
    [
        ("dp2,pp4,vpp3,zbv,mbs1", "folds 2 chunks onto each rank, but VPP is 3"),
        ("dp2,pp8,dualpipev,mbs8", "at least 2 x PP 8 = 16 micro-batches, but there are 4"),
        ("dp8,pp4,ep8,etp1,dualpipev,overlap-batch,mbs1,recompute-full", "recompute full does not go with"),
        ("dp8,pp4,ep8,etp1,zbv,overlap-batch,mbs1", "PP 4 runs zbv and not dualpipev"),
    ],
)
def test_what_folded_schedules_cannot_do_is_said(label: str, why: str) -> None:
    case = case_of("qwen3-30b-a3b", 64)
    broken = violations(parse_layout(f"{label},bf16"), case.workload, case.cluster, case.stack)
    assert any(why in violation.sentence for violation in broken)


def test_only_stacks_that_have_folded_schedules_list_them() -> None:
    names = ("trimaran", "megatron-core", "deepspeed", "torchtitan", "torchtitan-compiled", "torch-pipe")
    assert {name for name in names if set(FOLDED) & set(load_stack(name).schedules)} == {"torchtitan", "torch-pipe"}


def test_the_order_of_a_long_pipeline_is_known_at_once() -> None:
    """147,456 actions took 1.8 s of a core, and a plan explained on pipelines of many lengths minutes.

    Counted in calls, to which no busy machine adds: they are nine an action.
    """
    order_of.cache_clear()
    profile = cProfile.Profile()
    order = profile.runcall(order_of, "zbv", 48, 512)
    calls = sum(each.callcount for each in profile.getstats())
    assert len(order.work) == 147_456 and calls < 12 * 147_456


def test_a_deep_pipeline_settles_within_a_few_times_its_ranks() -> None:
    """20 ranks filled for more than 40 micro-batches, and were then played whole: 60 took a minute."""
    ranks, micro_batches = 20, 500
    model = load_model("llama2-7b").model_copy(update={"layers": 2 * ranks})
    workload = Workload(model=model, seq_len=2048, global_batch=micro_batches)
    case = Case.of(workload, load_cluster("dgx-h100"), load_stack("torchtitan-0.2"))
    grid = LayoutGrid.from_layouts([parse_layout(f"dp1,tp1,pp{ranks},mbs1,zbv,bf16")], workload, case.stack)
    runs = pipeline_runs(grid, stage_work(case, grid).times)
    order_of.cache_clear()
    settled = play(runs)[0]
    assert order_of.cache_info().misses == 2
    whole = play_order(order_of("zbv", ranks, micro_batches), *_times("zbv", ranks, runs)).max()
    assert settled == pytest.approx(whole, rel=1e-9)
