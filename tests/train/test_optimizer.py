"""Optimizers and the loss scale: what one step does to the weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pool import Pool
from shapes import SMALL
from test_gpt import make_trainer
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.nouns.stack import Optimizer
from trimaran.protocol.job import TrainJob
from trimaran.train.engine.loss_scale import GROWTH_INTERVAL, LossScale, initial_scale
from trimaran.train.run.memory import memory_parts


@pytest.mark.parametrize("clip_grad", [0.0, 0.3])
def test_sgd_is_that_of_torch(make_job: Callable[..., TrainJob], clip_grad: float) -> None:
    trainer = make_trainer(make_job("mbs24", optimizer="sgd", clip_grad=clip_grad))
    places = trainer.flat.places.values()
    copies = [place.weight.detach().clone().requires_grad_() for place in places]
    groups = [
        {"params": [c for c, p in zip(copies, places, strict=True) if p.spec.decays is decays], "weight_decay": decay}
        for decays, decay in ((True, 0.1), (False, 0.0))
    ]
    reference = torch.optim.SGD(groups, lr=0.1)
    for _ in range(3):
        trainer.forward_backward()
        for copy, place in zip(copies, places, strict=True):
            copy.grad = place.weight.main_grad.clone()
        norm = trainer.flat.squared_norm().sqrt().item()
        if clip_grad:
            torch.nn.utils.clip_grad_norm_(copies, clip_grad)
        reference.step()
        trainer.optimizer.step(0.1, norm)
        trainer.flat.clear_grads()
        for copy, place in zip(copies, places, strict=True):
            torch.testing.assert_close(place.weight.detach(), copy.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "layout",
    [
        "dp2,tp2,mbs6,zero1",
        *(pytest.param(layout, marks=pytest.mark.proof)
          for layout in ("dp2,tp2,pp2,mbs6,zero2", "dp4,mbs6,fsdp", "dp2,pp2,mbs6,ps")),
    ],
)  # fmt: skip
def test_sgd_on_layouts_agrees_with_one_process(pool: Pool, make_job: Callable[..., TrainJob], layout: str) -> None:
    one, several = (
        pool.run(make_job(each, optimizer="sgd", learning_rate=0.3, steps=10)).losses for each in ("mbs24", layout)
    )
    assert one[-1] < one[0] - 0.1
    assert several == pytest.approx(one, rel=1e-5)


def test_an_fp16_step_that_overflows_is_skipped_and_halves_the_scale(make_job: Callable[..., TrainJob]) -> None:
    trainer = make_trainer(make_job("mbs24,fp16"))
    assert not (usual := trainer.step()).skipped
    assert usual.loss_scale == initial_scale(24 * 16) == 2.0**11
    trainer.loss_scale.scale = 2.0**40
    (weights,) = trainer.flat.master
    before, updates = weights.clone(), trainer.optimizer.steps
    result = trainer.step()
    assert result.skipped and result.loss_scale == 2.0**40
    assert trainer.loss_scale.scale == 2.0**39
    assert torch.equal(weights, before) and trainer.optimizer.steps == updates


def test_an_fp16_gradient_that_no_scale_brings_into_range_is_bad(make_job: Callable[..., TrainJob]) -> None:
    """A training whose every step is skipped has learned nothing, and is not to end as if it had."""
    trainer = make_trainer(make_job("mbs24,fp16"))
    healthy = trainer.forward_backward

    def forward_backward() -> torch.Tensor:
        loss = healthy()
        for grads in trainer.flat.grads:
            grads.fill_(torch.inf)
        return loss

    trainer.forward_backward = forward_backward  # type: ignore[method-assign]
    trainer.loss_scale.scale = 4.0
    steps = [trainer.step() for _ in range(4)]
    assert [step.loss_scale for step in steps] == [4.0, 2.0, 1.0, 1.0] and all(step.skipped for step in steps)
    assert [step.bad for step in steps] == [None, None, *["the gradient's norm is not finite: inf"] * 2]


def test_losses_and_norms_do_not_know_of_the_scale(make_job: Callable[..., TrainJob]) -> None:
    first, other = make_trainer(make_job("mbs24,fp16")), make_trainer(make_job("mbs24,fp16"))
    other.loss_scale.scale /= 4
    for _ in range(3):
        usual, quarter = first.step(), other.step()
        assert quarter.loss == pytest.approx(usual.loss, rel=1e-4)
        assert quarter.grad_norm == pytest.approx(usual.grad_norm, rel=1e-2)


def test_the_scale_doubles_after_enough_good_steps_and_goes_on_where_it_stood() -> None:
    scale = LossScale("fp16", 1000)
    scale.update(overflow=True)
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(overflow=False)
    resumed = LossScale("fp16", 1000)
    resumed.go_on_from(scale.counts())
    assert resumed.scale == 2.0**11
    resumed.update(overflow=False)
    assert (resumed.scale, resumed.good_steps) == (2.0**12, 0)


def test_other_precisions_have_a_scale_of_one() -> None:
    scale = LossScale("bf16", 1000)
    scale.update(overflow=True)
    assert scale.scale == 1.0
    assert scale.counts() == {}


def test_a_trainer_goes_on_with_the_scale_that_it_had(make_job: Callable[..., TrainJob]) -> None:
    first, other = make_trainer(make_job("mbs24,fp16")), make_trainer(make_job("mbs24,fp16"))
    first.loss_scale.scale, first.loss_scale.good_steps = 64.0, 17
    other.go_on_from(3, 72, first.counts())
    assert (other.loss_scale.scale, other.loss_scale.good_steps) == (64.0, 17)
    other.go_on_from(3, 72, make_trainer(make_job("mbs24")).counts())  # one of fp32 has none to hand on
    assert other.loss_scale.scale == 64.0


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("precision", load_stack("trimaran").precisions)
def test_a_parameter_takes_the_bytes_that_the_cost_model_says(
    make_job: Callable[..., TrainJob], precision: str, optimizer: Optimizer
) -> None:
    model = SMALL.model_copy(update={"hidden": 96, "ffn_hidden": 384, "head_dim": 4})
    job = make_job(f"mbs24,{precision}", model=model, optimizer=optimizer)
    trainer = make_trainer(job)
    held = memory_parts(trainer.flat, trainer.optimizer.state, {"peak": 1.0, "baseline": 0.0})
    case = Case.of(job.workload, load_cluster("jean-zay-a100-80gb"), load_stack("trimaran"))
    predicted = estimate(case, job.layout).memory[0]
    for part in ("weights", "gradients", "optimizer"):
        # each weight begins on a line of 64 elements
        assert held[part] == pytest.approx(getattr(predicted, part), rel=0.02), part
