"""Fitting, saving and shipping efficiencies."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from trimaran.cli.app import app
from trimaran.cost.calibration import (
    KERNELS,
    SLOWED_BY_TRAFFIC,
    Calibration,
    learned_elsewhere,
    load_calibration,
    prior,
    save_calibration,
    shipped,
)
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.fit.learn import averaged, learn
from trimaran.cost.fit.solve import TIME_WIDTHS, Observation, calibrate, leave_out
from trimaran.cost.likeness import fewer
from trimaran.cost.table.predict_table import predict_table
from trimaran.files import catalogue
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.files.row_nouns import nouns_of
from trimaran.files.row_table import Table, packaged_table, write_table
from trimaran.layout.notation import parse_layout
from trimaran.nouns.measurement import Measurement
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
    fitted = calibrate(observed())
    for seen in observed():
        found = estimate(Case.of(WORKLOAD, CLUSTER, STACK, fitted), seen.layout)
        assert found.sec_per_it == pytest.approx(seen.sec_per_it, rel=0.02)
        assert found.reported_mem_gib == pytest.approx(seen.mem_gib, rel=0.02)


def test_one_row_moves_the_prior_and_no_row_is_refused() -> None:
    base = prior(CLUSTER, STACK)
    one = observed(slower=1.2)[0]
    before = estimate(Case.of(WORKLOAD, CLUSTER, STACK, base), one.layout).sec_per_it
    after = estimate(Case.of(WORKLOAD, CLUSTER, STACK, calibrate([one])), one.layout).sec_per_it
    assert abs(np.log(after / (one.sec_per_it or 1))) < abs(np.log(before / (one.sec_per_it or 1)))
    with pytest.raises(TrimaranError, match="nothing to fit to"):
        calibrate([Observation(Case.of(WORKLOAD, CLUSTER, STACK), one.layout)])


def test_one_wild_row_does_not_carry_the_fit_away() -> None:
    rows = observed()
    wild = Observation(Case.of(WORKLOAD, CLUSTER, STACK), rows[4].layout, (rows[4].sec_per_it or 0) * 5)
    fitted = calibrate([*rows, wild])
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
    fitted = calibrate(observed())
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
    # attention was measured there in Triton's kernel, which torchtitan does not run
    assert learned.memory < believed.memory and learned.attention == believed.attention
    there = load_stack("torch-fsdp")
    assert learned_elsewhere(h100, there).attention < prior(h100, there).attention
    # what a table shows of products beside gathers is what was measured of them elsewhere
    assert learned.gemm == pytest.approx(believed.gemm, rel=0.05)
    alone = prior(h100, stack.model_copy(update={"gathers_beside_products": False}))
    assert alone.gemm / believed.gemm == pytest.approx(SLOWED_BY_TRAFFIC)


def test_flash_attention_begins_at_what_is_sustained_of_its_published_rate_where_the_device_states_one() -> None:
    h100 = load_cluster("dgx-h100")
    flash = prior(h100, load_stack("torch-fsdp"))
    sustained = h100.device.sustained_share * h100.device.flash_share
    assert flash.gemm * flash.attention * SLOWED_BY_TRAFFIC == pytest.approx(sustained)
    assert prior(h100, STACK).attention == prior(CLUSTER, STACK).attention


START = prior(CLUSTER, STACK)


def measured(
    machine: Calibration, labels: list[str], noise: float = 0.0, seed: int = 0, day: str = ""
) -> list[Observation]:
    """Runs of a machine, each off by the noise (1 sigma), as one sees them who knows no more than the prior."""
    case, rng = Case.of(WORKLOAD, CLUSTER, STACK, START), np.random.default_rng(seed)
    found = [estimate(case.calibrated(machine), parse_layout(label)) for label in labels]
    return [
        Observation(
            case, parse_layout(label), one.sec_per_it * float(off[0]), one.reported_mem_gib * float(off[1]), day=day
        )
        for label, one, off in zip(labels, found, np.exp(noise * rng.standard_normal((len(labels), 2))), strict=True)
    ]


def errors(known: Calibration, rows: list[Observation]) -> tuple[float, float]:
    """Mean absolute log errors of time and memory."""
    found = [estimate(row.case.calibrated(known.on_day(row.day)), row.layout) for row in rows]
    times = [np.log(one.sec_per_it / (row.sec_per_it or 1.0)) for one, row in zip(found, rows, strict=True)]
    memory = [np.log(one.reported_mem_gib / (row.mem_gib or 1.0)) for one, row in zip(found, rows, strict=True)]
    return float(np.mean(np.abs(times))), float(np.mean(np.abs(memory)))


@pytest.mark.parametrize(("count", "left"), [(1, 0.9), (3, 0.5), (8, 0.25)])
def test_rows_of_a_machine_that_is_slower_throughout_say_so_of_all_others(count: int, left: float) -> None:
    machine = START.model_copy(update={"time_scale": 1.4, "memory_scale": 1.3})
    rows = measured(machine, LABELS)
    learnt, _ = learn(rows[:count])
    for after, before in zip(errors(learnt, rows[count:]), errors(START, rows[count:]), strict=True):
        assert after < left * before


@pytest.mark.parametrize("count", [1, 3, 8])
def test_rows_that_the_start_explains_move_others_by_less_than_they_scatter(count: int) -> None:
    learnt, _ = learn(measured(START, LABELS, noise=0.02)[:count])
    assert max(errors(learnt, measured(START, LABELS))) < 0.015


def test_a_measured_run_moves_its_likes_and_none_further_than_itself() -> None:
    rows = measured(START, LABELS)
    odd = replace(rows[0], sec_per_it=1.3 * (rows[0].sec_per_it or 0.0))
    learnt, _ = learn([odd, *rows[1:6]])
    before = [estimate(row.case, row.layout).sec_per_it for row in rows]
    after = [estimate(row.case.calibrated(learnt), row.layout).sec_per_it for row in rows]
    moves = [np.log(late / early) for early, late in zip(before, after, strict=True)]
    assert moves[0] > 0.03
    assert max(moves) == moves[0]
    assert max(abs(move) for move in moves[1:]) < 0.7 * moves[0]


def test_what_similar_runs_add_is_the_same_of_few_and_of_many_and_after_a_file(tmp_path: Path) -> None:
    rows = measured(START.model_copy(update={"gemm": 0.6}), LABELS, noise=0.05)
    learnt, _ = learn(rows)
    kept = learnt.model_copy(update={"similar": fewer(learnt.similar, len(learnt.similar) - 3)})
    save_calibration(learnt, tmp_path / "c.toml")
    read = load_calibration(tmp_path / "c.toml")
    assert read == learnt and 0 < len(kept.similar) < len(learnt.similar) <= len(LABELS)
    for row in rows:
        whole = estimate(row.case.calibrated(learnt), row.layout).sec_per_it
        assert estimate(row.case.calibrated(kept), row.layout).sec_per_it == pytest.approx(whole, rel=0.03)


@pytest.mark.proof
def test_two_of_three_unseen_runs_lie_within_the_error_that_a_fit_states() -> None:
    """Machines drawn from the priors, each run off by a noise of its own, the start's error stated as it is."""
    inside = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        names = ("gemm", "memory", "intra_bandwidth", "inter_bandwidth", "send_bandwidth")
        off = {name: getattr(START, name) * float(np.exp(TIME_WIDTHS[name] * rng.standard_normal())) for name in names}
        rows = measured(START.model_copy(update=off), LABELS, noise=0.08, seed=seed)
        order = rng.permutation(len(rows)).tolist()
        learnt, _ = learn([rows[i] for i in order[:6]])
        for i in order[6:]:
            found = estimate(rows[i].case.calibrated(learnt), rows[i].layout).sec_per_it
            inside.append(abs(np.log(found / (rows[i].sec_per_it or 1.0))) <= learnt.time_error)
    assert 0.55 < np.mean(inside) < 0.85


