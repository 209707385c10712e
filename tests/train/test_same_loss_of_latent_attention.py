"""Latent attention, dense and before DeepSeek's router: a layout changes its speed, never its result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pool import Pool
from reference import Reference
from shapes import DEEPSEEK, LATENT
from test_same_loss_of_mixtures import assert_goes_on
from test_same_loss_on_every_layout import FEW_STEPS, assert_same
from trimaran.nouns.attention import LatentAttention
from trimaran.nouns.model import Model
from trimaran.protocol.job import TrainJob

# Queries made from the hidden state itself; and windows with scores of a scale of their own.
WITHOUT_QUERY_RANK = LATENT.model_copy(
    update={"latent_attention": LatentAttention(query_rank=0, kv_rank=12, plain_dim=4, rotary_dim=2, value_dim=3)}
)
# Values wider than queries and keys, as no published model has them.
WIDE_VALUES = LATENT.model_copy(
    update={"latent_attention": LatentAttention(query_rank=20, kv_rank=12, plain_dim=4, rotary_dim=2, value_dim=9)}
)
WINDOWED = LATENT.model_copy(update={"sliding_window": 6, "query_scale": 3.0})

# Between them: TP with and without slices of the sequence, each schedule, recompute, ZeRO stage and kind of data
# parallelism, and sequences that ranks share, in every way.
LAYOUTS = (
    "dp8,mbs3",
    "dp4,shard2,mbs3,zero2",
    "dp4,mbs3,fsdp,recompute-full2",
    "dp2,mbs6,ps",
    "tp2,mbs24",
    "tp8,mbs24",
    "tp4,mbs12,sp,recompute-mla_up_proj",
    "tp8,mbs24,sp,recompute-selective",
    "pp4,mbs6,zero_bubble",
    "tp2,pp2,vpp2,mbs6,sp,recompute-selective",
    "tp2,pp2,mbs6,gpipe",
    "dp2,tp2,pp2,mbs6,zero_bubble,zero1,recompute-layernorm+mla_up_proj+mlp",
    "dp2,tp2,pp2,mbs6,fsdp,sp,gpipe",
    "cp2,mbs24",
    "cp4,mbs12,recompute-full",
    "cp2,mbs12,cp-all_gather,recompute-selective",
    "cp2,tp2,mbs24,cp-ulysses",
    "dp2,cp2,tp2,mbs6,sp,zero1,recompute-core_attn+mla_up_proj",
    "cp2,tp2,pp2,mbs6,sp,cp-all_gather",
    "dp2,cp4,mbs6,cp-ulysses,zero1,recompute-selective",
)
LAYOUTS_OF_EXPERTS = (
    "dp8,ep8,mbs3",
    "dp4,ep2,etp2,mbs3,fsdp,recompute-full",
    "tp2,mbs12,sp,ep2,etp1",
    "tp4,mbs12,sp,etp2,recompute-selective",
    "dp2,tp2,pp2,mbs6,sp,ep4,etp1,zero1,recompute-layernorm+mla_up_proj+moe_act",
    "dp2,pp2,vpp2,ep2,mbs6",
    "pp4,mbs6,zero_bubble",
    "cp2,mbs12,ep2",
    "cp2,tp2,mbs12,sp,ep2,etp2,cp-all_gather",
    "dp2,cp2,mbs6,ep4,zero1,cp-ulysses",
)
# At step 13 of 20 one token's scores of two experts lie within round-off of each other: where ranks of TP or of a ring
# share its attention it goes to the other one, and losses part by 1.5e-5 until step 20.
UNTIL_A_CHOICE = 10


@pytest.mark.parametrize(
    "layout",
    [
        "dp2,tp2,pp2,mbs12,sp,recompute-mla_up_proj",
        *(pytest.param(layout, marks=pytest.mark.proof) for layout in LAYOUTS),
    ],
)
def test_latent_attention_agrees_with_one_process(
    pool: Pool, make_job: Callable[..., TrainJob], reference: Reference, layout: str
) -> None:
    assert_same(pool.run(make_job(layout, model=LATENT, steps=FEW_STEPS)), reference.run(LATENT, steps=FEW_STEPS))


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS_OF_EXPERTS)
def test_latent_attention_before_experts_agrees_with_one_process(
    pool: Pool, make_job: Callable[..., TrainJob], reference: Reference, layout: str
) -> None:
    steps = min(FEW_STEPS, UNTIL_A_CHOICE)
    assert_same(pool.run(make_job(layout, model=DEEPSEEK, steps=steps)), reference.run(DEEPSEEK, steps=steps))


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["dp2,tp2,pp2,mbs6,sp", "cp2,tp2,mbs12", "cp2,tp2,mbs12,sp,cp-ulysses"])
@pytest.mark.parametrize("model", [WITHOUT_QUERY_RANK, WINDOWED], ids=["without query rank", "windowed"])
def test_other_latent_models_agree_with_one_process(
    pool: Pool, make_job: Callable[..., TrainJob], reference: Reference, model: Model, layout: str
) -> None:
    assert_same(pool.run(make_job(layout, model=model, steps=FEW_STEPS)), reference.run(model, steps=FEW_STEPS))


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["tp2,mbs12", "dp2,cp2,pp2,mbs6,zero1", "cp4,mbs6,cp-ulysses,recompute-full"])
def test_documents_apart_agree_with_one_process(
    pool: Pool, make_job: Callable[..., TrainJob], reference: Reference, layout: str
) -> None:
    settings = {"steps": 5, "document_mask": True}
    assert_same(pool.run(make_job(layout, model=LATENT, **settings)), reference.run(LATENT, **settings))


@pytest.mark.parametrize("document_mask", [False, True])
def test_values_wider_than_keys_agree_with_one_process_on_ranks_that_share_a_sequence(
    pool: Pool, make_job: Callable[..., TrainJob], reference: Reference, document_mask: bool
) -> None:
    settings = {"steps": 5, "document_mask": document_mask}
    assert_same(pool.run(make_job("cp2,mbs12", model=WIDE_VALUES, **settings)), reference.run(WIDE_VALUES, **settings))


ROUTES = (
    ("dp2,tp2,mbs6,sp,ep4,etp1,zero1", "pp2,mbs6"),
    ("pp2,vpp2,mbs6", "tp4,mbs12,sp,etp2"),
    ("cp2,tp2,mbs12,sp,ep2,etp2", "dp4,ep2,etp2,mbs3,fsdp"),
)


@pytest.mark.proof
@pytest.mark.parametrize(("before", "after"), ROUTES)
def test_latent_attention_goes_on_on_any_other_layout(
    pool: Pool, make_job: Callable[..., TrainJob], reference: Reference, tmp_path: Path, before: str, after: str
) -> None:
    assert_goes_on(pool, make_job, reference, DEEPSEEK, tmp_path, before, after)
