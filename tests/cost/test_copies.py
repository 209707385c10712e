"""What compressed gradients and local steps take, send and keep, by the cost model; when a search tries them."""

from __future__ import annotations

from functools import partial

import pytest

from trimaran.api import plan, workload_of
from trimaran.bench.trial.trial_figures import first_timed_round, median_and_spread
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.estimates import Estimate
from trimaran.cost.network import crowded
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.layout.choices import CHOICES
from trimaran.layout.compression import BLOCK, FORMATS, LOW_RANK
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import violations
from trimaran.nouns.hardware.link import Link

# Single GPUs that links of 0.3 Gbps join.
FAST = load_cluster("dgx-h100")
SLOW = FAST.model_copy(
    update={"nodes": 8, "devices_per_node": 1, "inter": Link(bandwidth_gbps=0.3, latency_us=5000.0), "collectives": ()}
)
WORKLOAD, TRIMARAN = workload_of("gpt2-124m", 64, seq=1024), load_stack("trimaran")
CASE = Case.of(WORKLOAD, SLOW, TRIMARAN)
GIB = 2.0**30


def predicted(text: str) -> Estimate:
    return estimate(CASE, parse_layout(f"{text},bf16"))


@pytest.mark.parametrize("word", FORMATS)
def test_compressed_sums_take_as_much_less_as_they_send_less(word: str) -> None:
    exact, compressed = predicted("dp8,mbs2"), predicted(f"dp8,mbs2,compress-{word}")
    sent = {"fp16": 2, "int8": 1}[word] + 4 / BLOCK
    assert compressed.time.dp / exact.time.dp == pytest.approx(sent / 4, rel=0.02)
    error = compressed.memory[0].optimizer - exact.memory[0].optimizer
    assert error * GIB == pytest.approx(4 * CASE.model.parameters, rel=0.01)
    assert compressed.time.forward == exact.time.forward


def test_factors_are_as_small_as_their_ranks() -> None:
    """Of GPT-2's 124M parameters, 768 x 3072 at most and a vocabulary of 50,304."""
    exact, factors = predicted("dp8,mbs2"), predicted("dp8,mbs2,compress-powersgd")
    of_layer = LOW_RANK * (768 + 3 * 768 + 2 * 768 + 2 * (768 + 3072)) + 13 * 768
    sent = 12 * of_layer + LOW_RANK * (50304 + 768) + 1024 * 768
    slowest = exact.time.dp * sent / CASE.model.parameters
    assert slowest < factors.time.dp < 1.3 * slowest


def test_local_steps_share_one_sum_and_keep_two_more_states() -> None:
    exact, few, many = (predicted(f"dp8,mbs2{word}") for word in ("", ",local10", ",local500"))
    assert few.time.dp == pytest.approx(exact.time.dp / 10, rel=0.05)
    assert many.time.dp == pytest.approx(few.time.dp / 50)
    states = many.memory[0].optimizer - exact.memory[0].optimizer
    assert states * GIB == pytest.approx(8 * CASE.model.parameters, rel=0.01)
    both = predicted("dp8,mbs2,local10,compress-int8")
    assert both.time.dp == pytest.approx(few.time.dp / 4, rel=0.05)


def test_fragments_send_as_much_and_a_delay_hides_it_behind_as_many_steps() -> None:
    whole, parts, late, later = (
        predicted(f"dp8,mbs2,local60{word}")
        for word in ("", ",fragments6", ",fragments6,delay1", ",fragments6,delay10")
    )
    # six sums of a sixth each, for five more rounds of delays
    assert whole.time.dp < parts.time.dp < 1.05 * whole.time.dp
    step = late.time.forward + late.time.backward + late.time.head
    behind_one, behind_ten = (parts.time.dp - each.time.dp for each in (late, later))
    assert behind_one == pytest.approx(6 / 60 * step * (1 - crowded(SLOW)), rel=0.01)
    assert behind_ten == pytest.approx(10 * behind_one)
    kept = late.memory[0].optimizer - parts.memory[0].optimizer
    assert kept * GIB == pytest.approx(4 * CASE.model.parameters, rel=0.01)
    assert parts.memory == whole.memory


def test_replicas_that_shard_send_each_other_shards_alone() -> None:
    exact, local = (predicted(f"dp8,shard4,mbs2,zero2{word}") for word in ("", ",local100000"))
    gathers = exact.time.dp - predicted("dp8,shard4,mbs2,zero2,compress-int8").time.dp
    assert 0 < gathers < exact.time.dp and 0 < local.time.dp < exact.time.dp


