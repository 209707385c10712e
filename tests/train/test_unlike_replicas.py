"""Replicas that take unlike numbers of micro-batches train as one process does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest

from pool import Pool
from reference import Reference
from shapes import LLAMA, MIXTURE, SMALL, as_deep_as
from trimaran.cost.case import Case
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.layout.notation import parse_layout
from trimaran.nouns.model import Model
from trimaran.nouns.workload import Workload
from trimaran.protocol.job import TrainJob
from trimaran.recipe.train_settings import TrainSettings
from trimaran.study.dry_run import dry_run
from trimaran.train.run.slow_ranks import STEPS, SlowRanks

SETTINGS = {"steps": 3, "validation": 0.2, "eval_every": 3, "eval_steps": 2}
LAYOUTS = (
    (SMALL, "dp2,mbs3,batches6-2"),
    (SMALL, "dp2,mbs1,batches1-23"),
    (SMALL, "dp3,mbs4,batches1-3-2"),
    (SMALL, "dp2,pp2,mbs6,batches3-1"),
    (SMALL, "dp2,pp2,mbs3,batches1-7,gpipe"),
    (SMALL, "dp2,pp2,vpp2,mbs3,batches6-2"),
    (SMALL, "dp2,pp2,mbs4,batches2-4,zero_bubble"),
    (SMALL, "dp2,pp2,mbs3,batches7-1,split3-5,zero1"),
    (SMALL, "dp2,tp2,mbs6,batches3-1"),
    (SMALL, "dp2,tp2,pp2,mbs6,batches1-3,sp,recompute-full2,zero1"),
    (SMALL, "dp4,mbs2,batches5-4-2-1,zero1"),
    (SMALL, "dp4,shard2,mbs2,batches5-4-2-1,zero1"),
    (SMALL, "dp4,shard2,pp2,vpp2,mbs1,batches10-2-8-4,zero1"),
    (SMALL, "dp2,cp2,mbs6,batches1-3"),
    (SMALL, "dp2,tp2,pp2,mbs6,batches3-1,place-dp-pp-tp"),
    (LLAMA, "dp2,cp2,tp2,mbs3,batches5-3,sp,zero1"),
    (MIXTURE, "dp2,mbs3,batches5-3"),
    (MIXTURE, "dp2,tp2,ep2,etp1,mbs3,batches2-6,sp"),
)


@pytest.mark.parametrize(
    ("model", "layout"),
    [LAYOUTS[0], *(pytest.param(*case, marks=pytest.mark.proof) for case in LAYOUTS[1:])],
    ids=lambda value: value if isinstance(value, str) else value.positions,
)
@pytest.mark.parametrize("machines", ["one", pytest.param("several", marks=pytest.mark.proof)])
def test_unlike_replicas_agree_with_one_process(
    pool: Pool,
    make_job: Callable[..., TrainJob],
    reference: Reference,
    model: Model,
    layout: str,
    machines: Literal["one", "several"],
) -> None:
    model = as_deep_as(parse_layout(layout), model)
    expected = reference.run(model, **SETTINGS)
    run = pool.run(make_job(layout, model=model, **SETTINGS), machines)
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    assert run.validation == pytest.approx(expected.validation, rel=1e-5)
    for name, norm in expected.grad_norm_of.items():
        assert run.grad_norm_of[name] == pytest.approx(norm, rel=1e-5), name


def test_a_rank_that_has_more_to_do_by_its_layout_is_not_slow_but_one_that_becomes_slow_is() -> None:
    slow = SlowRanks(parse_layout("dp2,mbs1,batches6-2"))
    told = [
        (step, one.rank)
        for step, own_s in enumerate([[0.3, 0.1]] * 30 + [[0.3, 0.2]] * 60)
        for one in slow.after(own_s, 8)
    ]
    ((step, rank),) = told
    assert rank == 1 and 30 < step < 30 + STEPS


@pytest.mark.proof
def test_a_dry_run_plans_each_rank_by_the_micro_batches_of_its_replica() -> None:
    workload = Workload(model=load_model("gpt2-124m"), seq_len=1024, global_batch=16)
    case = Case.of(workload, load_cluster("dgx-h100"), load_stack("trimaran"))
    layout = parse_layout("dp2,mbs1,bf16,batches4-12")
    # named, and the one of its kind that is traced where none is: of the replica that takes the most
    fewest, most = (
        next(row for row in dry_run(case, TrainSettings(), layout, rank) if row["what"] == "products")
        for rank in (0, None)
    )
    for products in (fewest, most):
        assert products["traced"] == pytest.approx(products["planned"], rel=1e-6)
    assert most["traced"] == pytest.approx(3 * fewest["traced"], rel=1e-6)
