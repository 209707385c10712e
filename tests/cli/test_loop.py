"""The whole loop on this machine: measured, killed in the middle, resumed, trained."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import time
from pathlib import Path

import pytest

from command import TRIMARAN, run, tiny_recipe
from processes import processes_in
from trimaran.store import Store

LAYOUTS = ["dp1,mbs4", "dp2,mbs1", "tp2,mbs2", "pp2,mbs1"]


def stored(folder: Path) -> list[str]:
    path = folder / "runs" / "tiny" / "store.sqlite"
    if not path.exists():
        return []
    with Store(path) as store:
        return [row.created_at or "" for row in store.measurements(every_attempt=True)]


@pytest.mark.proof
def test_a_sweep_that_waits_for_one_that_is_stopped_says_so_once_and_how_to_go_on(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    bench = [TRIMARAN, "bench", str(recipe)]
    first = subprocess.Popen(bench, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "runs/tiny").glob("store.sqlite.claims/machine-*")):
        assert first.poll() is None and time.monotonic() < deadline, first.stderr and first.stderr.read()
        time.sleep(0.02)
    first.send_signal(signal.SIGSTOP)
    said = tmp_path / "said"
    try:
        with said.open("w") as file:
            second = subprocess.Popen(bench, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=file)
        while "it is stopped" not in said.read_text():
            assert second.poll() is None and time.monotonic() < deadline, said.read_text()
            time.sleep(0.05)
        time.sleep(2)  # in which it asks again several times
    finally:
        first.send_signal(signal.SIGCONT)
    assert second.wait(timeout=90) == 0, said.read_text()
    _, shown = first.communicate(timeout=90)
    assert first.returncode == 0, shown
    told = said.read_text().splitlines()
    running = f"process {first.pid} on {platform.node()} measures in this store; waiting"
    stopped = f"{running}; it is stopped: continue it with fg, or end it"
    assert told.count(stopped) == 1 and told.count(running) <= 1, told
    assert any("kept from before" in line for line in told)


@pytest.mark.proof
def test_trials_without_time_for_their_steps_are_told_in_one_line_before_the_first(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, LAYOUTS[:2])
    text = recipe.read_text().replace("steps = 3\n", "steps = 100_000\ntimeout_s = 0.5\n")
    recipe.write_text(text.replace("_trials = 4", "_trials = 2"))
    told = "sweep.timeout_s 0.5 s is shorter than the 100000 steps of 2 of 2 trials are predicted to take, "
    for arguments, times in (("bench",), 1), (("bench",), 0), (("tune", "--no-train", "--retry", "timeout"), 1):
        done = run(*arguments, str(recipe), cwd=tmp_path)
        before, *_ = done.stderr.split("trial 1 of")
        assert done.returncode == 2 and done.stderr.count(told) == before.count(told) == times, done.stderr
        assert ("raise it or lower sweep.steps" in before) is bool(times)
    recipe.write_text(text.replace("steps = 100_000", "steps = 3").replace("timeout_s = 0.5", "timeout_s = 60"))
    assert "sweep.timeout_s" not in run("bench", str(recipe), cwd=tmp_path).stderr


@pytest.mark.proof
def test_a_killed_tuning_repeats_and_loses_no_finished_trial_and_then_trains(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, LAYOUTS)
    first = subprocess.Popen([TRIMARAN, "tune", str(recipe)], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while len(stored(tmp_path)) < 2:
        assert first.poll() is None and time.monotonic() < deadline, first.stderr and first.stderr.read()
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.wait()
    while processes_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_in(tmp_path) == [], "ranks end with the sweep that started them"
    before = stored(tmp_path)
    assert 2 <= len(before) < len(LAYOUTS)

    again = run("tune", str(recipe), "--format", "json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert len(json.loads(again.stdout)) == len(LAYOUTS), "the answer alone is on standard output"
    after = stored(tmp_path)
    assert after[: len(before)] == before and len(after) == len(LAYOUTS)
    assert again.stderr.count("kept from before") == len(before)
    assert "winner: " in again.stderr

    log = [json.loads(line) for line in (tmp_path / "runs/tiny/train/log.jsonl").read_text().splitlines()]
    assert len(log) == 12 and log[-1]["lm_loss"] < log[0]["lm_loss"]
    table = (tmp_path / "runs/tiny/table.md").read_text()
    assert "Sec/it predicted" in table and table.count("\n") == 2 + len(LAYOUTS)

    listed = run("report", "runs/tiny/store.sqlite", "--format", "json", cwd=tmp_path)
    assert [row["status"] for row in json.loads(listed.stdout)] == ["ok"] * len(LAYOUTS)


@pytest.mark.proof
def test_what_earlier_tunings_measured_or_failed_at_is_in_the_answer(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    planned = recipe.read_text().replace('layouts = ["dp1,mbs4"]', 'devices = [1]\nfixed = {recompute = "none"}')
    recipe.write_text(planned.replace("steps = 3", "steps = 100000\ntimeout_s = 1"))
    for _ in range(2):
        failed = run("tune", str(recipe), "--no-train", cwd=tmp_path)
        assert failed.returncode == 2 and "run again with --retry timeout" in failed.stderr, failed.stderr
    recipe.write_text(planned)
    first = run("tune", str(recipe), "--no-train", "--format", "json", cwd=tmp_path)
    again = run("tune", str(recipe), "--no-train", "--format", "json", cwd=tmp_path)
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    layouts = [sorted(row["layout"] for row in json.loads(one.stdout)) for one in (first, again)]
    assert layouts[0] == layouts[1] and len(layouts[0]) == 3
