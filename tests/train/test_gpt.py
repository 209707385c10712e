"""The parallel GPT is the ordinary GPT: same loss, same gradients as a few plain lines of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shapes import BLOOM, GEMMA, LATENT, LLAMA, NEOX, OLMO, QWEN, SMALL
from trimaran.nouns.model import Model
from trimaran.protocol.job import TrainJob
from trimaran.train.comm.group import GroupFactory
from trimaran.train.comm.mesh import build_mesh
from trimaran.train.engine.trainer import Trainer
from trimaran.train.model.positions import documents_of
from trimaran.train.run.first_weights import first_weights
from trimaran.train.text.sampler import Sampler
from trimaran.train.text.tokens import Tokens

CPU = torch.device("cpu")
FAMILIES = {
    "gpt": SMALL, "bloom": BLOOM, "llama": LLAMA, "qwen": QWEN, "olmo": OLMO, "gemma": GEMMA, "neox": NEOX,
    "latent": LATENT,
}  # fmt: skip


def make_trainer(job: TrainJob) -> Trainer:
    mesh = build_mesh(job.layout, 0, range(1), GroupFactory(CPU))
    assert mesh is not None
    sampler = Sampler(Tokens(Path(job.data_dir)), job.workload.seq_len, job.train.seed)
    return Trainer(job, mesh, sampler, CPU, first_weights(job, lambda: None))


def plain_loss(w: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    """A GPT without any of ours: weights by name, in fp64."""

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

    b, s = tokens.shape
    x = w["embedding.tokens"][tokens] + w["embedding.positions"][:s]
    mask = torch.full((s, s), -torch.inf, dtype=x.dtype).triu(1)
    for i in range(SMALL.layers):
        y = norm(x, f"layers.{i}.attention_norm")
        qkv = torch.einsum("bsh,gpdh->bpgsd", y, w[f"layers.{i}.attention.qkv.weight"])
        q, k, v = (qkv + w[f"layers.{i}.attention.qkv.bias"].transpose(0, 1)[:, :, None]).unbind(1)
        scores = q @ k.transpose(-1, -2) / SMALL.head_dim**0.5 + mask
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1)
        x = x + y @ w[f"layers.{i}.attention.projection.weight"].T + w[f"layers.{i}.attention.projection.bias"]
        y = norm(x, f"layers.{i}.mlp_norm") @ w[f"layers.{i}.mlp.up.weight"].T + w[f"layers.{i}.mlp.up.bias"]
        x = (
            x
            + functional.gelu(y, approximate="tanh") @ w[f"layers.{i}.mlp.down.weight"].T
            + w[f"layers.{i}.mlp.down.bias"]
        )
    logits = (norm(x, "norm") @ w["embedding.tokens"].T)[:, :, : SMALL.vocab]
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    "layout",
    ["mbs24", "mbs4", "mbs8,recompute-full", "mbs8,recompute-selective", "mbs8,recompute-core_attn+layernorm",
     "mbs8,recompute-layernorm+mlp"],
)  # fmt: skip
def test_loss_and_gradients_are_those_of_plain_pytorch(make_job: Callable[..., TrainJob], layout: str) -> None:
    job = make_job(layout)
    trainer = make_trainer(job)
    text = torch.from_numpy(trainer._sampler.batch(0, 24))
    reference = {n: p.weight.detach().double().requires_grad_() for n, p in trainer.flat.places.items()}
    expected = plain_loss(reference, text[:, :-1], text[:, 1:])
    expected.backward()  # type: ignore[no-untyped-call]
    loss = trainer.forward_backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, place in trainer.flat.places.items():
        want = reference[name].grad
        assert want is not None
        torch.testing.assert_close(place.weight.main_grad.double(), want, rtol=1e-4, atol=1e-7, msg=name)


def test_padding_of_the_vocabulary_stays_zero(make_job: Callable[..., TrainJob]) -> None:
    trainer = make_trainer(make_job("mbs24"))
    for _ in range(3):
        trainer.step()
    embedding = trainer.flat.places["embedding.tokens"].weight
    assert embedding.shape[0] == 384
    assert not embedding[SMALL.vocab :].any()
    assert embedding[: SMALL.vocab].any(dim=1).all()


def test_clipping_makes_a_step_as_if_the_gradients_were_smaller(make_job: Callable[..., TrainJob]) -> None:
    clipped, scaled = (make_trainer(make_job("mbs24", clip_grad=limit, epsilon=0.1)) for limit in (0.5, 0.0))
    for trainer in (clipped, scaled):
        trainer.forward_backward()
    norm = clipped.flat.squared_norm().sqrt().item()
    assert norm > 0.5
    (grads,), (scaled_weights,), (clipped_weights,) = scaled.flat.grads, scaled.flat.master, clipped.flat.master
    grads.mul_(0.5 / norm)
    clipped.optimizer.step(1e-2, norm)
    scaled.optimizer.step(1e-2, 0.5)
    torch.testing.assert_close(clipped_weights, scaled_weights, rtol=1e-5, atol=1e-8)


def test_a_loss_that_is_not_finite_skips_the_update(make_job: Callable[..., TrainJob]) -> None:
    trainer = make_trainer(make_job("mbs24"))
    (weights,), (grads,) = trainer.flat.master, trainer.flat.grads
    before = weights.clone()
    grads[0] = torch.nan
    result = trainer.step()
    assert result.skipped
    assert torch.equal(weights, before)
    assert not trainer.step().skipped


def test_a_zero_bubble_backward_leaves_weight_gradients_for_later(make_job: Callable[..., TrainJob]) -> None:
    trainer = make_trainer(make_job("mbs24"))
    deferred: list[Callable[[], None]] = []
    for weight in trainer.stage.weights():
        weight.deferred = deferred
    trainer.forward_backward()
    matrices = [p.weight for name, p in trainer.flat.places.items() if "layers" in name and len(p.spec.shape) > 1]
    assert len(deferred) == 4 * SMALL.layers
    assert not any(matrix.main_grad.any() for matrix in matrices)
    with torch.no_grad():
        for add in deferred:
            add()
    assert all(matrix.main_grad.any() for matrix in matrices)


@pytest.mark.parametrize("model", FAMILIES.values(), ids=FAMILIES)
@torch.no_grad()
def test_a_document_is_read_as_if_it_stood_alone(make_job: Callable[..., TrainJob], model: Model) -> None:
    stage = make_trainer(make_job("mbs24", model=model)).stage
    generator = torch.Generator().manual_seed(5)
    documents = [torch.randint(256, (1, length), generator=generator) for length in (5, 1, 10)]
    ended = [functional.pad(document, (0, 1), value=256) for document in documents]
    row = torch.cat(ended, dim=1)[:, :16]
    together = stage(row, 0, documents_of(row, 256))
    mixed = stage(row, 0)
    begin = 0
    for document in ended:
        alone = stage(document, 0)[:, : 16 - begin]
        end = begin + alone.shape[1]
        torch.testing.assert_close(together[:, begin:end], alone, rtol=1e-4, atol=1e-5)
        if begin:
            assert (mixed[:, begin:end] - alone).abs().max() > 1e-2
        begin = end
    assert begin == 16


@pytest.mark.parametrize("model", FAMILIES.values(), ids=FAMILIES)
def test_a_model_has_as_many_parameters_as_the_planner_counts(make_job: Callable[..., TrainJob], model: Model) -> None:
    assert make_trainer(make_job("mbs24", model=model)).flat.parameters == model.parameters
