"""A sweep in which nearly everything goes wrong still ends, with the true status of every trial."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import pytest

from small_disk import mounted
from trial_helpers import LIMITS, fake_worker, processes_that_name
from trimaran.bench.launch import local
from trimaran.bench.sweep import run_sweep
from trimaran.bench.watch.limits import Limits
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.recipe.recipe import Recipe
from trimaran.store import Store
from trimaran.study.workspace import Workspace

# layout: (what its ranks do, the status it must get, words of its evidence)
TRIALS = {
    "dp1,tp1,pp1,mbs1": ("ok", "ok", ""),
    "dp1,tp1,pp1,mbs2": ("segfault", "crash", "SIGSEGV"),
    "dp1,tp1,pp1,mbs4": ("eat", "oom", "limit is 0.25 GiB"),
    "dp1,tp1,pp1,mbs8": ("garbage", "fail", "garbage"),
    "dp2,tp1,pp1,mbs1": ("hang", "hang", "in sleep_for_ever"),
    "dp2,tp1,pp1,mbs2": ("fill-disk", "fail", "no space is left on the disk"),
    "dp2,tp1,pp1,mbs4": ("ok", "ok", ""),
    "dp4,tp1,pp1,mbs1": ("killed", "crash", "SIGKILL"),
    "dp4,tp1,pp1,mbs2": ("oom", "oom", "can't allocate memory"),
    "dp1,tp2,pp1,mbs1": ("ok", "ok", ""),
    "dp1,tp2,pp1,mbs2": ("flood", "fail", "of output"),
    "dp1,tp2,pp1,mbs4": ("bad_alloc", "oom", "bad_alloc"),
    "dp1,tp2,pp1,mbs8": ("slow", "timeout", "time limit"),
    "dp1,tp4,pp1,mbs1": ("ok", "ok", ""),
    "dp1,tp1,pp2,mbs1": ("fail", "fail", "the data has run out"),
    "dp1,tp1,pp2,mbs2": ("ok", "ok", ""),
    "dp1,tp1,pp2,mbs4": ("no-result", "fail", "cannot be read"),
    "dp1,tp1,pp4,mbs1": ("ok", "ok", ""),
    "dp2,tp2,pp1,mbs1": ("silent", "hang", "before its first step"),
    "dp2,tp1,pp2,mbs1": ("ok", "ok", ""),
}


def test_a_trial_that_fills_the_disk_leaves_room_for_the_rest_of_its_sweep(
    recipe: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    behaviours = {"dp1,tp1,pp1,mbs1": "fill-disk", "dp1,tp1,pp1,mbs2": "ok"}
    with mounted(tmp_path / "disk", "24m") as disk, Store(disk / "store.sqlite") as store:
        rows = run_sweep(
            recipe, cluster, [parse_layout(text) for text in behaviours], store, data_dir=tmp_path,
            work_dir=disk / "runs", limits=LIMITS, worker=fake_worker(json.dumps(behaviours)),
        )  # fmt: skip
        assert store.measurements() == rows
    assert [row.status for row in rows] == ["fail", "ok"]
    assert "junk of" in (rows[0].evidence or "")


@pytest.mark.proof
def test_a_sweep_where_nearly_everything_fails_ends_with_twenty_true_rows(
    recipe: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    behaviours = json.dumps({layout: behaviour for layout, (behaviour, _, _) in TRIALS.items()})
    limits = Limits(timeout_s=8, start_s=3, hang_s=4, peers_s=0.3, memory_gib=0.25, log_mib=4)
    # store and trials share the disk that one of the trials fills
    with mounted(tmp_path / "disk", "24m") as disk, Store(disk / "store.sqlite") as store:
        rows = run_sweep(
            recipe, cluster, [parse_layout(text) for text in TRIALS], store,
            data_dir=tmp_path, work_dir=disk / "runs", limits=limits, worker=fake_worker(behaviours),
        )  # fmt: skip
        assert store.measurements(every_attempt=True) == rows
    seen = {layout: (row.status, row.evidence) for layout, row in zip(TRIALS, rows, strict=True)}
    for layout, (behaviour, status, words) in TRIALS.items():
        assert seen[layout][0] == status, (layout, behaviour, seen[layout])
        assert words in (seen[layout][1] or ""), (layout, behaviour, seen[layout])
    assert processes_that_name(str(tmp_path)) == []


# layout: (what is wrong with the real trainer, its status, words of its evidence)
SABOTAGED = {
    "dp1,tp1,pp1,mbs1": ("", "ok", ""),
    "dp2,tp1,pp1,mbs1": ("hang", "hang", "in sleep_in_a_collective"),
    "dp2,tp1,pp1,mbs2": ("", "ok", ""),
    "dp2,tp1,pp1,mbs4": ("killed", "crash", "SIGKILL"),
    "dp1,tp2,pp1,mbs1": ("hang", "hang", "in sleep_in_a_collective"),
    "dp1,tp2,pp1,mbs2": ("", "ok", ""),
    "dp1,tp2,pp1,mbs4": ("eat", "oom", "limit is 1.50 GiB"),
    "dp1,tp2,pp1,mbs8": ("", "ok", ""),
    "dp1,tp1,pp2,mbs1": ("hang", "hang", "in sleep_in_a_collective"),
    "dp1,tp1,pp2,mbs2": ("", "ok", ""),
    "dp1,tp1,pp2,mbs4": ("segfault", "crash", "SIGSEGV"),
    "dp1,tp1,pp1,mbs2": ("garbage", "fail", "garbage"),
    "dp1,tp1,pp1,mbs4": ("fill-disk", "fail", "no space"),
    "dp1,tp1,pp1,mbs8": ("", "ok", ""),
    "dp4,tp1,pp1,mbs1": ("killed", "crash", "SIGKILL"),
    "dp2,tp2,pp1,mbs1": ("hang-first", "hang", "in its first step"),
    "dp2,tp1,pp2,mbs1": ("", "ok", ""),
    "dp1,tp2,pp2,mbs2": ("segfault", "crash", "SIGSEGV"),
    "dp1,tp4,pp1,mbs1": ("", "ok", ""),
    "dp1,tp1,pp4,mbs1": ("", "ok", ""),
}


@pytest.mark.proof
@pytest.mark.timeout(1200)
def test_real_ranks_that_die_hang_and_fill_everything_cost_a_sweep_little_and_are_all_told_apart(
    trainable: Recipe, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Workspace(tmp_path / "place").data(trainable)
    limits = Limits(timeout_s=500, memory_gib=1.5)
    wrong = json.dumps({layout: sabotage for layout, (sabotage, _, _) in SABOTAGED.items()})
    worker = (str(Path(__file__).with_name("sabotaged_worker.py")), wrong)
    monkeypatch.setattr(local, "TRAINER", worker)  # whose ranks are forked
    began = time.monotonic()
    with mounted(tmp_path / "disk", "64m") as disk, Store(disk / "store.sqlite") as store:
        rows = run_sweep(
            trainable, cluster, [parse_layout(text) for text in SABOTAGED], store, data_dir=data,
            work_dir=disk / "runs", limits=limits, worker=(sys.executable, *worker),
        )  # fmt: skip
        assert store.measurements(every_attempt=True) == rows
    wall_s = time.monotonic() - began
    for row, (layout, (sabotage, status, words)) in zip(rows, SABOTAGED.items(), strict=True):
        assert row.status == status, (layout, sabotage, row.evidence)
        assert words.lower() in (row.evidence or "").lower(), (layout, sabotage, row.evidence)
    assert processes_that_name(str(tmp_path)) == []
    # had all been healthy
    healthy_s = len(rows) * statistics.mean(row.wall_s or 0.0 for row in rows if row.status == "ok")
    # a hang is known after three of its start-ups or steps, any other end of a rank after peers_s
    detection_s = sum(
        3 * healthy_s / len(rows) + limits.hang_s if row.status == "hang" else limits.peers_s + 1.0
        for row in rows
        if row.status != "ok"
    )
    assert wall_s < 1.5 * healthy_s + detection_s, (wall_s, healthy_s, detection_s)
