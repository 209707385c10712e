"""How long a training takes on machines that fail: closed form, simulation, and what a plan says of it."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from trimaran.cli.app import app
from trimaran.planner.goodput.expected import (
    Faulty,
    best_interval_s,
    daly_s,
    expected,
    waiting_share,
    young_s,
)
from trimaran.planner.goodput.simulate import simulated_s

HOUR, DAY = 3600.0, 86400.0
# 16,384 devices of which one fails every three hours, as Llama 3's did
LARGE = Faulty(work_s=50 * DAY, rate=419 / (54 * DAY), every_s=600, save_s=5, detect_s=60, restart_s=600)


@pytest.mark.parametrize(
    "training",
    [
        LARGE,
        replace(LARGE, rate=LARGE.rate / 100, every_s=4 * HOUR),
        replace(LARGE, rate=1 / HOUR, every_s=0.5 * HOUR, save_s=300, restart_s=900),  # a fault an hour
        replace(LARGE, away_share=0.78, repair_s=24 * HOUR, spares=4),  # six are away in the mean
        replace(LARGE, away_share=0.78, repair_s=24 * HOUR, spares=12),
        replace(LARGE, rate=0.0),
        replace(LARGE, rate=1 / HOUR, refused=0.3),
    ],
    ids=["large", "small", "dying", "short of spares", "enough spares", "no faults", "full disks"],
)
def test_a_simulation_agrees_with_the_closed_form(training: Faulty) -> None:
    runs = simulated_s(training, runs=100, seed=1)
    assert runs.mean() == pytest.approx(expected(training).total_s, rel=0.02)


def _drawn(number: int) -> Faulty:
    """Some training: faults from one in 100 s to one in 12 days, which strike it once in ten trainings to 300 times."""
    chance = np.random.default_rng(number)

    def between(low: float, high: float) -> float:
        return float(10 ** chance.uniform(low, high))

    between_s = between(2, 6)
    training = Faulty(
        work_s=between_s * between(-1, 2.5), rate=1 / between_s, every_s=1.0, save_s=between_s * between(-4, 0),
        detect_s=between_s * between(-3, -0.5), restart_s=between_s * between(-3, 0.2),
    )  # fmt: skip
    if number % 2:
        training = replace(
            training, away_share=between(-1, 0), repair_s=between_s * between(-1, 1), spares=int(chance.integers(8))
        )
    factor = between(-0.5, 0.5) if number % 3 == 0 else 1.0
    return replace(training, every_s=factor * best_interval_s(training.save_s, training.rate))


@pytest.mark.parametrize("number", range(60))
def test_a_simulation_agrees_wherever_a_training_may_be(number: int) -> None:
    training = _drawn(number)
    short = training.work_s * training.rate < 3  # one fault more or less is much
    runs = simulated_s(training, runs=100_000 if short else 2_000, seed=number)
    assert runs.mean() == pytest.approx(expected(training).total_s, rel=0.02)


def test_a_training_shorter_than_the_best_interval_saves_once() -> None:
    training = replace(LARGE, work_s=600, every_s=3600, save_s=30, rate=1 / HOUR)
    assert expected(training).checkpoints_s == 30
    # 630 seconds that a fault begins anew: (exp(r L) - 1) / r, and restarts
    lost = math.expm1(630 / HOUR) * HOUR - 630
    assert expected(training).lost_s == pytest.approx(lost)
    assert simulated_s(training, 50_000, seed=1).mean() == pytest.approx(expected(training).total_s, rel=0.01)


def test_a_part_of_very_many_faults_stands_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    training = replace(LARGE, rate=1 / 900)  # 9,000 faults
    in_part = simulated_s(training, 200, seed=1)
    monkeypatch.setattr("trimaran.planner.goodput.simulate._PLAYED_FAULTS", 10**9)
    whole = simulated_s(training, 200, seed=2)
    assert in_part.mean() == pytest.approx(whole.mean(), rel=0.005)
    assert in_part.std() == pytest.approx(whole.std(), rel=0.2)


def test_a_simulation_repeats_by_its_seed() -> None:
    assert np.array_equal(simulated_s(LARGE, 10, seed=3), simulated_s(LARGE, 10, seed=3))
    assert not np.array_equal(simulated_s(LARGE, 10, seed=3), simulated_s(LARGE, 10, seed=4))


@pytest.mark.parametrize("save_s", [0.1, 5.0, 120.0, 1800.0])
def test_the_best_interval_is_where_the_expected_time_is_least(save_s: float) -> None:
    best = best_interval_s(save_s, LARGE.rate)
    least = expected(replace(LARGE, every_s=best, save_s=save_s)).total_s
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert expected(replace(LARGE, every_s=best * factor, save_s=save_s)).total_s >= least
    assert daly_s(save_s, LARGE.rate) == pytest.approx(best, rel=0.02)


def test_young_and_daly_part_where_checkpoints_take_as_long_as_the_machine_lives() -> None:
    assert young_s(0.1, LARGE.rate) == pytest.approx(best_interval_s(0.1, LARGE.rate), rel=0.01)
    rare = 1 / (2 * HOUR)
    assert young_s(HOUR, rare) > 1.4 * best_interval_s(HOUR, rare)
    assert daly_s(HOUR, rare) == pytest.approx(best_interval_s(HOUR, rare), rel=0.1)


def test_parts_add_up_and_more_spares_wait_less() -> None:
    found = expected(LARGE)
    assert found.total_s == pytest.approx(
        LARGE.work_s / LARGE.every_s
        * math.expm1(LARGE.rate * 605) * math.exp(LARGE.rate * 600) * (1 / LARGE.rate + 60)
    )  # fmt: skip
    shares = [waiting_share(replace(LARGE, away_share=1, repair_s=DAY, spares=spares)) for spares in range(20)]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.8 and shares[-1] < 1e-3
    never = expected(replace(LARGE, rate=1.0))
    assert never.total_s == math.inf and never.goodput == 0.0


Run = Callable[..., "subprocess.CompletedProcess[str]"]
QUESTION = ("plan", "--model", "gpt3-13b", "--cluster", "dgx-h100", "--devices", "64", "--gbs", "512", "--top", "1")


@pytest.mark.proof
def test_a_plan_says_what_its_days_assume(trimaran: Run) -> None:
    told = trimaran(*QUESTION, "--tokens", "300e9", "--price", "2").stdout
    few = trimaran(*QUESTION, "--tokens", "3e8").stdout
    days, hours, faults, minutes = (
        float(re.findall(pattern, text)[0])
        for pattern, text in (
            (r"expected ([\d.]+) days \(P50 ", told),
            (r"one every (\d+) hours on 64 devices", told),
            (r"waiting for nodes 0\.00%; ([\d.]+) faults in the mean", told),
            (r"expected ([\d.]+) min \(P50 ", few),
        )
    )
    assert faults == pytest.approx(24 * days / hours, abs=0.006)
    assert minutes == pytest.approx(24 * 60 * days / 1000, rel=0.01), "of a thousandth of the tokens, a thousandth"
    assert "days and cost above assume that nothing fails. With the faults of llama3-h100" in told
    assert "assumed: faults are those of llama3-h100, since cluster dgx-h100 states none" in told
    assert "assumed: a restart takes 15 minutes" in told and ", P90 " in told
    assert "nothing fails" not in trimaran(*QUESTION).stdout
    none = trimaran("plan", "--model", "fugaku-gpt-1b3", "--cluster", "fugaku-a64fx", "--gbs", "512", "--tokens", "1e9")
    assert "days and cost assume that nothing fails: [faults] of the cluster" in none.stdout, none.stderr


def test_of_a_rack_the_host_that_failed_is_replaced_and_not_all_of_it(trimaran: Run, tmp_path: Path) -> None:
    """A spare node was a rack of 72 devices, and so was what a plan went on without."""
    faults = tmp_path / "mine.toml"
    faults.write_text("faults = 8\ndays = 10\ndevices = 64\nrestart_s = 300\nsave_s = 1\nrepair_hours = 24\n")
    done = trimaran(
        "plan", "--model", "llama3-8b", "--cluster", "gb200-nvl72", "--gbs", "576", "--devices", "144", "--top", "1",
        "--tokens", "1e12", "--price", "3", "--faults", str(faults), "--fix", "tp=1", "--fix", "pp=1",
        "--format", "json",
    )  # fmt: skip
    found = json.loads(done.stdout)["goodput"]
    devices = [row["cost"] / row["days"] / 24 / 3 for row in found["spares"]]
    assert devices == pytest.approx([144 + 4 * nodes for nodes in range(len(devices))]) and len(devices) > 2
    kept = {row["spare_nodes"]: row["devices"] for row in found["layouts"]}
    assert kept[0] == 144 and all(144 - 36 < kept[nodes] <= 144 - 4 * nodes for nodes in (1, 2))
    assert any("a node that fails is a host, of 4 devices" in sentence for sentence in found["assumptions"])


@pytest.mark.proof
def test_stated_faults_are_answered_with_spares_spot_and_fewer_nodes(trimaran: Run, tmp_path: Path) -> None:
    faults = tmp_path / "mine.toml"
    faults.write_text(
        "faults = 80\ndays = 10\ndevices = 64\nrestart_s = 300\ndetect_s = 30\nsave_s = 1\nrepair_hours = 12\n"
        "preemptions_per_device_day = 0.2\n"
    )
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        'device = "h100-sxm"\nnodes = 8\ndevices_per_node = 8\nprice_per_device_hour = 2\n'
        'spot_price_per_device_hour = 1\nfaults = "mine.toml"\n'
        "[intra]\nbandwidth_gbps = 3600\nlatency_us = 2\n[inter]\nbandwidth_gbps = 3200\nlatency_us = 4\n"
    )
    question = ("plan", "--model", "gpt3-13b", "--cluster", str(cluster), "--gbs", "512", "--top", "1")
    done = trimaran(*question, "--tokens", "300e9", "--format", "json")
    found = json.loads(done.stdout)["goodput"]
    shares = [found[part] for part in ("work", "checkpoints", "lost", "restarts", "waiting")]
    assert sum(shares) == pytest.approx(1) and min(shares) > 0
    assert found["days_without"] / found["days"] == pytest.approx(found["work"])
    assert found["days_without"] < found["days_p50"] < found["days_p90"]
    # 8 faults a day, and half a day away: four nodes are in the mean
    costs = [row["cost"] for row in found["spares"]]
    assert found["spares_that_pay"] == costs.index(min(costs)) > 0
    fewer = found["fewer_nodes"]
    assert fewer["nodes"] == 4 and fewer["slower"] > 1.5 and fewer["better"]
    # a machine that is short of nodes most of the time is better used by a layout that leaves some to stand by, or that
    # goes on with fewer
    fewest, *others = found["layouts"]
    assert all(fewest["days"] <= row["days"] for row in others) and len(others) == 2
    fastest = next(row for row in found["layouts"] if row["layout"] == found["layout"])
    assert fastest["days"] == pytest.approx(min(found["days"], fewer["days"])) and fastest["fewer_nodes"]
    assert fewest["spare_nodes"] == 2 and fewest["devices"] == 48 and fewest["days_without"] > fastest["days_without"]
    told = trimaran(*question, "--tokens", "300e9").stdout
    assert f"fewest expected days: {fewest['layout']} with 2 spare nodes" in told
    assert found["spot"]["days"] > found["days"] and found["spot"]["hours_between_faults"] < 3

    faults.write_text("faults = 1e6\ndays = 1\ndevices = 64\n")
    refused = trimaran(*question, "--tokens", "300e9")
    assert refused.returncode == 2 and "the training never ends" in refused.stderr
    # a restart of 15 times the time between faults ends once in millions of tries: told at once, not played
    faults.write_text("faults = 64\ndays = 1\ndevices = 64\nrestart_s = 20000\n")
    refused = trimaran(*question, "--tokens", "300e9")
    assert refused.returncode == 2 and "the training never ends, 0.00% of its time would be work" in refused.stderr
    faults.write_text("faults = 80\ndays = 10\ndevices = 64\npreemptions_per_device_day = 1e4\n")
    told = trimaran(*question, "--tokens", "300e9")
    assert told.returncode == 0 and "on spot devices: faults: one every 0 s" in told.stdout, told.stderr
    for rate in ("faults = 1e-300\ndays = 1", "faults = 1\ndays = 1e-300"):
        faults.write_text(f"{rate}\ndevices = 1\n")
        refused = trimaran(*question, "--tokens", "300e9")
        assert refused.returncode == 2 and "of one device in a day: state between" in refused.stderr
    faults.write_text("faults = 1\ndays = 1\n")
    assert "devices" in trimaran(*question).stderr


@pytest.mark.parametrize("ending", ["toml", "json"])
def test_faults_of_a_file_are_not_said_to_be_the_clusters(ending: str, tmp_path: Path) -> None:
    stated = {"faults": 419, "days": 54, "devices": 16384, "restart_s": 300}
    text = json.dumps(stated) if ending == "json" else "\n".join(f"{name} = {value}" for name, value in stated.items())
    (tmp_path / f"counted.{ending}").write_text(text)
    asked = ["--model", "gpt2-124m", "--cluster", "dgx-h100", "--gbs", "64", "--devices", "8", "--tokens", "1e10"]
    done = CliRunner().invoke(app, ["plan", *asked, "--faults", str(tmp_path / f"counted.{ending}")])
    assert done.exit_code == 0, done.output
    assert "With the faults of counted (no source is named), one" in done.output


@pytest.mark.parametrize(("cluster", "rate"), [("gb200-nvl72", 225), ("dgx-h100", 63), ("mi300x-8x-node", 31.5)])
def test_a_checkpoint_is_copied_over_the_devices_own_link(cluster: str, rate: float) -> None:
    """A link that is not stated is that of PCIe 4.0 x16."""
    asked = ["--model", "llama3-8b", "--cluster", cluster, "--gbs", "64", "--devices", "8", "--tokens", "1e10"]
    done = CliRunner().invoke(app, ["plan", *asked, "--fix", "tp=2", "--top", "1"])
    assert done.exit_code == 0, done.output
    told = re.search(
        r"stops the training for ([\d.]+) s, to copy ([\d.]+) GiB of each device at ([\d.]+) GB/s", done.output
    )
    assert told and float(told[3]) == rate
    assert float(told[1]) == pytest.approx(float(told[2]) * 2**30 / (rate * 1e9), abs=0.006)
