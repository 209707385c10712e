"""Products on a CPU: which library makes them, and that all give the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trimaran.protocol.host import first_processor
from trimaran.train.model import product as room
from trimaran.train.model.product import add_product, amd_family, linear, product

INTEL = "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\n"
AMD = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: {}\nmodel\t\t: 2\n"


@pytest.mark.parametrize(("text", "family"), [(INTEL, 0), (AMD.format(25), 25), (AMD.format(26), 26), ("", 0)])
def test_a_processors_family_is_read_where_it_is_amds(tmp_path: Path, text: str, family: int) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert amd_family(first_processor(tmp_path / "cpuinfo")) == family
    assert amd_family(first_processor(tmp_path / "nowhere")) == 0


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
@pytest.mark.parametrize("tokens", [1, 511, 512, 1300])
def test_products_by_onednn_are_those_by_pytorch(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x, dy, matrix, total = (
        torch.randn(size, generator=generator) for size in ((tokens, 24), (tokens, 40), (40, 24), (40, 24))
    )
    bias = torch.randn(40, generator=generator)
    results = []
    for by_onednn in (False, True):
        monkeypatch.setattr(room, "PREFERS_ONEDNN", by_onednn)
        monkeypatch.setattr(room, "WIDE_CORES", by_onednn)
        gradient = total.clone()
        add_product(gradient, dy, x)
        given = torch.empty(tokens, 24)
        product(dy, matrix, out=given)
        results.append((linear(x, matrix, bias), product(dy, matrix), given, gradient))
    for plain, quick in zip(*results, strict=True):
        torch.testing.assert_close(quick, plain, rtol=1e-5, atol=1e-4)
    wide = total.double() + dy.double().t() @ x.double()
    torch.testing.assert_close(results[1][3].double(), wide, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [True, False])
def test_what_a_processor_has_no_products_in_goes_through_fp32(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, wide: bool
) -> None:
    """Factors are exact in fp32, so that a result is rounded once, and a sum in fp32 not at all."""
    monkeypatch.setattr(room, "LACKS_BF16", True)
    x, dy, matrix = (torch.randn(size).to(dtype) for size in ((70, 24), (70, 40), (40, 24)))
    bias = torch.randn(40).to(dtype)
    total = torch.randn(40, 24).to(torch.float32 if wide else dtype)
    gradient = total.clone()
    add_product(gradient, dy, x)
    given = torch.empty(70, 24, dtype=dtype)
    product(dy, matrix, out=given)
    exact = (
        x.double() @ matrix.double().t() + bias.double(), dy.double() @ matrix.double(), dy.double() @ matrix.double(),
        total.double() + dy.double().t() @ x.double(),
    )  # fmt: skip
    found = (linear(x, matrix, bias), product(dy, matrix), given, gradient)
    rounding = torch.finfo(dtype).eps
    for ours, true in zip(found, exact, strict=True):
        tolerance = 1e-5 if ours.dtype == torch.float32 else rounding
        torch.testing.assert_close(ours.double(), true, rtol=tolerance, atol=tolerance)
    assert gradient.dtype == total.dtype and not room.generates_code(x)


@pytest.mark.parametrize("tokens", [1, 511, 512])
def test_a_bias_in_bf16_is_added_before_the_only_rounding(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x, matrix, bias = (torch.randn(size, generator=generator).bfloat16() for size in ((2, tokens, 24), (40, 24), (40,)))
    found, exact = linear(x, matrix, bias), x.double() @ matrix.double().t() + bias.double()
    assert found.shape == exact.shape and found._base is None
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(torch.bfloat16).eps / 2, atol=1e-5)
