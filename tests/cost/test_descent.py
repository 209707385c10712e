"""Efficiencies far from their priors, where predictions bend: what waits for memory gains nothing by arithmetic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trimaran.cost.calibration import Calibration, learned_elsewhere, prior
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.fit.fit_rows import fit_observations, observation
from trimaran.cost.fit.learn import averaged, learn
from trimaran.cost.fit.solve import Observation, batches, predict_times
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.files.row_table import packaged_table
from trimaran.layout.notation import parse_layout
from trimaran.nouns.workload import Workload

CLUSTER, STACK = load_cluster("a100-8x-node"), load_stack("megatron-deepspeed")
WORKLOAD = Workload(model=load_model("gpt3-1b3"), seq_len=1024, global_batch=64)
LABELS = [
    f"dp{dp},tp{tp},pp{pp},mbs{mbs},zero1,recompute-full,fp16"
    for dp, tp, pp in (
        (1, 1, 2), (2, 1, 1), (1, 2, 1), (1, 2, 2), (2, 2, 1), (1, 4, 1), (2, 2, 2), (1, 8, 1), (8, 1, 1), (4, 2, 1),
        (1, 4, 2),
    )
    for mbs in (1, 2, 4, 8)
]  # fmt: skip


def error(seen: list[Observation], known: Calibration) -> float:
    """Mean relative error of the predicted times."""
    predicted = predict_times(batches(seen), len(seen), known)
    return float(np.mean([abs(time / (row.sec_per_it or 1.0) - 1) for time, row in zip(predicted, seen, strict=True)]))


@pytest.mark.parametrize(
    "machine",
    [
        {"gemm": 1.1, "memory": 0.3, "attention": 3.0, "micro_batch_ms": 3.0},
        {"gemm": 0.9, "memory": 0.35, "op_us": 40.0, "collective_us": 100.0},
    ],
)
def test_a_machine_far_from_the_prior_is_learned_from_rows_without_noise(machine: dict[str, float]) -> None:
    start = prior(CLUSTER, STACK)
    case = Case.of(WORKLOAD, CLUSTER, STACK)
    made = case.calibrated(start.model_copy(update=machine))
    rows = [Observation(case, layout, estimate(made, layout).sec_per_it) for layout in map(parse_layout, LABELS)]
    learnt, _ = learn(rows[::2], start)
    assert error(rows[1::2], start) > 0.2
    assert error(rows[1::2], learnt) < 0.01
    assert learnt.time_error < 0.05


@pytest.mark.proof
def test_eighty_published_rows_teach_more_than_the_start_and_the_fit_says_how_well() -> None:
    """vTrain's node of A100: what it states of rows that it has not seen is what they then differ by."""
    table = packaged_table("vtrain_single_node")
    seen = [observation(row)[0] for row in table.measurements if row.status == "ok"]
    rows, _ = averaged([replace(row, mem_gib=None) for row in seen], [""] * len(seen))
    order = np.random.default_rng([2, 80]).permutation(len(rows)).tolist()
    chosen, rest = [rows[i] for i in order[:80]], [rows[i] for i in order[80:]]
    case = rows[0].case
    start = learned_elsewhere(case.cluster, case.stack, (case.cluster.name,))
    fitted = fit_observations(chosen, [row.layout.label() for row in chosen], start=start)
    assert error(rest, start) > 0.12
    assert error(rest, fitted.calibration) < 0.06
    assert error(rest, fitted.calibration) == pytest.approx(fitted.calibration.time_error * np.sqrt(2 / np.pi), rel=0.4)
