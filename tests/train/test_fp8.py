"""Precision fp8: products of 8-bit factors are those of the numbers that were cast, and a training in them learns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pool import Pool
from shapes import DEEPSEEK, LLAMA, MIXTURE, SMALL, as_deep_as
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import violations
from trimaran.nouns.model import Model
from trimaran.nouns.workload import Workload
from trimaran.probe.alone import eight_bit_products, eight_bit_tflops, eight_bit_timing
from trimaran.probe.probe_settings import ProbedProduct, probe_settings
from trimaran.protocol.job import TrainJob
from trimaran.train.model.narrow import (
    BACKWARD,
    FORWARD,
    Cast,
    add_narrow_product,
    cast,
    cast_gradient,
    narrow_linear,
    narrow_product,
)
from trimaran.train.run.supported import check_supported

# Half the distance of two neighbours over the lesser of them, of 3 and of 2 bits behind the leading one.
ROUNDING = {FORWARD: 2.0**-4, BACKWARD: 2.0**-3}


def matrices(tokens: int, out: int, into: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a layer reads, its result's gradient, and its weights."""
    numbers = torch.Generator().manual_seed(3)
    shapes = ((tokens, into), (tokens, out), (out, into))
    x, dy, matrix = (torch.randn(shape, generator=numbers).bfloat16() for shape in shapes)
    return x, dy * 1e-6, matrix


def again(narrow: Cast) -> Tensor:
    """What was cast, as far as 8 bit tell."""
    return (narrow.values.float() * narrow.scale)[: narrow.rows, : narrow.columns]


@pytest.mark.parametrize("to", [FORWARD, BACKWARD])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_a_cast_is_as_near_as_its_format_allows_whatever_the_size_of_the_numbers(to: torch.dtype, scale: float) -> None:
    x = (torch.linspace(-1.0, 1.0, 48 * 32).view(48, 32) * scale).bfloat16()
    narrow = cast(x, to)
    far = (again(narrow) - x.float()).abs()
    # 2% of the largest number: what lies far below it has fewer bits
    assert (far <= x.float().abs() * ROUNDING[to] * 1.01 + 2e-2 * ROUNDING[to] * scale).all()
    assert again(narrow).abs().max() == pytest.approx(x.float().abs().max().item(), rel=1e-2)


@pytest.mark.parametrize(("tokens", "out", "into"), [(64, 48, 96), (21, 24, 40), (1, 17, 3)])
def test_products_are_those_of_the_numbers_that_were_cast(tokens: int, out: int, into: int) -> None:
    """Also where a width is no multiple of 16, which kernels ask for."""
    x, dy, matrix = matrices(tokens, out, into)
    bias, main_grad = torch.ones(out).bfloat16(), torch.ones(out, into) * 1e-6
    gradient = cast_gradient(dy)
    y, dx = narrow_linear(x, matrix, bias), narrow_product(gradient, matrix)
    add_narrow_product(main_grad, gradient, x)
    read, given, weights = again(cast(x)), again(gradient), again(cast(matrix))
    for found, expected in (
        (y, read @ weights.t() + 1.0), (dx, given @ weights), (main_grad, given.t() @ read + 1e-6)
    ):  # fmt: skip
        assert (found.float() - expected).norm() <= 2.0**-8 * 2 * expected.norm()
    assert y.dtype == dx.dtype == torch.bfloat16
    assert torch._C._get_mkldnn_enabled()  # other products go by oneDNN still


def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden() -> None:
    x, _, matrix = matrices(32, 16, 16)
    assert (narrow_linear(torch.zeros_like(x), matrix) == 0).all()
    for odd in (torch.nan, torch.inf):
        x[3, 3] = odd
        assert not narrow_linear(x, matrix)[3].isfinite().any()


LAYOUTS = (
    (LLAMA, "pp2,mbs6,zero_bubble"),
    *(pytest.param(model, layout, marks=pytest.mark.proof) for model, layout in (
        (SMALL, "dp2,tp2,mbs6,sp,zero1"), (MIXTURE, "dp2,ep2,mbs6,recompute-moe_act"),
        (SMALL, "dp2,mbs6,fsdp,recompute-full"), (LLAMA, "cp2,tp2,mbs12"), (MIXTURE, "pp2,mbs6,zero_bubble"),
        (DEEPSEEK, "tp2,mbs12,sp,ep2,etp1"), (DEEPSEEK, "dp4,etp2,mbs3,zero2"),
    )),
)  # fmt: skip


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_a_training_in_fp8_follows_that_in_bf16(
    pool: Pool, make_job: Callable[..., TrainJob], model: Model, layout: str
) -> None:
    """By as little as its rounding makes: near, but never the same, since its products are others."""
    model = as_deep_as(parse_layout(layout), model, least=4)
    wide = pool.run(make_job(f"{layout},bf16", model=model)).losses
    narrow = pool.run(make_job(f"{layout},fp8", model=model)).losses
    assert narrow == pytest.approx(wide, rel=4e-3)
    assert narrow != wide
    assert narrow[-1] < narrow[0] - 0.4


@pytest.mark.proof
def test_fp8_made_again_is_what_it_was(pool: Pool, make_job: Callable[..., TrainJob]) -> None:
    runs = [pool.run(make_job(f"mbs12,fp8{kind}", model=LLAMA, steps=4)) for kind in ("", ",recompute-full")]
    assert runs[0].losses == runs[1].losses


def test_only_a_device_with_a_rate_of_8_bit_products_is_offered_fp8(make_job: Callable[..., TrainJob]) -> None:
    stack, workload, layout = load_stack("trimaran"), Workload(model=SMALL, seq_len=16, global_batch=24), "mbs24,fp8"
    cpus, hopper = load_cluster("fugaku-a64fx"), load_cluster("dgx-h100")
    assert not list(violations(parse_layout(layout), workload, hopper, stack))
    (broken,) = violations(parse_layout(layout), workload, cpus, stack)
    assert broken.rule == "precision" and "precision fp8 is not one that" in broken.sentence
    check_supported(make_job(layout))


def test_a_probe_measures_8_bit_products_and_grants_a_cpu_none() -> None:
    products = (ProbedProduct(m=32, n=48, k=64), ProbedProduct(m=32, n=48, k=64, orientation="input_gradient"))
    cpu = torch.device("cpu")
    timing = eight_bit_products(products, 2, cpu)
    timing.spell()
    assert list(timing.seconds()) == [products[0]] and eight_bit_tflops(timing.seconds()) > 0
    settings = probe_settings(
        device="cpu", slots=1, threads_per_rank=1, model=None, seq_len=None, mbs=(1,), quick=True
    )  # fmt: skip
    timing = eight_bit_timing(settings, cpu)
    timing.spell()
    assert eight_bit_tflops(timing.seconds()) == 0
