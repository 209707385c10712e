"""Ramp-up schedules like document 002's: more nodes and larger micro-batches as the batch grows."""

from __future__ import annotations

import pytest

from trimaran.api import workload_of
from trimaran.cost.case import Case
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import violations
from trimaran.nouns.noun import TrimaranError
from trimaran.planner.ramp_up import ramp_up_schedule
from trimaran.planner.search.objective import Objective

CLUSTER = load_cluster("jean-zay-v100-32gb")
STACK = load_stack("megatron-deepspeed")
# Document 002's best: PP 2, MBS 4, on 64 nodes of 4 at a batch of 512; here up to 128 replicas.
WORKLOAD = workload_of("bigscience-1b3", 512, tokens=300e9, ramp_up=(32, 32, 5_000_000))
FULL = parse_layout("dp128,pp2,mbs4,zero1,recompute-full,fp16")


def test_nodes_and_micro_batch_grow_with_the_batch() -> None:
    found = ramp_up_schedule(FULL, Case.of(WORKLOAD, CLUSTER, STACK))
    assert len(found.phases) >= 2
    assert found.phases[0].first_batch == 32
    assert found.phases[-1].last_batch == 512
    assert found.phases[-1].layout == FULL
    assert found.phases[0].devices * found.phases[0].layout.mbs <= 32 * 2
    for phase in found.phases:
        for batch in range(phase.first_batch, phase.last_batch + 1, 32):
            own = WORKLOAD.model_copy(update={"global_batch": batch, "ramp_up": None})
            assert not list(violations(phase.layout, own, CLUSTER, STACK))


def test_no_more_nodes_than_the_last_ones_are_taken_before() -> None:
    """Of the fewest devices that meet a deadline the ramp-up took sixteen times as many, and shrank."""
    few = parse_layout("dp4,pp2,mbs4,zero1,recompute-full,fp16")
    found = ramp_up_schedule(few, Case.of(WORKLOAD, CLUSTER, STACK))
    devices = [phase.devices for phase in found.phases]
    assert devices == sorted(devices) and devices[-1] == few.devices
    assert found.slower_by >= 0


def test_samples_iterations_and_hours_add_up() -> None:
    found = ramp_up_schedule(FULL, Case.of(WORKLOAD, CLUSTER, STACK), restart_minutes=30)
    total = 300_000_000_000 // WORKLOAD.seq_len
    assert sum(phase.samples for phase in found.phases) == pytest.approx(total, abs=100)
    assert found.hours == pytest.approx(sum(phase.hours for phase in found.phases) + found.restarts * 0.5)
    assert found.slower_by > 0


def test_a_ramp_up_without_samples_makes_nothing_slower() -> None:
    nothing = workload_of("bigscience-1b3", 512, ramp_up=(512, 32, 5_000_000))
    assert ramp_up_schedule(FULL, Case.of(nothing, CLUSTER, STACK)).slower_by == 0.0


def test_dearer_restarts_make_fewer_phases() -> None:
    case = Case.of(WORKLOAD, CLUSTER, STACK)
    counts = [ramp_up_schedule(FULL, case, restart_minutes=m).restarts for m in (0.0, 15.0, 600.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_a_layout_that_divides_every_step_needs_no_restart() -> None:
    layout = parse_layout("dp16,pp2,mbs1,zero1,fp16")
    found = ramp_up_schedule(layout, Case.of(WORKLOAD, CLUSTER, STACK))
    assert found.fixed_layout_hours is not None
    assert found.hours <= found.fixed_layout_hours


def test_what_cannot_be_scheduled_is_said() -> None:
    with pytest.raises(TrimaranError, match="ramp_up is not stated"):
        ramp_up_schedule(FULL, Case.of(workload_of("bigscience-1b3", 512), CLUSTER, STACK))
    with pytest.raises(TrimaranError, match="512 is not a multiple of DP 96"):
        ramp_up_schedule(parse_layout("dp96,pp2,mbs4,zero1,fp16"), Case.of(WORKLOAD, CLUSTER, STACK))
    with pytest.raises(TrimaranError, match="does not fit"):
        ramp_up_schedule(parse_layout("dp16,mbs32,fp16"), Case.of(WORKLOAD, CLUSTER, STACK))


def test_a_ramp_up_that_outlasts_the_training_is_refused() -> None:
    with pytest.raises(TrimaranError, match="grows over 5000000 samples, but tokens 1000000000 end after 488281 of"):
        workload_of("bigscience-1b3", 512, tokens=1e9, ramp_up=(32, 32, 5_000_000))
    assert workload_of("bigscience-1b3", 512, tokens=1e9, ramp_up=(512, 32, 5_000_000)).ramp_up is not None


def test_limits_hold_for_the_ramped_training_too() -> None:
    priced = CLUSTER.model_copy(update={"price_per_device_hour": 2.0})
    case = Case.of(WORKLOAD, priced, STACK)
    found = ramp_up_schedule(FULL, case)
    # devices that start anew are paid for too, 15 minutes of those of each further phase
    starting = 0.25 * sum(phase.devices for phase in found.phases[1:])
    days, cost = found.hours / 24.0, 2.0 * (sum(phase.hours * phase.devices for phase in found.phases) + starting)
    assert starting > 0
    assert days > found.fixed_batch_hours / 24.0
    assert ramp_up_schedule(FULL, case, Objective(deadline_days=days * 1.001, budget=cost * 1.001)) == found
    with pytest.raises(TrimaranError, match=f"takes {days:.4g} days, beyond the deadline of"):
        ramp_up_schedule(FULL, case, Objective(deadline_days=days * 0.999))
    with pytest.raises(TrimaranError, match=f"costs {cost:,.0f}, beyond the budget of"):
        ramp_up_schedule(FULL, case, Objective(budget=cost * 0.999))