@pytest.mark.proof
@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_fit_is_never_worse_on_rows_unseen_than_its_start(count: int) -> None:
    """Medians over machines whose efficiencies are anything that their priors allow."""
    after, before = [], []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        off = {
            name: getattr(START, name) * float(np.exp(0.2 * rng.standard_normal()))
            for name in (
                "gemm",
                "attention",
                "memory",
                "intra_bandwidth",
                "send_bandwidth",
                "time_scale",
                "memory_scale",
            )
        }
        rows = measured(START.model_copy(update=off), LABELS, noise=0.03, seed=seed)
        order = rng.permutation(len(rows)).tolist()
        learnt, _ = learn([rows[i] for i in order[:count]])
        rest = [rows[i] for i in order[count:]]
        after.append(errors(learnt, rest))
        before.append(errors(START, rest))
    assert (np.median(after, axis=0) <= np.median(before, axis=0) + 1e-9).all()


def test_many_rows_teach_single_efficiencies_and_say_which() -> None:
    machine = START.model_copy(update={"gemm": 0.7, "intra_bandwidth": 0.45})
    rows = measured(machine, LABELS, noise=0.01)
    learnt, (time, _) = learn(rows)
    assert errors(learnt, measured(machine, LABELS))[0] < 0.25 * errors(START, measured(machine, LABELS))[0]
    assert {"time_scale", "gemm"} <= {move.name for move in time.moves}
    assert "unaligned" in time.unseen
    assert sum(time.kinds.values()) == pytest.approx(1.0)
    assert time.error < 0.1


