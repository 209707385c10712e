"""A mixture of experts is what its equations say, keeps every token, and evens out its load as it is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shapes import LLAMA, MIXTURE
from test_gpt import CPU, make_trainer
from test_worker import run_ranks
from trimaran.cost.case import Case
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.shapes import kept_bytes
from trimaran.files.catalogue import load_stack
from trimaran.layout.layout import Layout
from trimaran.nouns.attention import LatentAttention
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.dispatcher import Router as RouterNoun
from trimaran.nouns.hardware.device import Device
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.model import Model
from trimaran.protocol.job import TrainJob
from trimaran.train.comm.group import GroupFactory
from trimaran.train.comm.mesh import Mesh, build_mesh
from trimaran.train.engine.expert_load import ExpertLoad
from trimaran.train.engine.flat_weights import FlatWeights
from trimaran.train.engine.trainer import Trainer
from trimaran.train.model.mixture import experts
from trimaran.train.model.mixture.mixture import Mixture
from trimaran.train.model.mixture.router import Balance
from trimaran.train.model.weight import drawn

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, not normalised, scaled": {"router": RouterNoun(normalised=False, scale=16.0)},
    "groups by their best": {"expert_groups": 4, "top_groups": 2},
    "sigmoid, groups by their two best, biased": {
        "expert_groups": 2, "top_groups": 1,
        "router": RouterNoun(scores="sigmoid", scale=2.5, group_best=2, bias=True),
    },
}  # fmt: skip


def one_rank() -> Mesh:
    mesh = build_mesh(Layout(), 0, range(1), GroupFactory(CPU))
    assert mesh is not None
    return mesh


def mixture_of(model: Model) -> tuple[Mixture, FlatWeights]:
    """A mixture on one rank with weights of a size at which nothing is small, biases of the router among them."""
    mixture = Mixture(model, one_rank(), 0)
    flat = FlatWeights(mixture, Layout(), one_rank(), drawn(3), CPU)
    for name, place in flat.places.items():
        drawn_again = torch.randn(place.weight.shape, generator=torch.Generator().manual_seed(5))
        place.weight.data.copy_(drawn_again * (0.3 if name == "router.bias" else 1.0 / place.weight.shape[-1] ** 0.5))
    return mixture, flat


def plain_weights(model: Model, logits: Tensor, bias: Tensor | None) -> dict[int, Tensor]:
    """The experts of one token and their weights, by the equations."""
    settings, count = model.router, max(1, model.expert_groups)
    scores = logits.softmax(0) if settings.scores == "softmax" else logits.sigmoid()
    choice = (scores if bias is None else scores + bias).tolist()
    size = len(choice) // count
    groups = [list(range(first, first + size)) for first in range(0, len(choice), size)]
    worth = [sum(sorted((choice[e] for e in group), reverse=True)[: settings.group_best]) for group in groups]
    kept = sorted(range(count), key=lambda group: worth[group], reverse=True)[: model.top_groups or 1]
    allowed = [e for group in kept for e in groups[group]]
    chosen = sorted(allowed, key=lambda e: choice[e], reverse=True)[: model.top_k]
    total = sum((scores[e] for e in chosen), torch.zeros(())) if settings.normalised else torch.ones(())
    return {e: settings.scale * scores[e] / total for e in chosen}


def plain_mixture(model: Model, w: dict[str, Tensor], x: Tensor) -> Tensor:
    """One token after another through one expert after another, in fp64."""

    def mlp(up: Tensor, down: Tensor, token: Tensor) -> Tensor:
        if model.mlp == "gelu":
            return functional.gelu(token @ up[0].T) @ down.T
        gated = functional.silu if model.mlp == "swiglu" else functional.gelu
        return (gated(token @ up[0].T) * (token @ up[1].T)) @ down.T

    rows = []
    for token in x.reshape(-1, x.shape[-1]):
        weights = plain_weights(model, w["router.weight"] @ token, w.get("router.bias"))
        row = sum((weight * mlp(w["experts.up"][e], w["experts.down"][e], token) for e, weight in weights.items()), 0.0)
        if model.shared_experts:
            row = row + mlp(w["shared.gate_up.weight"], w["shared.down.weight"], token)
        rows.append(row)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize(
    "change",
    [*ROUTERS.values(),
     {"mlp": "gelu", "activation": "gelu", "shared_experts": 0, "top_k": 3}, {"mlp": "geglu", "activation": "gelu"}],
    ids=[*ROUTERS, "gelu", "geglu"],
)  # fmt: skip
def test_results_and_gradients_are_those_of_the_equations(change: dict[str, object]) -> None:
    model = MIXTURE.model_copy(update=change)
    mixture, flat = mixture_of(model)
    generator = torch.Generator().manual_seed(7)
    x, dy = (torch.randn(2, 16, model.hidden, generator=generator) for _ in range(2))
    reference = {name: place.weight.detach().double().requires_grad_() for name, place in flat.places.items()}
    expected_x = x.double().requires_grad_()
    expected = plain_mixture(model, reference, expected_x)
    expected.backward(dy.double())  # type: ignore[no-untyped-call]
    x = x.requires_grad_()
    y = mixture(x)
    y.backward(dy)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert x.grad is not None and expected_x.grad is not None
    torch.testing.assert_close(x.grad.double(), expected_x.grad, rtol=1e-4, atol=1e-5)
    for name, place in flat.places.items():
        want = reference[name].grad
        if name == "router.bias":
            assert want is None and not place.weight.main_grad.any()
            continue
        assert want is not None
        torch.testing.assert_close(place.weight.main_grad.double(), want, rtol=1e-4, atol=1e-5, msg=name)


def test_losses_of_the_load_are_those_of_the_equations() -> None:
    model = MIXTURE.model_copy(update={"top_k": 3})
    mixture, flat = mixture_of(model)
    balance = mixture.router.balance = Balance(model, 0.5, 0.25, (), torch.device("cpu"))
    balance.begin(token_scale=1 / 32)
    x = torch.randn(2, 16, model.hidden, generator=torch.Generator().manual_seed(7))
    weights = mixture.router(x).weights
    (0.0 * weights).sum().backward()
    router = flat.places["router.weight"].weight
    matrix = router.detach().double().requires_grad_()
    logits = x.double() @ matrix.T
    scores = logits.softmax(-1)
    chosen = scores.topk(3).indices
    uneven = torch.zeros((), dtype=torch.float64)
    for one, of_sequence in zip(scores, chosen, strict=True):
        for expert in range(8):
            uneven = uneven + 8 / (3 * 16) * (of_sequence == expert).sum() * one[:, expert].mean()
    z = logits.logsumexp(-1).square()
    (0.5 * uneven / 2 + 0.25 * z.mean()).backward()
    assert matrix.grad is not None
    torch.testing.assert_close(router.main_grad.double(), matrix.grad, rtol=1e-4, atol=1e-7)
    assert balance.losses.tolist() == pytest.approx([uneven.item(), z.sum().item()], rel=1e-5)
    assert balance.loads[0].tolist() == [(chosen == expert).sum().item() for expert in range(8)]


WIDE = MIXTURE.model_copy(update={"hidden": 192, "moe_ffn_hidden": 96, "ffn_hidden": 384, "head_dim": 8})
LATENT = LatentAttention(query_rank=96, kv_rank=64, plain_dim=8, rotary_dim=4, value_dim=6)
WIDE_LATENT = WIDE.model_copy(update={"kv_heads": 24, "head_dim": 12, "latent_attention": LATENT})


@pytest.mark.parametrize(
    ("model", "recompute"),
    [(WIDE, "none"), (WIDE_LATENT, "none"), (WIDE_LATENT, "selective")],
    ids=["attention", "latent attention", "latent attention made again"],
)
@pytest.mark.parametrize("kind", ["experts", "dense"])
def test_a_layer_keeps_what_the_cost_model_counts(
    make_job: Callable[..., TrainJob], kind: str, model: Model, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # whole blocks of rows, which some processors' products want, add 3% to 512 rows of an expert and 27% to these 16
    monkeypatch.setattr(experts, "generates_code", lambda _: False)
    job = make_job(f"mbs4,recompute-{recompute}", model=model)
    trainer = make_trainer(job)
    layer = trainer.stage.layers["1" if kind == "experts" else "0"]
    x = torch.randn(4, 16, model.hidden, requires_grad=True)
    of_weights = {place.weight.untyped_storage().data_ptr() for place in trainer.flat.places.values()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(x)
    stack, device = (
        load_stack("trimaran"),
        Device(kind="cpu", peak_tflops={"fp32": 0.1}, mem_gib=4.0, mem_bandwidth_gb_s=20.0),
    )
    link = Link(bandwidth_gbps=10, latency_us=100)
    cluster = Cluster(name="c", device=device, nodes=1, devices_per_node=8, intra=link, inter=link)
    case = Case.of(job.workload, cluster, stack)
    grid = LayoutGrid.from_layouts([job.layout], job.workload, stack)
    predicted = kept_bytes(case, grid, kind).layer.item()  # type: ignore[arg-type]
    assert sum(kept.values()) == pytest.approx(predicted, rel=0.05)


def loads_of(trainer: Trainer, steps: int) -> list[ExpertLoad]:
    """The load of the experts in each of so many steps."""
    return [result.load for result in (trainer.step() for _ in range(steps)) if result.load is not None]


@pytest.mark.proof
def test_biases_without_loss_move_against_the_load(make_job: Callable[..., TrainJob]) -> None:
    model = MIXTURE.model_copy(update={"router": RouterNoun(scores="sigmoid", bias=True)})
    # weights stay as they are, so that the biases alone change the load
    rates = {"learning_rate": 1e-9, "min_learning_rate": 0.0}
    still, moved = (
        make_trainer(make_job("mbs24", model=model, router_bias_rate=rate, **rates)) for rate in (0.0, 0.002)
    )
    alone, evened = (mean(load.busiest for load in loads_of(trainer, 30)[15:]) for trainer in (still, moved))
    assert evened < 0.9 * alone
    bias = moved.flat.places["layers.1.mlp.router.bias"].weight
    steps = bias.detach() / 0.002
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)
    assert 2 <= steps.round().abs().max() <= 30
    assert not still.flat.places["layers.1.mlp.router.bias"].weight.any()


@pytest.mark.proof
def test_a_loss_that_evens_out_the_load_does(make_job: Callable[..., TrainJob]) -> None:
    alone, evened = (
        loads_of(make_trainer(make_job("mbs24", model=MIXTURE, balance_loss=weight)), 30) for weight in (0.0, 0.1)
    )
    assert mean(load.busiest for load in evened[15:]) < 0.8 * mean(load.busiest for load in alone[15:])
    assert alone[-1].balance_loss is None and evened[-1].balance_loss == pytest.approx(1.0, abs=0.1)
    # every token is sent to as many experts, none is dropped
    assert all(sum(layer) == pytest.approx(8) for load in (*alone, *evened) for layer in load.of_layers)


@pytest.mark.proof
def test_the_load_of_each_expert_is_in_the_log_and_in_tensorboard(
    make_job: Callable[..., TrainJob],
) -> None:
    job = make_job("dp2,ep2,mbs6", model=MIXTURE, steps=2, balance_loss=0.01).model_copy(update={"track": True})
    assert [(run.returncode, run.stderr) for run in run_ranks(job, 2)] == [(0, "")] * 2
    out = Path(job.out_dir)
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    loads = records[-1]["expert_load"]
    assert [len(layer) for layer in loads] == [8] * 3
    assert records[-1]["busiest_expert"] == pytest.approx(max(map(max, loads)), abs=1e-4)
    assert records[-1]["balance_loss"] == pytest.approx(1.0, abs=0.2)
    assert "busiest expert's load over the mean:" in (out / "log.txt").read_text()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    assert events.Scalars("expert_load/2/7")[-1].value == pytest.approx(loads[2][7], rel=1e-5)


def test_a_dense_models_log_says_nothing_of_experts(make_job: Callable[..., TrainJob]) -> None:
    assert make_trainer(make_job("mbs24", model=LLAMA)).step().load is None