def broken(text: str, model: str = "gpt2-124m", stack: str = "trimaran") -> list[str]:
    found = violations(parse_layout(f"{text},mbs1"), workload_of(model, 64, seq=1024), SLOW, load_stack(stack))
    return [each.sentence for each in found if each.rule in ("compression", "local_steps", "fragments")]


@pytest.mark.parametrize("word", ["compress-int8", "local50"])
@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("dp1", "DP is 1"),
        ("dp8,zero1", "ZeRO stage 1 shards over all DP 8 replicas"),
        ("dp8,fsdp", "ZeRO stage 3 shards over all DP 8 replicas"),
        ("dp8,ps", "dp_kind is parameter_server"),
        ("dp4,cp2", "CP is 2"),
        ("dp8,bf16_pure", "choose bf16"),
    ],
)
def test_what_is_not_built_is_refused_in_one_line(layout: str, word: str, says: str) -> None:
    (sentence,) = broken(f"{layout},{word}")
    assert says in sentence and "\n" not in sentence and ("set it to" in sentence or "choose" in sentence)


def test_combinations_that_are_built_are_not_refused() -> None:
    for layout in ("dp8", "dp8,shard4,zero3", "dp4,tp2", "dp2,pp4,bf16", "dp8,shard2,zero1"):
        assert broken(f"{layout},compress-int8") == broken(f"{layout},local50,compress-fp16") == []
    assert broken("dp4,tp2,pp2,compress-powersgd") == []
    assert "choose int8" in broken("dp8,shard4,zero2,compress-powersgd")[0]
    assert broken("dp8,fp16,local50") == [] and "scales its loss anew" in broken("dp8,fp16,compress-int8")[0]
    assert "8 experts" in broken("dp8,local50", "mixtral-8x7b")[0]
    assert broken("dp4,pp2,local60,fragments6,delay10") == []
    assert "local_steps is 0" in broken("dp8,fragments2")[0] and "local_steps is 0" in broken("dp8,delay2")[0]
    assert "no whole number of turns for fragments 7" in broken("dp8,local50,fragments7")[0]
    assert "a stage of PP 4 has 3 of 12" in broken("dp2,pp4,local60,fragments4")[0]
    assert "more than the 10 steps" in broken("dp8,local60,fragments6,delay11")[0]
    assert "no outer optimizer" in broken("dp8,local50", stack="megatron-core")[0]
    assert "no compression int8" in broken("dp8,compress-int8", stack="torchtitan")[0]


def test_a_search_tries_what_changes_the_result_only_where_it_is_held() -> None:
    inexact = [choice.name for choice in CHOICES if not choice.exact]
    assert inexact == ["compression", "local_steps", "fragments", "outer_delay"]
    ask = partial(plan, WORKLOAD.model, SLOW, WORKLOAD.global_batch, seq=WORKLOAD.seq_len, stack=TRIMARAN, top=50)
    exact = [entry.layout for entry in ask().entries]
    assert exact and not any(layout.departures for layout in exact)
    held, plain = ask(fix={"compression": "int8", "local": 50, "dp": 8}), ask(fix={"dp": 8})
    assert all(entry.layout.departures == "compress-int8,local50" for entry in held.entries)
    assert any("compress-int8,local50: trains to another loss" in note for note in held.notes)
    assert not any("another loss" in note for note in plain.notes)
    assert held.best.estimate.sec_per_it < plain.best.estimate.sec_per_it


def test_the_notation_names_what_departs() -> None:
    layout = parse_layout("dp8,compress-fp16,local50")
    assert (layout.compression, layout.local_steps, layout.departures) == ("fp16", 50, "compress-fp16,local50")
    assert parse_layout(layout.label()) == layout and Layout().departures == ""


def test_turns_and_delays_are_named_too() -> None:
    layout = parse_layout("dp8,local60,fragments6,delay10")
    assert (layout.fragments, layout.outer_delay, layout.departures) == (6, 10, "local60,fragments6,delay10")
    assert parse_layout(layout.label()) == layout


def test_a_rounds_last_step_counts_once_for_each_of_its_steps() -> None:
    times = (9.0, 1.0, 1.0, 4.0, 1.0, 1.0, 4.0, 1.0)
    assert median_and_spread(times, 1, 3) == (2.0, 0.0)
    assert median_and_spread(times, 1)[0] == 1.0
    assert (first_timed_round(1, 3), first_timed_round(3, 3), first_timed_round(1, 0)) == (3, 3, 0)
