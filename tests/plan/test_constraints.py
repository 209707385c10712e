"""Constraints and objectives: document 004's batch rules, fixed choices, deadlines, prices, memory."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from trimaran.api import plan, workload_of
from trimaran.cli.app import app
from trimaran.cost.case import Case
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.noun import TrimaranError
from trimaran.planner.plan import Plan
from trimaran.planner.search.batches import batch_of
from trimaran.planner.search.objective import Objective
from trimaran.planner.search.settings import settings_from
from trimaran.planner.unmet import WholeTraining, unmet_sentence
from trimaran.planner.why import explain

BLOOM = ("bloom-prequel-181b", "jean-zay-a100-80gb", 2048)


def degrees(found: Plan) -> set[tuple[int, int]]:
    return {(entry.layout.dp, entry.layout.mbs) for entry in found.entries}


def test_ramp_up_of_32_holds_dp_times_mbs_to_divisors_of_32() -> None:
    """Document 004: "DP % 4 = 0 ... if the rampup steps are in increments of 32 with DP=4 highest MBS is 8"."""
    asked = {"devices": 384, "stack": "megatron-deepspeed", "top": 150, "fix": {"precision": "fp16"}}
    free = plan(*BLOOM, **asked)
    ramped = plan(*BLOOM, ramp_up=(32, 32, 10_000_000), **asked)
    assert any(32 % (dp * mbs) for dp, mbs in degrees(free))
    assert not any(32 % (dp * mbs) for dp, mbs in degrees(ramped))
    assert max(mbs for dp, mbs in degrees(ramped) if dp == 4) == 8
    refused = {refusal.rule: refusal.example for refusal in ramped.refusals}
    assert "ramp-up reaches a global batch of" in refused["ramp_up"]


def test_tolerance_takes_the_nearest_batch_that_divides() -> None:
    """Document 004 trains DP 6 with a global batch of 2046 where 2048 was meant."""
    asked = {"devices": 384, "stack": "megatron-deepspeed", "top": 150, "fix": {"dp": 6}}
    with pytest.raises(TrimaranError, match="2048 is not a multiple of DP 6"):
        plan(*BLOOM, **asked)
    found = plan(*BLOOM, gbs_tolerance=0.002, **asked)
    assert {(e.layout.mbs, e.global_batch) for e in found.entries} >= {(1, 2046), (2, 2052)}
    case = Case.of(workload_of(BLOOM[0], BLOOM[2]), load_cluster(BLOOM[1]), load_stack("megatron-deepspeed"))
    told = explain("dp6,tp8,pp8,mbs1", case, settings_from(devices=384, gbs_tolerance=0.002, top=500))
    assert told.verdict == "ranked"
    for entry in found.entries:
        assert abs(entry.global_batch - 2048) <= 2048 * 0.002
        assert entry.estimate.micro_batches * entry.layout.dp * entry.layout.mbs == entry.global_batch


def test_a_tolerated_batch_is_one_that_the_ramp_up_reaches() -> None:
    workload = workload_of("gpt3-1b3", 96, ramp_up=(16, 16, 1000))
    assert batch_of(workload, 5, 0.2) == 80
    assert batch_of(workload, 7, 0.2) == 112
    assert batch_of(workload, 5, 0.01) == 96
    # 990 is the nearest multiple and not on the way: of 960 and 1020 the nearer
    assert batch_of(workload_of("gpt3-1b3", 992, ramp_up=(60, 4, 1000)), 30, 0.05) == 1020


def test_a_placement_that_the_software_has_not_is_refused_by_name() -> None:
    says = "placement tp-pp-dp is not one that megatron-deepspeed lays out ranks in \\(tp-dp-pp\\)"
    with pytest.raises(TrimaranError, match=says):
        plan(*BLOOM, devices=384, stack="megatron-deepspeed", fix={"placement": "tp-pp-dp"})


@pytest.mark.parametrize("name", ["ep", "etp"])
def test_experts_of_a_model_that_has_none_are_not_fixed_in_silence(name: str) -> None:
    with pytest.raises(TrimaranError, match=f"fixed {name} 8 lays out experts, but the model has none"):
        plan("gpt3-1b3", "dgx-h100", 64, devices=8, fix={name: 8})
    assert plan("gpt3-1b3", "dgx-h100", 64, devices=8, fix={name: 1}).entries


def test_faults_without_the_extent_of_a_training_are_not_left_out_in_silence() -> None:
    question = ["plan", "--model", "gpt3-1b3", "--cluster", "dgx-h100", "--gbs", "64", "--faults", "llama3-h100"]
    done = CliRunner().invoke(app, question)
    assert isinstance(done.exception, TrimaranError) and "state its extent, as --tokens" in str(done.exception)


def test_fixed_choices_hold_and_others_stay_free() -> None:
    found = plan(
        *BLOOM, devices=384, stack="trimaran", top=200,
        fix={"tp": "4,8", "recompute": "full", "zero": 1, "placement": "tp-pp-dp"},
    )  # fmt: skip
    assert {e.layout.tp for e in found.entries} == {4, 8}
    assert {(e.layout.recompute, e.layout.zero_stage) for e in found.entries} == {("full", 1)}
    assert {e.layout.placement for e in found.entries} == {("tp", "cp", "pp", "dp")}
    assert len({e.layout.pp for e in found.entries}) > 3


def test_fixed_virtual_stages_leave_no_layout_without_them() -> None:
    found = plan("gpt3-1b3", "dgx-h100", 64, devices=8, stack="megatron", fix={"vpp": 2}, top=100)
    assert {(e.layout.vpp, e.layout.schedule) for e in found.entries} == {(2, "interleaved")}
    with pytest.raises(TrimaranError, match="needs a pipeline, but PP is 1"):
        plan("gpt3-1b3", "dgx-h100", 64, devices=8, stack="megatron", fix={"vpp": 2, "pp": 1})


def test_more_margin_leaves_more_memory_free() -> None:
    tight, wide = (plan(*BLOOM, devices=384, mem_margin=margin) for margin in (0.0, 0.5))
    assert max(e.mem_gib for e in wide.entries) <= 79.35 * 0.5
    assert tight.best.sec_per_it <= wide.best.sec_per_it


def priced() -> Cluster:
    return load_cluster("dgx-h100").model_copy(update={"price_per_device_hour": 2.5, "nodes": 16})


def test_cost_objective_buys_the_cheapest_token_and_time_the_fastest() -> None:
    asked = {"tokens": 1e11, "stack": "megatron", "top": 50}
    fast = plan("gpt3-13b", priced(), 512, **asked)
    cheap = plan("gpt3-13b", priced(), 512, objective="cost", **asked)
    assert fast.best.sec_per_it < cheap.best.sec_per_it
    assert cheap.best.cost is not None and fast.best.cost is not None
    assert cheap.best.cost < fast.best.cost
    # of what costs the same to 1% the plainest
    assert cheap.best.cost <= 1.01 * min(e.cost or 0.0 for e in (*cheap.entries, *fast.entries))
    days, devices = cheap.best.days or 0.0, cheap.best.devices
    assert cheap.best.cost == pytest.approx(days * 24 * devices * 2.5)
    assert cheap.best.cost_per_million_tokens == pytest.approx(cheap.best.cost / 1e5, rel=1e-3)


def test_fewest_devices_meet_the_deadline_and_none_fewer_would() -> None:
    asked = {"tokens": 1e11, "stack": "megatron"}
    found = plan("gpt3-13b", priced(), 512, objective="devices", deadline_days=20, **asked)
    assert (found.best.days or 99) <= 20
    assert [e.devices for e in found.entries] == sorted(e.devices for e in found.entries)
    with pytest.raises(TrimaranError, match=r"meets the deadline of 20 days: the fastest, dp.*, takes") as fewer:
        plan("gpt3-13b", priced(), 512, devices=found.best.devices - 1, deadline_days=20, **asked)
    said = re.search(r"takes ([\d.]+) days and costs ([\d,]+); allow more devices or time$", str(fewer.value))
    fastest = plan("gpt3-13b", priced(), 512, devices=found.best.devices - 1, **asked).best
    assert said and float(said[1]) == pytest.approx(fastest.days, rel=1e-3) and float(said[1]) > 20
    assert float(said[2].replace(",", "")) == pytest.approx(fastest.cost, rel=1e-3)


def test_of_as_many_devices_the_faster_wins_however_many_they_are() -> None:
    cluster = load_cluster("dgx-h100").model_copy(update={"nodes": 64})
    asked = {"seq": 1024, "tokens": 1e12, "stack": "trimaran", "fix": {"dp": 512, "tp": 1, "pp": 1, "cp": 1}}
    fast = plan("llama3.2-1b", cluster, 4096, **asked)
    few = plan("llama3.2-1b", cluster, 4096, objective="devices", deadline_days=1.2 * (fast.best.days or 0.0), **asked)
    assert [entry.layout for entry in few.entries] == [entry.layout for entry in fast.entries]
    chances = [entry.rival_chance for entry in few.entries]
    assert chances == pytest.approx([entry.rival_chance for entry in fast.entries])

    workload = workload_of("llama3.2-1b", 4096, seq=1024, tokens=1e12)
    case = Case.of(workload, cluster, load_stack("trimaran"))
    settings = settings_from(goal="devices", deadline_days=1.2 * (fast.best.days or 0.0), fixed=asked["fix"])
    told = explain(str(few.entries[7].layout), case, settings)
    assert (told.verdict, told.rank) == ("ranked", 8)


def test_a_deadline_and_a_budget_that_nothing_meets_are_told_beside_what_comes_nearest() -> None:
    asked = {"tokens": 1e11, "stack": "megatron", "devices": 64}
    cheap = plan("gpt3-13b", priced(), 512, objective="cost", **asked).best
    with pytest.raises(
        TrimaranError, match=r"no layout on 64 devices meets the deadline of 0\.5 days and the bu"
    ) as unmet:
        plan("gpt3-13b", priced(), 512, deadline_days=0.5, budget=100, **asked)
    assert "the budget of 100: the fastest, dp" in str(unmet.value)
    assert f", costs {cheap.cost:,.0f} and takes " in str(unmet.value)
    assert str(unmet.value).endswith("allow more devices or time, or more money")


def test_what_rounds_to_a_day_is_one_day() -> None:
    nearly = WholeTraining(parse_layout("dp8,bf16"), 1.00001, None)
    told = unmet_sentence(Objective(deadline_days=0.5), "no layout", nearly, nearly)
    assert "the deadline of 0.5 days" in told and "takes 1 day;" in told


def test_budget_bounds_the_fastest() -> None:
    asked = {"tokens": 1e11, "stack": "megatron"}
    free = plan("gpt3-13b", priced(), 512, **asked)
    budget = (free.best.cost or 0.0) * 0.97
    bound = plan("gpt3-13b", priced(), 512, budget=budget, **asked)
    assert all((e.cost or 0.0) <= budget for e in bound.entries)
    assert bound.best.sec_per_it >= free.best.sec_per_it


def test_the_fastest_may_leave_nodes_unused() -> None:
    """BLOOM's rule: the fastest iteration wins; heads and layers may leave part of the cluster idle."""
    found = plan(*BLOOM, devices=407, stack="megatron-deepspeed")
    assert found.best.devices < 407


