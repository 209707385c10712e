"""Rows are answered as they ran: by the devices and the software that their own words speak of."""

from __future__ import annotations

import pytest

from table_text import table_text
from trimaran.cost.fit.fit_rows import fit_rows
from trimaran.cost.table.predict_table import PredictedRow, predict_table
from trimaran.files.catalogue import load_device, load_stack
from trimaran.files.row_nouns import Nouns, nouns_of
from trimaran.files.row_table import parse_table
from trimaran.nouns.measurement import Measurement

H100, HBM2E = load_device("h100-sxm"), load_device("h100-sxm-hbm2e")


def row(**cells: object) -> Measurement:
    """Llama-3.1-8B on 8 GPUs under FSDP, with some cells changed."""
    stated = {
        "cluster": "dgx-h100", "stack": "torchtitan", "model": "llama3.1-8b", "layers": 32, "hidden": 4096, "heads": 32,
        "vocab": 128256, "seq_len": 8192, "dp": 8, "tp": 1, "pp": 1, "mbs": 2, "gbs": 16, "zero_stage": 3,
        "dp_kind": "fully_sharded", "recompute": "selective", "precision": "bf16", "status": "ok", "quality": "ok",
    }  # fmt: skip
    return Measurement.model_validate(stated | cells)


def nouns(**cells: object) -> Nouns:
    return nouns_of(row(**cells))


def answer(**cells: object) -> PredictedRow:
    (answered,) = predict_table(parse_table(table_text([row(**cells)]), "edited"))
    return answered


def test_the_words_of_a_rows_hardware_name_its_devices() -> None:
    assert nouns().cluster.device == nouns(hardware="H100-80GB HBM3 x8 NVLink").cluster.device == H100
    said = nouns(hardware="H100-96GB HBM2e 500W x8 NVLink")
    assert said.cluster.device == HBM2E and said.cluster.name == "dgx-h100"
    # memory of that kind is what every A100 of 80 GB has
    plain = nouns(cluster="dgx-a100-80gb", hardware="A100-80GB HBM2e").cluster.device
    assert plain == load_device("a100-sxm-80gb")


@pytest.mark.parametrize(
    ("cells", "stack"),
    [
        ({}, "torchtitan"),
        ({"notes": "FSDP + torch.compile"}, "torchtitan-compiled"),
        ({"system": "torchtitan, compiled"}, "torchtitan-compiled"),
        ({"notes": "torch.compile", "date": "2025-03"}, "torchtitan-compiled"),
        ({"notes": "torch.compile", "date": "2025-06"}, "torchtitan-0.1-compiled"),
        ({"precision": "fp8", "notes": "compile + Float8", "date": "2025-06-17"}, "torchtitan-0.1-compiled"),
        ({"notes": "async TP, torch.compile", "date": "2025-06"}, "torchtitan-0.2-async-tp"),
        ({"notes": "FSDP without torch.compile"}, "torchtitan"),
        ({"precision": "fp8"}, "torchtitan-compiled"),
        ({"precision": "fp8", "notes": "Float8 + Async TP"}, "torchtitan-async-tp"),
        ({"notes": "async TP, torch.compile"}, "torchtitan-async-tp"),
        ({"stack": "torchtitan-0.2", "notes": "AsyncTP+compile"}, "torchtitan-0.2-async-tp"),
        ({"stack": "torchtitan-0.2-compiled", "precision": "fp8"}, "torchtitan-0.2-compiled"),
        ({"stack": "torch-fsdp", "notes": "torch.compile"}, "torch-fsdp"),
    ],
)
def test_the_words_of_a_rows_notes_name_its_software(cells: dict[str, object], stack: str) -> None:
    assert nouns(**cells).stack == load_stack(stack)


@pytest.mark.parametrize(
    ("cell", "schedule"),
    [
        ("1F1B", "1f1b"), ("1F1B-interleaved", "interleaved"), ("Interleaved1F1B", "interleaved"), ("GPipe", "gpipe"),
        ("zero-bubble", "zero_bubble"), ("ZBVZeroBubble", "zbv"), ("DualPipeV", "dualpipev"),
    ],
)  # fmt: skip
def test_a_schedule_may_be_called_as_others_call_it(cell: str, schedule: str) -> None:
    text = table_text([row(pp=2, dp=4, vpp=2)]).replace(",none,", f",{cell},", 1)
    (read,) = parse_table(text, "edited").measurements
    assert read.schedule == schedule


def test_slower_memory_costs_and_compiling_saves_and_the_answer_says_what_was_read() -> None:
    plain, slow, both = answer(), answer(hardware="HBM2e"), answer(hardware="HBM2e", notes="torch.compile")
    assert plain.estimate and slow.estimate and both.estimate
    assert max(plain.estimate.sec_per_it, both.estimate.sec_per_it) < slow.estimate.sec_per_it
    assert plain.cells()["predicted_note"] == ""
    assert both.cells()["predicted_note"] == (
        "notes says compile: read as torchtitan-compiled; hardware says HBM2e: devices read as h100-sxm-hbm2e"
    )


def test_rows_of_one_cluster_and_stack_are_fitted_together_however_each_ran() -> None:
    rows = [
        row(hardware="H100-96GB HBM2e", sec_per_it=2.84, mem_gib=82.4),
        row(hardware="H100-96GB HBM2e", sec_per_it=2.46, mem_gib=77.0, notes="torch.compile"),
        row(hardware="H100-96GB HBM2e", sec_per_it=1.92, mem_gib=76.8, notes="torch.compile", precision="fp8"),
    ]
    fitted = fit_rows(rows)
    assert fitted.rows == 3 and not fitted.skipped
    assert (fitted.calibration.cluster, fitted.calibration.stack) == ("dgx-h100", "torchtitan")
