"""Sizes of models in tables of runs are those of the models that the rows speak of."""

from __future__ import annotations

import pytest

from trimaran.files.catalogue import load_model
from trimaran.files.row_nouns import model_cell
from trimaran.nouns.measurement import Measurement
from trimaran.report.measured_rows import size_label


def row(name: str, **more: object) -> Measurement:
    model = load_model(name)
    sizes = {"layers": model.layers, "hidden": model.hidden, "heads": model.heads, "vocab": model.vocab}
    return Measurement.model_validate({**sizes, "seq_len": 1024, "mbs": 1, "gbs": 8, **more})


@pytest.mark.parametrize(
    ("name", "size"),
    [("mixtral-8x7b", "47B"), ("llama3.1-8b", "8.0B"), ("deepseek-v3", "671B"), ("gpt2-124m", "124M")],
)
def test_a_row_that_names_its_model_has_the_models_own_count(name: str, size: str) -> None:
    assert size_label(row(name, model=name)) == size
    assert size_label(row(name, model=model_cell(load_model(name)))) == size


def test_columns_of_experts_and_gated_mlps_count() -> None:
    mixtral = {"ffn_hidden": 14336, "kv_heads": 8, "experts": 8, "top_k": 2, "moe_ffn_hidden": 14336}
    assert size_label(row("mixtral-8x7b", **mixtral)) == "47B"
    assert size_label(row("llama3.1-8b", ffn_hidden=14336, kv_heads=8, mlp="swiglu")) == "8.0B"


def test_a_row_that_says_no_more_is_counted_as_documents_count() -> None:
    assert size_label(row("bloom-176b")) == "176B"
    # of columns that contradict each other too
    assert size_label(row("mixtral-8x7b", experts=8, top_k=9, moe_ffn_hidden=1)) == "6.6B"


@pytest.mark.parametrize(("hidden", "size"), [(8, "2.3K"), (32, "28K"), (64, "0.1M"), (256, "1.6M")])
def test_small_models_have_a_size_too(hidden: int, size: str) -> None:
    """Those of tests and of first tries were all of 0.0M."""
    tiny = {"layers": 2, "hidden": hidden, "heads": 2, "vocab": 96}
    assert size_label(row("gpt2-124m", **tiny)) == size
