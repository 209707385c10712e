"""The products of a mixture's experts: PyTorch's grouped product beside a product for each expert, on one thread.

    python benchmarks/grouped_products.py

Milliseconds of processor time (the best of several calls, in turns) of the two matrices of 8 experts, inner width 768
of a hidden size of 384, gated, for 4,096 rows: 2,048 tokens with two experts each, evenly and as uneven as 4 to 1.
Forward, gradient of the input and gradient of the weights. Writes benchmarks/results/grouped_products.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from operators import milliseconds
from trimaran.train.model.mixture.experts import grouped, grouped_weight_gradient, spans
from trimaran.train.model.product import add_product, linear, product

RESULTS = Path(__file__).parent / "results" / "grouped_products.md"
HIDDEN, WIDTH, ROWS = 384, 768, 4096
MATRICES = ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
COUNTS = {"even": [512] * 8, "uneven": [820, 820, 820, 820, 204, 204, 204, 204]}
# (x, weight, counts) -> y, the same of transposed weights, and (main_grad, dy, x, counts)
Ways = tuple[
    Callable[[Tensor, Tensor, Sequence[int]], Tensor],
    Callable[[Tensor, Tensor, Sequence[int]], Tensor],
    Callable[[Tensor, Tensor, Tensor, Sequence[int]], None],
]


def offsets(counts: Sequence[int]) -> Tensor:
    """Where the rows of each expert end, as PyTorch's grouped product wants it."""
    return torch.tensor(list(accumulate(counts)), dtype=torch.int32)


def native(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """PyTorch's grouped product, forward."""
    return torch._grouped_mm(x, weight.transpose(1, 2), offs=offsets(counts))


def native_transposed(dy: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """... for the gradient of the input."""
    return torch._grouped_mm(dy, weight, offs=offsets(counts))


def native_weights(grad: Tensor, dy: Tensor, x: Tensor, counts: Sequence[int]) -> None:
    """... for the gradient of the weights, which is then added up."""
    grad.add_(torch._grouped_mm(dy.t(), x, offs=offsets(counts)))


def joined(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """A product for each expert, and their results put together."""
    return torch.cat([linear(x[rows], weight[expert]) for expert, rows in spans(counts)])


def joined_transposed(dy: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """... for the gradient of the input."""
    return torch.cat([product(dy[rows], weight[expert]) for expert, rows in spans(counts)])


def in_place(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """A product for each expert that writes to its part of the result."""
    y = x.new_empty(len(x), weight.shape[1])
    for expert, rows in spans(counts):
        product(x[rows], weight[expert].t(), out=y[rows])
    return y


def in_place_transposed(dy: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """... for the gradient of the input."""
    return in_place(dy, weight.transpose(1, 2), counts)


def weights_one_by_one(grad: Tensor, dy: Tensor, x: Tensor, counts: Sequence[int]) -> None:
    """A product for each expert that adds to the gradient of its weights."""
    for expert, rows in spans(counts):
        add_product(grad[expert], dy[rows], x[rows])


def trainer_transposed(dy: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """The gradient of the input as the trainer makes it."""
    return grouped(dy, weight.transpose(1, 2), counts)


WAYS: dict[str, Ways] = {
    "torch._grouped_mm": (native, native_transposed, native_weights),
    "one by one, put together": (joined, joined_transposed, weights_one_by_one),
    "one by one, in place": (in_place, in_place_transposed, weights_one_by_one),
    "as the trainer does it": (grouped, trainer_transposed, grouped_weight_gradient),
}


def total(dtype: torch.dtype, counts: Sequence[int], ways: Ways) -> float:
    """Milliseconds of all products of both matrices."""
    forward, transposed, weights = ways
    taken = 0.0
    for out, width in MATRICES:
        x, dy = torch.randn(ROWS, width, dtype=dtype), torch.randn(ROWS, out, dtype=dtype)
        weight = torch.randn(len(counts), out, width, dtype=dtype)
        grad = torch.zeros_like(weight)
        taken += milliseconds(partial(forward, x, weight, counts))
        taken += milliseconds(partial(transposed, dy, weight, counts))
        taken += milliseconds(partial(weights, grad, dy, x, counts))
    return taken


def main() -> None:
    torch.set_num_threads(1)
    cells = [(dtype, name) for dtype in (torch.float32, torch.bfloat16) for name in COUNTS]
    lines = ["| experts' products, one thread | fp32, even | fp32, uneven | bf16, even | bf16, uneven |"]
    lines.append("| --- | --: | --: | --: | --: |")
    found = {way: [float("inf")] * len(cells) for way in WAYS}
    for _ in range(3):
        for way, ways in WAYS.items():
            for cell, (dtype, name) in enumerate(cells):
                found[way][cell] = min(found[way][cell], total(dtype, COUNTS[name], ways))
    lines += [f"| {way} | {' | '.join(f'{taken:.1f} ms' for taken in times)} |" for way, times in found.items()]
    says = __doc__.strip().split("\n\n", 2)[2]
    text = "\n".join(("# Products of experts", "", says, "", *lines))
    RESULTS.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
