"""The published tables, predicted: what the shipped calibrations and the priors are worth on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from trimaran.cost.calibration import prior
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.score import mape
from trimaran.files.row_nouns import nouns_of
from trimaran.files.row_table import packaged_table
from trimaran.nouns.measurement import Measurement

ROWS = [m for m in packaged_table().measurements if m.quality in ("ok", "corrected")]


def times(
    keep: Callable[[Measurement], bool], *, priors: bool = False, rows: Sequence[Measurement] = ROWS
) -> tuple[list[float], list[float]]:
    predicted, measured = [], []
    for row in rows:
        if row.sec_per_it and row.status == "ok" and keep(row):
            n = nouns_of(row)
            known = prior(n.cluster, n.stack) if priors else None
            predicted.append(estimate(Case.of(n.workload, n.cluster, n.stack, known), n.layout).sec_per_it)
            measured.append(row.sec_per_it)
    return predicted, measured


@pytest.mark.parametrize(
    ("cluster", "stack", "least"),
    [
        ("jean-zay-a100-80gb", "megatron-deepspeed", 0.05),
        ("jean-zay-v100-32gb", "megatron-deepspeed", 0.04),
        ("jean-zay-v100-16gb", "megatron-deepspeed", 0.04),
        ("aws-p3-2xlarge", "gpipe", 0.05),
        ("fugaku-a64fx", "megatron-cpu", 0.20),
    ],
)
def test_shipped_calibrations_predict_their_documents(cluster: str, stack: str, least: float) -> None:
    assert mape(*times(lambda row: row.cluster == cluster and row.stack == stack)) < least


def test_priors_alone_predict_the_gpu_documents_within_20_percent() -> None:
    gpus = ("jean-zay", "aws")
    assert mape(*times(lambda row: (row.cluster or "").startswith(gpus), priors=True)) < 0.20


def test_priors_alone_predict_layers_that_take_a_gpu_less_time_than_their_host() -> None:
    """Of small layers TP lowers nothing, and micro-batches of 1 take as long as larger ones: within a quarter."""
    rows = packaged_table("vtrain_single_node").measurements
    predicted, measured = times(lambda row: row.hidden == 1024 and row.mbs == 1 and row.pp == 1, priors=True, rows=rows)
    assert len(measured) > 30
    assert mape(predicted, measured) < 0.25


def test_memory_of_the_bloom_and_bigscience_tables_and_their_failures() -> None:
    predicted, measured = [], []
    for row in ROWS:
        if row.stack != "megatron-deepspeed" or row.status not in ("ok", "oom"):
            continue
        n = nouns_of(row)
        found = estimate(Case.of(n.workload, n.cluster, n.stack), n.layout)
        if row.status == "oom":
            assert not found.fits, f"{row.table} row {row.row} went out of memory"
        elif row.mem_gib:
            predicted.append(found.reported_mem_gib)
            measured.append(row.mem_gib)
    assert mape(predicted, measured) < 0.06


def test_head_sizes_that_cost_time_are_seen() -> None:
    """Document 004: 13824 hidden with 128 heads (of 108) against 64 heads (of 216); 112 heads of 128."""

    def seconds(hidden: int, heads: int) -> float:
        row = next(m for m in ROWS if m.hidden == hidden and m.heads == heads and (m.date or "") >= "2022-02-23")
        n = nouns_of(row)
        return estimate(Case.of(n.workload, n.cluster, n.stack), n.layout).sec_per_it

    assert seconds(13824, 128) > 1.2 * seconds(13824, 64)
    assert seconds(14336, 112) > 1.05 * seconds(14336, 128)
