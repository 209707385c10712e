"""Exchanges of tokens behind shared experts and behind another micro-batch's layer."""

from __future__ import annotations

import pytest

from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.estimates import Estimate
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import violations
from trimaran.nouns.workload import Workload

DEEPSEEK = Workload(model=load_model("deepseek-v3"), seq_len=4096, global_batch=4096)
H100, STACK = load_cluster("dgx-h100"), load_stack("megatron-core")
CASE = Case.of(DEEPSEEK, H100, STACK)
INTERLEAVED = "dp16,pp16,vpp2,ep16,etp1,dispatch-deepep,mbs1,zero1,bf16"


def predicted(text: str) -> Estimate:
    return estimate(CASE, parse_layout(text))


def test_what_hides_behind_another_micro_batch_is_all_but_its_multiprocessors_and_the_ends() -> None:
    plain, beside = predicted(INTERLEAVED), predicted(INTERLEAVED + ",overlap-batch")
    passes, alone = 4096 / 16 * 2, 2 * 15 + 16 + 1
    hidden = (1.0 - alone / passes) * (1.0 - 16 / 132)
    assert beside.time.ep == pytest.approx(plain.time.ep * (1.0 - hidden), rel=1e-6)
    assert beside.sec_per_it < plain.sec_per_it
    # the forward that runs ahead keeps one more chunk's activations
    assert beside.mem_gib > plain.mem_gib


def test_shared_experts_hide_no_more_than_they_compute() -> None:
    text = INTERLEAVED.replace("deepep", "alltoall")
    plain, beside = predicted(text), predicted(text + ",overlap-shared")
    assert 0.0 < beside.time.ep < plain.time.ep
    assert beside.time.forward == plain.time.forward and beside.mem_gib == plain.mem_gib


@pytest.mark.parametrize("word", ["full", "moe"])
def test_what_is_made_again_hides_behind_shared_experts_too(word: str) -> None:
    text = INTERLEAVED.replace("deepep", "alltoall")
    once, shown = predicted(text).time.ep, predicted(text + ",overlap-shared").time.ep
    again = predicted(f"{text},recompute-{word}").time.ep - once
    again_shown = predicted(f"{text},recompute-{word},overlap-shared").time.ep - shown
    # half of what is exchanged in all is made again, beside a forward of the experts; a backward is as two
    assert again == pytest.approx(0.5 * once, rel=0.02)
    assert again - again_shown == pytest.approx((once - shown) / 3, rel=0.1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (INTERLEAVED.replace("vpp2,", "") + ",overlap-batch", "PP 16 runs 1f1b and not interleaved"),
        ("dp16,ep16,etp1,mbs1,zero1,bf16,overlap-batch", "prediction of depth 1 over PP 1 does not go with that"),
        (INTERLEAVED + ",recompute-full,overlap-batch", "recompute full makes exchanges again"),
        (INTERLEAVED.replace("deepep", "allgather") + ",overlap-shared", "the dispatcher allgather has nothing"),
        (INTERLEAVED + ",overlap-shared", "beside the dispatcher alltoall alone, and not beside deepep"),
        ("dp16,pp16,mbs1,zero1,bf16,overlap-shared", "EP is 1 and nothing is exchanged"),
    ],
)
def test_what_cannot_hide_is_refused_with_its_reason(text: str, reason: str) -> None:
    sentences = [
        v.sentence for v in violations(parse_layout(text), DEEPSEEK, H100, STACK) if v.rule == "expert_overlap"
    ]
    assert sentences and reason in sentences[0]


def test_a_model_without_shared_experts_hides_nothing_behind_them() -> None:
    qwen = DEEPSEEK.model_copy(update={"model": load_model("qwen3-235b-a22b")})
    layout = parse_layout(INTERLEAVED.replace("deepep", "alltoall") + ",overlap-shared")
    assert any("no shared experts" in v.sentence for v in violations(layout, qwen, H100, STACK))
