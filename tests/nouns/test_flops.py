"""The calculators reproduce the printed TFLOPs of every checkable row of the five documents."""

from __future__ import annotations

import pytest

from trimaran.files.catalogue import load_model
from trimaran.files.row_table import packaged_table
from trimaran.layout.flops import aggregate_pflops, days_to_train, iteration_flops, mfu, model_flops, tflops_per_device
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.model import Model
from trimaran.nouns.workload import Workload

CHECKABLE = [m for m in packaged_table().measurements if m.flops_formula and m.sec_per_it and m.tflops]


def test_all_145_checkable_rows_are_there() -> None:
    assert len(CHECKABLE) == 145


@pytest.mark.parametrize("row", CHECKABLE, ids=lambda m: f"{(m.source or '')[:3]}-{m.table}-{m.row}")
def test_printed_tflops_are_reproduced_within_0_7_percent(row: Measurement) -> None:
    model = Model(layers=row.layers, hidden=row.hidden, heads=row.heads, vocab=row.vocab, max_positions=row.seq_len)
    workload = Workload(model=model, seq_len=row.seq_len, global_batch=row.gbs)
    assert row.sec_per_it and row.devices
    computed = tflops_per_device(workload, row.tp, row.devices, row.sec_per_it, row.flops_formula)  # type: ignore[arg-type]
    assert computed == pytest.approx(row.tflops, rel=7e-3)


def test_362k_iterations_at_half_a_second_are_2_09_days() -> None:
    assert days_to_train(0.5, 362_000) == pytest.approx(2.09, abs=0.01)


def test_aggregate_petaflops() -> None:
    assert aggregate_pflops(145.92, 384) == pytest.approx(56.03, abs=0.01)


def test_model_flops_are_six_operations_a_parameter_and_token_plus_attention() -> None:
    model = load_model("gpt3-175b")
    per_token = model_flops(model, 2048, 1) / 2048
    assert per_token == pytest.approx(6 * model.parameters + 12 * model.layers * model.hidden * 2048, rel=0.01)


def test_mfu_is_the_share_of_the_peak() -> None:
    workload = Workload(model=load_model("gpt2-124m"), seq_len=1024, global_batch=512)
    seconds = iteration_flops(workload, 1, "model_flops") / (8 * 100e12)
    assert mfu(workload, 1, 8, seconds, 200.0) == pytest.approx(0.5)
