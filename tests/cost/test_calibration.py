"""Fitting, saving and shipping efficiencies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trimaran.cost.calibration import KERNELS, learned_elsewhere, load_calibration, prior, save_calibration, shipped
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.fit.solve import Observation, fit, leave_out
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.layout.notation import parse_layout
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.workload import Workload

CLUSTER, STACK = load_cluster("jean-zay-a100-80gb"), load_stack("megatron-deepspeed")
WORKLOAD = Workload(model=load_model("bloom-prequel-181b"), seq_len=2048, global_batch=2048)
LABELS = [
    f"dp{dp},tp{tp},pp{pp},mbs{mbs},zero1,recompute-full,fp16"
    for dp, tp, pp in ((4, 8, 12), (8, 8, 6), (8, 4, 12), (16, 4, 6), (16, 2, 12))
    for mbs in (1, 2, 4)
]


def observed(slower: float = 1.0) -> list[Observation]:
    """Runs of a machine that is as the prior says, but for its matmul and tensor-parallel rates."""
    truth = prior(CLUSTER, STACK).model_copy(update={"gemm": 0.7, "intra_bandwidth": 0.5})
    seen = []
    for label in LABELS:
        layout = parse_layout(label)
        found = estimate(Case.of(WORKLOAD, CLUSTER, STACK, truth), layout)
        seen.append(
            Observation(
                Case.of(WORKLOAD, CLUSTER, STACK), layout, found.sec_per_it * slower, found.reported_mem_gib * slower
            )
        )
    return seen


def test_a_fit_predicts_the_machine_that_made_the_rows() -> None:
    fitted = fit(observed())
    for seen in observed():
        found = estimate(Case.of(WORKLOAD, CLUSTER, STACK, fitted), seen.layout)
        assert found.sec_per_it == pytest.approx(seen.sec_per_it, rel=0.02)
        assert found.reported_mem_gib == pytest.approx(seen.mem_gib, rel=0.02)


def test_one_row_moves_the_prior_and_no_row_is_refused() -> None:
    base = prior(CLUSTER, STACK)
    one = observed(slower=1.2)[0]
    before = estimate(Case.of(WORKLOAD, CLUSTER, STACK, base), one.layout).sec_per_it
    after = estimate(Case.of(WORKLOAD, CLUSTER, STACK, fit([one])), one.layout).sec_per_it
    assert abs(np.log(after / (one.sec_per_it or 1))) < abs(np.log(before / (one.sec_per_it or 1)))
    with pytest.raises(TrimaranError, match="nothing to fit to"):
        fit([Observation(Case.of(WORKLOAD, CLUSTER, STACK), one.layout)])


def test_one_wild_row_does_not_carry_the_fit_away() -> None:
    rows = observed()
    wild = Observation(Case.of(WORKLOAD, CLUSTER, STACK), rows[4].layout, (rows[4].sec_per_it or 0) * 5)
    fitted = fit([*rows, wild])
    case = Case.of(WORKLOAD, CLUSTER, STACK, fitted)
    errors = [estimate(case, seen.layout).sec_per_it / (seen.sec_per_it or 1) - 1 for seen in rows]
    assert float(np.median(np.abs(errors))) < 0.03


def test_a_left_out_group_is_predicted_by_the_others() -> None:
    rows = observed()
    groups = [label.split(",mbs")[0] for label in LABELS]
    found = leave_out(rows, groups)
    assert set(found) == set(groups)
    for seen, group in zip(rows, groups, strict=True):
        predicted = estimate(Case.of(WORKLOAD, CLUSTER, STACK, found[group]), seen.layout).sec_per_it
        assert predicted == pytest.approx(seen.sec_per_it, rel=0.05)


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    fitted = fit(observed())
    save_calibration(fitted, tmp_path / "c.toml")
    assert load_calibration(tmp_path / "c.toml") == fitted


@pytest.mark.parametrize("text", ["gemm = 'fast'", "gemm = -1", "gemm = nan", "speed = 1", "gemm ="])
def test_a_bad_calibration_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(TrimaranError) as caught:
        load_calibration(tmp_path / "c.toml")
    assert "\n" not in str(caught.value)
    assert "c.toml" in str(caught.value)


def test_a_shipped_calibration_applies_by_itself_and_elsewhere_its_kernels() -> None:
    layout = parse_layout(LABELS[0])
    own = shipped(CLUSTER.name, STACK.name)
    assert own is not None
    assert own.rows > 0
    assert estimate(Case.of(WORKLOAD, CLUSTER, STACK), layout).calibrated_by == own.origin
    h100 = load_cluster("dgx-h100")
    assert CLUSTER.name in estimate(Case.of(WORKLOAD, h100, STACK), layout).calibrated_by
    believed, learned = prior(h100, STACK), learned_elsewhere(h100, STACK)
    assert learned.memory != believed.memory
    assert learned.model_copy(update={name: getattr(believed, name) for name in (*KERNELS, "origin")}) == believed
    assert CLUSTER.name not in learned_elsewhere(h100, STACK, (CLUSTER.name,)).origin


def test_what_no_other_cluster_of_the_kind_has_shown_is_left_to_the_prior() -> None:
    h100 = load_cluster("dgx-h100")
    stack = load_stack("megatron-cpu")
    assert learned_elsewhere(h100, stack) == prior(h100, stack)


def test_a_stack_learns_from_another_that_runs_the_same_kernels() -> None:
    h100, stack = load_cluster("dgx-h100"), load_stack("torchtitan")
    learned, believed = learned_elsewhere(h100, stack), prior(h100, stack)
    assert "llm-foundry-a100-40gb" in learned.origin
    assert learned.gemm < believed.gemm


def test_flash_attention_begins_at_what_is_sustained_of_its_published_rate_where_the_device_states_one() -> None:
    h100 = load_cluster("dgx-h100")
    flash = prior(h100, load_stack("torch-fsdp"))
    sustained = h100.device.sustained_share * h100.device.flash_share
    assert flash.gemm * flash.attention == pytest.approx(sustained)
    assert prior(h100, STACK).attention == prior(CLUSTER, STACK).attention
