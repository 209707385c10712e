"""Replicas that take unlike numbers of micro-batches: notation, what each takes, and every refusal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import violations
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.workload import RampUp, Workload

CLUSTER, TRIMARAN = load_cluster("dgx-h100"), load_stack("trimaran")
GPT2, MIXTURE = load_model("gpt2-124m"), load_model("mixtral-8x7b")
RAMP = RampUp(start=4, increment=4, samples=1000)


def refusals(
    text: str, batch: int = 16, stack: str = "trimaran", ramp: RampUp | None = None, model: Model = GPT2
) -> str:
    workload = Workload(model=model, seq_len=1024, global_batch=batch, ramp_up=ramp)
    found = violations(parse_layout(text), workload, CLUSTER, load_stack(stack))
    return "; ".join(f"{one.of} {one.rule}: {one.sentence}" for one in found)


@pytest.mark.parametrize(
    ("text", "batches"),
    [
        ("dp2,batches5-3", (5, 3)),
        ("dp8,batches3x6-1-1", (3, 3, 3, 3, 3, 3, 1, 1)),
        ("dp3,tp1,pp2,mbs2,batches4-3-1,split7-5", (4, 3, 1)),
    ],
)
def test_the_notation_states_what_each_replica_takes(text: str, batches: tuple[int, ...]) -> None:
    layout = parse_layout(text)
    assert layout.replica_batches == batches
    assert parse_layout(layout.label()) == layout
    assert layout.micro_batches(10**6) == max(batches)


def test_a_replica_that_takes_nothing_and_more_replicas_than_there_can_be_are_refused() -> None:
    with pytest.raises(TrimaranError, match="replica_batches"):
        parse_layout("dp2,batches4-0")
    with pytest.raises(TrimaranError, match="batches has 999999 replicas, and at most 100000"):
        parse_layout("dp2,batches4x999999")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 4), st.booleans())
def test_replicas_share_out_every_sample_once_in_order(batches: list[int], mbs: int, unlike: bool) -> None:
    stated = tuple(batches) if unlike else ()
    layout = Layout(dp=len(batches), mbs=mbs, replica_batches=stated)
    whole = mbs * (sum(batches) if unlike else len(batches) * batches[0])
    shares = [layout.samples_of(replica, whole) for replica in range(layout.dp)]
    assert [sample for first, count in shares for sample in range(first, first + count)] == list(range(whole))
    assert [count // mbs for _, count in shares] == (batches if unlike else [batches[0]] * layout.dp)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("dp2,mbs2,batches5-2-1", ("arithmetic", "replica_batches 5-2-1", "3 numbers", "DP is 2", "one for each")),
        ("dp2,mbs2,batches5-2", ("arithmetic", "5-2 adds up to 7", "of 2 = 14", "global batch is 16", "deal out")),
        ("dp3,mbs4,batches1x3", ("arithmetic", "1-1-1 adds up to 3", "12", "16")),
        ("dp2,mbs2,batches5-3,zero2", ("software", "ZeRO stage 2", "choose ZeRO stage 0 or 1")),
        ("dp2,mbs2,batches5-3,fsdp", ("ZeRO stage 3",)),
        ("dp2,mbs2,batches5-3,ps", ("parameter_server", "choose all_reduce")),
        ("dp2,mbs2,batches5-3,compress-int8", ("compression is int8", "set it to none")),
        ("dp2,mbs2,batches5-3,local50", ("local_steps is 50", "set it to 0")),
        ("dp2,pp2,mbs2,batches5-3,zbv", ("zbv is folded", "choose 1f1b")),
        ("dp2,pp2,vpp2,mbs2,batches5-3", ("multiples of PP 2, but there are 5", "there are 5")),
        ("dp2,pp4,mbs2,batches5-3,zero_bubble", ("at least PP 4", "there are 3")),
    ],
)
def test_what_cannot_be_is_refused_with_its_numbers_and_a_way_out(text: str, sentences: tuple[str, ...]) -> None:
    found = refusals(text)
    assert all(sentence in found for sentence in sentences), found


def test_a_ramp_up_and_experts_over_replicas_are_refused() -> None:
    assert "a ramp-up has several: leave one of the two out" in refusals("dp2,mbs2,batches5-3", ramp=RAMP)
    assert "EP 2 x ETP 1 has ranks of several replicas" in refusals("dp2,mbs2,ep2,batches5-3", model=MIXTURE)
    # the ranks of one replica exchange tokens
    assert not refusals("dp2,tp2,ep2,etp1,sp,mbs2,batches5-3,bf16", model=MIXTURE)


@pytest.mark.parametrize(
    "text",
    [
        "dp2,mbs2,batches5-3",
        "dp2,pp2,tp2,mbs2,batches7-1,zero1",
        "dp4,shard2,mbs2,batches3-3-1-1,zero1",
        "dp3,mbs1,batches9-6-1",
    ],
)
def test_what_replicas_of_the_own_trainer_can_take_is_no_other_stacks(text: str) -> None:
    assert not refusals(text)
    for stack in ("megatron-core", "gpipe", "torchtitan"):
        assert f"all replicas of {stack} take as many: leave it out or choose another stack" in refusals(
            text, stack=stack
        )


@pytest.mark.parametrize("text", ["dp2,pp2,vpp2,mbs2,batches6-2", "dp2,pp3,mbs2,batches5-3,zero_bubble"])
def test_schedules_ask_of_each_replica_what_they_ask_of_all(text: str) -> None:
    assert not refusals(text)
