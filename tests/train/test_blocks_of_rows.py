"""In bf16 on a CPU experts compute in whole blocks of rows, which changes no result and lets shapes come again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shapes import MIXTURE
from test_mixture import one_rank
from trimaran.layout.layout import Layout
from trimaran.nouns.precision import PrecisionName
from trimaran.train.comm.mesh import Mesh
from trimaran.train.engine.flat_weights import FlatWeights
from trimaran.train.model import product
from trimaran.train.model.mixture import blocks, experts
from trimaran.train.model.mixture.experts import Experts, grouped, grouped_weight_gradient, spans
from trimaran.train.model.weight import drawn

CPU = torch.device("cpu")


@pytest.fixture
def in_bf16() -> Iterator[None]:
    """A processor that has products in bf16, whatever this one has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product, "LACKS_BF16", False)
        yield


COUNTS = st.lists(st.integers(0, 100), min_size=1, max_size=6)


@given(COUNTS)
def test_filling_and_taking_are_inverse_and_each_is_the_others_gradient(counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(sum(counts), 3, generator=generator, requires_grad=True)
    filled = blocks.fill(rows, counts)
    assert len(filled) == sum(blocks.in_blocks(counts)) and len(filled) % blocks.ROWS == 0
    assert torch.equal(blocks.take(filled, counts), rows)
    assert filled.any(1).sum() == sum(counts)  # all else is zero
    dy = torch.randn(filled.shape, generator=generator)
    filled.backward(dy)  # type: ignore[no-untyped-call]
    assert rows.grad is not None and torch.equal(rows.grad, blocks.take(dy, counts))
    whole = torch.randn(filled.shape, generator=generator, requires_grad=True)
    blocks.take(whole, counts).backward(rows.detach())
    assert whole.grad is not None and torch.equal(whole.grad, filled)


def results(mesh: Mesh, counts: list[int]) -> list[Tensor]:
    """What experts give in bf16, and the gradients of rows, their weights and the matrices."""
    module = Experts(MIXTURE, mesh, recompute_activation=False)
    flat = FlatWeights(module, Layout(precision="bf16_pure"), mesh, drawn(3), CPU)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(sum(counts), MIXTURE.hidden, generator=generator).bfloat16().requires_grad_()
    weights = torch.rand(sum(counts), generator=generator).requires_grad_()
    y = module(x, weights, counts)
    y.backward(torch.randn(y.shape, generator=generator).bfloat16())
    assert x.grad is not None and weights.grad is not None
    return [y.detach(), x.grad, weights.grad, *(place.weight.main_grad for place in flat.places.values())]


@pytest.mark.usefixtures("in_bf16")
def test_blocks_change_no_result_and_products_have_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = set[int]()

    def seen(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        lengths.add(len(x))
        return torch.matmul(x, y, out=out)

    generator = torch.Generator().manual_seed(4)
    for _ in range(8):
        counts = [0, 32, *torch.randint(1, 90, (MIXTURE.experts - 2,), generator=generator).tolist()]
        monkeypatch.setattr(experts, "product", seen)
        in_blocks = results(one_rank(), counts)
        assert lengths <= {32, 64, 96}
        monkeypatch.undo()
        monkeypatch.setattr(experts, "generates_code", lambda _: False)
        for one, other in zip(in_blocks, results(one_rank(), counts), strict=True):
            torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-7 * float(other.abs().max()))
        monkeypatch.undo()
    assert lengths == {32, 64, 96}


@given(st.lists(st.integers(0, 1500), min_size=1, max_size=6), st.sampled_from([None, 1, 512]))
def test_spans_cover_every_expert_s_rows_once_in_pieces(counts: list[int], most: int | None) -> None:
    found = spans(counts, most)
    rows = [(expert, row) for expert, span in found for row in range(span.start, span.stop)]
    assert [expert for expert, _ in rows] == [expert for expert, count in enumerate(counts) for _ in range(count)]
    assert [row for _, row in rows] == list(range(sum(counts)))
    if most is None:
        assert len(found) == sum(count > 0 for count in counts)
    else:
        assert all(0 < span.stop - span.start <= most for _, span in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_pieces_are_those_of_whole_experts(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    counts = [1024, 32, 544]
    x, dy = (torch.randn(sum(counts), size, generator=generator).to(dtype) for size in (24, 40))
    matrices = torch.randn(len(counts), 40, 24, generator=generator).to(dtype)
    made = []
    for most in (None, blocks.MOST_ROWS):
        monkeypatch.setattr(experts, "pieces_of", lambda _, most=most: most)
        gradients = torch.ones(matrices.shape)
        grouped_weight_gradient(gradients, dy, x, counts)
        made.append((grouped(x, matrices, counts).float(), gradients))
    for whole, piece in zip(*made, strict=True):
        torch.testing.assert_close(piece, whole, rtol=2**-7, atol=2**-7 * float(whole.abs().max()))


@pytest.mark.usefixtures("in_bf16")
@pytest.mark.parametrize(("precision", "of_gradients"), [("bf16_pure", "bfloat16"), ("bf16", "float32")])
def test_code_is_made_once_for_all_rows_that_training_multiplies(
    monkeypatch: pytest.MonkeyPatch, precision: PrecisionName, of_gradients: str
) -> None:
    made = list[tuple[str, torch.dtype, int]]()

    def multiplied(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        made.append(("product", x.dtype, len(x)))
        return torch.matmul(x, y, out=out)

    def added(total: Tensor, dy: Tensor, x: Tensor) -> None:
        made.append(("add", total.dtype, len(x)))

    monkeypatch.setattr(blocks, "product", multiplied)
    monkeypatch.setattr(blocks, "add_product", added)
    module = Experts(MIXTURE, one_rank(), recompute_activation=False)
    FlatWeights(module, Layout(precision=precision), one_rank(), drawn(3), CPU)
    blocks.make_code.cache_clear()
    module.make_code()
    every = set(range(blocks.ROWS, blocks.MOST_ROWS + 1, blocks.ROWS))
    assert {rows for kind, dtype, rows in made if (kind, dtype) == ("product", torch.bfloat16)} == every
    assert {rows for kind, dtype, rows in made if (kind, dtype) == ("add", getattr(torch, of_gradients))} == every
    assert len(made) == 2 * 3 * len(every)  # two matrices, in three directions
    module.make_code()
    assert len(made) == 2 * 3 * len(every)
    blocks.make_code.cache_clear()
