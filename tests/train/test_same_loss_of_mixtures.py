"""Mixtures of experts, every token kept: a layout changes the speed of their training, never its result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pool import Pool, Run
from reference import Reference
from shapes import MIXTURE
from test_same_loss_on_every_layout import FEW_STEPS, assert_same
from trimaran.nouns.dispatcher import Router
from trimaran.nouns.model import Model
from trimaran.protocol.job import TrainJob

# DeepSeek-V3's router; without shared experts and first dense layers.
BIASED = MIXTURE.model_copy(
    update={
        "shared_experts": 0,
        "dense_layers": 0,
        "expert_groups": 4,
        "top_groups": 2,
        "router": Router(scores="sigmoid", scale=2.5, group_best=2, bias=True),
    }
)
LOSSES = {"balance_loss": 0.01, "router_z_loss": 1e-3}

# Between them: EP over replicas, over TP ranks and over both, ETP that is TP, less and more; each ZeRO stage and kind
# of data parallelism, each schedule, recompute, and another placement.
QUICK = (
    "dp2,ep2,mbs6",
    "dp4,ep2,etp2,mbs3,fsdp,recompute-full",
    "dp2,tp2,pp2,mbs6,sp,ep2,zero1,recompute-layernorm+moe_act+shared_experts",
)
LAYOUTS = (
    "dp8,ep8,mbs3",
    "dp8,ep4,mbs3,zero2",
    "dp4,ep2,mbs3,zero1",
    "dp4,ep4,mbs6,fsdp,recompute-full2",
    "dp3,mbs8,zero1",
    "dp8,ep2,etp4,mbs3",
    "dp4,etp4,mbs3,zero2",
    "dp4,ep2,mbs3,ps",
    "tp2,mbs12,sp",
    "tp2,mbs12,sp,etp1",
    "tp2,mbs12,sp,ep2,etp1,recompute-layernorm+moe_act",
    "tp4,mbs24,sp,ep2,etp2,recompute-selective",
    "tp4,mbs12,sp,ep4,etp1",
    "tp4,mbs12,sp,etp2",
    "dp2,tp2,mbs6,sp,ep4,etp1,zero2,recompute-moe",
    "dp2,tp4,mbs6,sp,ep2,zero1",
    "dp2,tp2,mbs6,sp,etp4",
    "dp4,tp2,mbs3,sp,ep4,etp1,fsdp,recompute-full",
    "dp4,tp2,mbs3,sp,ep2,etp2,zero1",
    "dp2,pp2,ep2,mbs6,gpipe",
    "dp2,pp2,ep2,mbs3,gpipe,fsdp",
    "dp2,pp2,vpp2,ep2,mbs6,recompute-layernorm+mlp+moe",
    "dp2,pp4,ep2,mbs3,zero1",
    "pp4,mbs6,zero_bubble",
    "dp2,pp2,ep2,mbs6,zero_bubble",
    "dp4,pp2,ep2,etp2,mbs3,zero_bubble,zero1,recompute-moe_act+shared_experts",
    "dp2,tp2,pp2,mbs6,sp,ep4,etp1,vpp2,recompute-full",
    "dp2,tp2,pp2,mbs3,sp,ep2,etp2,gpipe,fsdp",
    "dp2,tp2,pp2,mbs6,sp,ep2,place-pp-dp-tp",
    "dp2,tp2,pp2,mbs6,sp,ep2,etp1,place-dp-pp-tp,zero2",
    "dp4,pp2,ep4,mbs3,split1-3,zero2,recompute-full3",
    # tokens of one sequence on several ranks, ZeRO among a part of the replicas, and of a lone replica's experts
    "cp2,mbs12,ep2,recompute-layernorm+moe",
    "dp2,cp2,mbs6,ep4,zero1",
    "cp2,tp2,mbs12,sp,ep2,etp2,cp-all_gather",
    "dp8,shard4,ep2,mbs3,fsdp",
    "dp4,shard2,ep2,mbs3,zero1",
    "tp2,mbs12,sp,etp1,zero1",
)


@pytest.mark.parametrize("layout", QUICK)
def test_mixtures_agree_with_one_process(
    pool: Pool, make_job: Callable[..., TrainJob], reference: Reference, layout: str
) -> None:
    assert_same(pool.run(make_job(layout, model=MIXTURE, **LOSSES)), reference.run(MIXTURE, **LOSSES))


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mixtures_agree_on_every_layout(
    pool: Pool, make_job: Callable[..., TrainJob], reference: Reference, layout: str
) -> None:
    course = LOSSES | {"steps": FEW_STEPS}
    assert_same(pool.run(make_job(layout, model=MIXTURE, **course)), reference.run(MIXTURE, **course))


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS[::2])
def test_biased_routers_agree_with_one_process(
    pool: Pool, make_job: Callable[..., TrainJob], reference: Reference, layout: str
) -> None:
    assert_same(pool.run(make_job(layout, model=BIASED, steps=FEW_STEPS)), reference.run(BIASED, steps=FEW_STEPS))


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["dp2,tp2,pp2,mbs6,sp,ep4,etp1", "dp4,ep2,etp2,mbs3", "dp8,ep4,mbs3,fsdp"])
def test_ranks_that_share_no_memory_agree_with_one_process(
    pool: Pool, make_job: Callable[..., TrainJob], reference: Reference, layout: str
) -> None:
    course = LOSSES | {"steps": FEW_STEPS}
    run = pool.run(make_job(layout, model=MIXTURE, **course), machines="several")
    assert_same(run, reference.run(MIXTURE, **course))


def assert_goes_on(
    pool: Pool,
    make_job: Callable[..., TrainJob],
    reference: Reference,
    model: Model,
    folder: Path,
    before: str,
    after: str,
) -> None:
    """Three steps on one layout and three more on another have the losses of six on one process."""

    def train(layout: str, steps: int) -> Run:
        job = make_job(layout, model=model, steps=6, checkpoint_every=3)
        update = {"checkpoint_dir": str(folder), "steps": steps, "resume": True}
        return pool.run(job.model_copy(update=update))

    first, then = train(before, 3).losses, train(after, 6).losses
    assert [len(first), len(then)] == [3, 3]
    assert first + then == pytest.approx(reference.run(model, steps=6).losses, rel=1e-5)


ROUTES = (
    ("dp2,tp2,mbs6,sp,ep4,etp1,zero1", "dp4,ep2,etp2,mbs3,fsdp"),
    ("dp2,ep2,mbs6", "dp2,mbs6"),
    ("dp4,ep2,mbs3,zero2", "tp4,mbs12,sp,etp2"),
    ("pp2,mbs6", "dp2,pp2,ep2,mbs6,vpp2"),
    ("dp8,ep8,mbs3,fsdp", "mbs24"),
    ("mbs24", "dp4,etp4,mbs3,zero1"),
)


@pytest.mark.parametrize(
    ("before", "after"), [ROUTES[0], *(pytest.param(*route, marks=pytest.mark.proof) for route in ROUTES[1:])]
)
def test_a_mixture_goes_on_on_any_other_layout(
    pool: Pool, make_job: Callable[..., TrainJob], reference: Reference, tmp_path: Path, before: str, after: str
) -> None:
    assert_goes_on(pool, make_job, reference, BIASED, tmp_path, before, after)