def test_a_day_on_which_the_machine_was_slower_has_a_scale_of_its_own() -> None:
    slower = START.model_copy(update={"time_scale": 1.1})
    rows = [*measured(START, LABELS[::2], 0.005, day="1"), *measured(slower, LABELS[1::2], 0.005, day="2")]
    learnt, _ = learn(rows)
    assert learnt.on_day("2").time_scale / learnt.on_day("1").time_scale == pytest.approx(1.1, rel=0.03)
    assert learnt.on_day("never seen") == learnt == learnt.on_day(None)


def test_repeats_of_one_configuration_count_as_their_mean() -> None:
    (row,) = measured(START, LABELS[:1])
    twice = [row, Observation(row.case, row.layout, (row.sec_per_it or 0.0) * 3)]
    (one,), names = averaged(twice, ["a", "b"])
    assert one.sec_per_it == pytest.approx((row.sec_per_it or 0.0) * 2) and one.mem_gib == row.mem_gib
    assert names == ["a"]


def test_a_fit_begins_at_what_is_shipped_of_the_cluster_and_stack() -> None:
    own = shipped(CLUSTER.name, STACK.name)
    assert own is not None
    case = Case.of(WORKLOAD, CLUSTER, STACK)
    layout = parse_layout(LABELS[0])
    found = estimate(case, layout)
    learnt, _ = learn([Observation(case, layout, found.sec_per_it * 1.01, found.reported_mem_gib)])
    assert learnt.gemm == pytest.approx(own.gemm, rel=0.01)
    assert estimate(case.calibrated(learnt), layout).sec_per_it == pytest.approx(found.sec_per_it, rel=0.01)