def test_absurd_links_neither_warn_nor_win(recwarn: pytest.WarningsRecorder) -> None:
    slow = load_cluster(BLOOM[1]).model_copy(update={"inter": Link(bandwidth_gbps=1e-300, latency_us=1e9)})
    found = plan("gpt3-1b3", slow, 64, devices=32)
    assert found.best.devices <= 8
    assert not list(recwarn)


def test_more_devices_than_the_cluster_has_are_planned_and_said() -> None:
    found = plan(*BLOOM, devices=800, stack="megatron-deepspeed")
    assert found.devices == 800
    assert "states 52 nodes" in found.notes[0] and "100 of that kind" in found.notes[0]


def test_what_cannot_be_told_apart_is_what_the_error_covers() -> None:
    known = load_stack("megatron-deepspeed")
    found = plan(*BLOOM, devices=384, stack=known, top=100)
    rivals = [entry for entry in found.entries if entry.rival_chance >= 0.25]
    assert len(rivals) == found.cannot_tell_apart
    assert 1 <= len(found.measure) <= 4
    assert {str(layout) for layout in found.measure} <= {str(entry.layout) for entry in rivals}
    chances = [entry.rival_chance for entry in found.entries[1:]]
    assert chances == sorted(chances, reverse=True)


def test_a_model_that_the_own_trainer_refuses_is_not_ranked_for_it() -> None:
    model = load_model("gpt3-1b3").model_copy(update={"dropout": 0.1})
    with pytest.raises(TrimaranError, match=r"model.dropout is 0.1, and trimaran trains without: set it to 0"):
        plan(model, "jean-zay-a100-80gb", 512, devices=8, stack="trimaran")
    assert plan(model, "jean-zay-a100-80gb", 512, devices=8, stack="megatron").entries
    squared = model.model_copy(update={"dropout": 0.0, "mlp": "relu2"})
    with pytest.raises(TrimaranError, match=r"model.mlp is relu2, and trimaran trains gelu, swiglu and geglu"):
        plan(squared, "jean-zay-a100-80gb", 512, devices=8, stack="trimaran")
    classifier = model.model_copy(update={"dropout": 0.0, "head": "classifier"})
    with pytest.raises(TrimaranError, match=r"model.head is classifier, and trimaran trains a head over the vocab"):
        plan(classifier, "jean-zay-a100-80gb", 512, devices=8, stack="trimaran")