def test_a_file_of_before_memory_had_a_scale_still_loads(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('cluster = "c"\nstack = "s"\ngemm = 0.8\n')
    found = load_calibration(tmp_path / "c.toml")
    assert found.memory_scale == 1.0 and found.days == {} and found.gemm == 0.8


def test_predict_states_between_what_times_a_run_lies_on_the_day_it_was_run() -> None:
    (row,) = [row for row in packaged_table().rows if row.measurement and row.measurement.sec_per_it][:1]
    assert row.measurement is not None and row.measurement.date
    known = START.model_copy(update={"time_error": 0.1, "days": {row.measurement.date: 1.5}})
    table = Table((), (row,))
    (usual,), (slow,) = predict_table(table, calibration=START), predict_table(table, calibration=known)
    assert usual.estimate is not None and slow.estimate is not None
    assert slow.estimate.sec_per_it == pytest.approx(1.5 * usual.estimate.sec_per_it)
    low, high = (float(slow.cells()[f"predicted_{end}_sec_per_it"]) for end in ("low", "high"))
    assert (low, high) == pytest.approx(
        tuple(slow.estimate.sec_per_it * float(np.exp(e)) for e in (-0.1, 0.1)), rel=1e-4
    )


def told_of_a_fit(folder: Path, rows: list[Measurement]) -> str:
    write_table(folder / "t.csv", rows)
    done = CliRunner().invoke(app, ["fit", str(folder / "t.csv"), "-o", str(folder / "c.toml")])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_fit_says_what_the_rows_taught_and_what_they_could_not_tell(tmp_path: Path) -> None:
    rows = [row for row in packaged_table("llm_foundry_a100_40gb").measurements if row.status == "ok"][:8]
    nouns = [nouns_of(row) for row in rows]
    usual = [estimate(Case.of(n.workload, n.cluster, n.stack), n.layout).sec_per_it for n in nouns]
    # one factor on all rows is a scale as well as slower products, which rows of one kind cannot tell apart
    slower = [row.model_copy(update={"sec_per_it": 1.5 * seconds}) for row, seconds in zip(rows, usual, strict=True)]
    told = told_of_a_fit(tmp_path, slower)
    assert "time: time_scale 1 -> 1." in told
    learnt = load_calibration(tmp_path / "c.toml")
    found = [estimate(Case.of(n.workload, n.cluster, n.stack, learnt), n.layout).sec_per_it for n in nouns]
    assert np.mean(np.log(np.array(found) / usual)) > 0.8 * np.log(1.5)
    # it does not explain those of which the large alone are slower: products are, and small ones show no more of links
    start = learned_elsewhere(nouns[0].cluster, nouns[0].stack)
    slow = start.model_copy(update={"gemm": 0.6 * start.gemm, "attention": 1.6 * start.attention})
    uneven = [
        row.model_copy(
            update={"sec_per_it": estimate(Case.of(n.workload, n.cluster, n.stack, slow), n.layout).sec_per_it}
        )
        for row, n in zip(rows, nouns, strict=True)
    ]
    assert "not shown by these rows: " in told_of_a_fit(tmp_path, uneven)


def test_a_fit_names_the_rows_that_it_leaves_out_by_their_numbers_in_the_table(tmp_path: Path) -> None:
    rows = [row for row in packaged_table("llm_foundry_a100_40gb").measurements if row.sec_per_it][:6]
    failed = rows[3].model_copy(update={"status": "oom"})
    absurd = rows[4].model_copy(update={"sec_per_it": 1e6})
    write_table(tmp_path / "t.csv", [*rows[:3], failed, absurd, rows[5]])
    lines = (tmp_path / "t.csv").read_text().splitlines()
    at = lines[0].split(",").index("sec_per_it")
    cells = next(csv.reader([lines[2]]))
    lines[2] = ",".join('"{}"'.format("inf" if place == at else cell) for place, cell in enumerate(cells))
    (tmp_path / "t.csv").write_text("\n".join(lines))
    done = CliRunner().invoke(app, ["fit", str(tmp_path / "t.csv"), "-o", str(tmp_path / "c.toml")])
    told = done.stderr.splitlines()
    assert done.exit_code == 0 and "fitted to 3 rows" in done.stdout
    assert told[0].startswith("refused row 2: ") and "inf" in told[0]
    assert told[1].startswith("skipped row 5: sec_per_it 1e+06")
    assert "note: row 4: status is oom, so it is not fitted to" in told


def test_a_fit_takes_the_rows_of_a_cluster_and_stack_however_these_are_spelled(tmp_path: Path) -> None:
    rows = [row for row in packaged_table("llm_foundry_a100_40gb").measurements if row.sec_per_it][:3]
    shipped_file = Path(catalogue.__file__).parents[1] / "catalog" / "clusters" / "llm-foundry-a100-40gb.toml"
    (tmp_path / "mine.toml").write_text('name = "our-rack"\n' + shipped_file.read_text())
    output = ["-o", str(tmp_path / "c.toml")]
    spelled: list[tuple[dict[str, str], list[str]]] = [
        ({"cluster": "our-rack"}, ["--cluster", str(tmp_path / "mine.toml")]),
        ({"cluster": "LLM-Foundry A100 40GB"}, ["--cluster", "llm-foundry-a100-40gb"]),
        ({"stack": "Torch Titan"}, ["--stack", "torchtitan"]),
    ]
    for cells, given in spelled:
        write_table(tmp_path / "t.csv", [row.model_copy(update=cells) for row in rows])
        done = CliRunner().invoke(app, ["fit", str(tmp_path / "t.csv"), *given, *output])
        assert done.exit_code == 0 and "fitted to 3 rows" in done.stdout, (given, done.output)


def test_a_fit_that_has_no_row_of_its_cluster_says_which_the_rows_name(tmp_path: Path) -> None:
    rows = [row for row in packaged_table("llm_foundry_a100_40gb").measurements if row.sec_per_it][:3]
    write_table(tmp_path / "t.csv", [row.model_copy(update={"cluster": "our-rack"}) for row in rows])
    fit = ["fit", str(tmp_path / "t.csv"), "-o", str(tmp_path / "c.toml")]
    with pytest.raises(TrimaranError, match="none of 3 rows is of cluster dgx-h200, the first is of our-rack: give"):
        CliRunner().invoke(app, [*fit, "--cluster", "dgx-h200"], catch_exceptions=False)
    with pytest.raises(TrimaranError, match=r"'our-rack' is not in the catalogue: give its file, .* by --cluster"):
        CliRunner().invoke(app, fit, catch_exceptions=False)


@pytest.mark.parametrize("labels", [LABELS[:2], LABELS])
def test_what_a_start_knows_of_a_day_is_learned_once_and_stays(labels: list[str]) -> None:
    start = START.model_copy(update={"days": {"1": 1.2, "2": 0.9}})
    learnt, _ = learn(measured(start.on_day("1"), labels, day="1"), start)
    assert learnt.on_day("1").time_scale == pytest.approx(start.on_day("1").time_scale, rel=0.01)
    assert learnt.days == start.days
    rows = [*measured(start.on_day("1"), labels[:1], day="1"), *measured(START, labels[1:], day="3")]
    learnt, _ = learn(rows, start)
    assert {"1", "2"} <= set(learnt.days) and learnt.days["2"] == 0.9
