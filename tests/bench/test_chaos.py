"""A sweep in which nearly everything goes wrong still ends, with the true status of every trial."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from trial_helpers import fake_worker, processes_that_name
from trimaran.bench import Limits, run_sweep
from trimaran.cluster import Cluster
from trimaran.notation import parse_layout
from trimaran.recipe import Recipe
from trimaran.store import Store

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


def test_a_sweep_where_nearly_everything_fails_ends_with_twenty_true_rows(
    recipe: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("mounting a small disk is not allowed here")
    behaviours = json.dumps({layout: behaviour for layout, (behaviour, _, _) in TRIALS.items()})
    limits = Limits(timeout_s=5, start_s=3, hang_s=2, peers_s=0.3, memory_gib=0.25, log_mib=4)
    try:
        # store and trials share the disk that one of the trials fills
        with Store(disk / "store.sqlite") as store:
            rows = run_sweep(
                recipe, cluster, [parse_layout(text) for text in TRIALS], store,
                data_dir=tmp_path, work_dir=disk / "runs", limits=limits, worker=fake_worker(behaviours),
            )  # fmt: skip
            assert store.measurements(every_attempt=True) == rows
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    seen = {layout: (row.status, row.evidence) for layout, row in zip(TRIALS, rows, strict=True)}
    for layout, (behaviour, status, words) in TRIALS.items():
        assert seen[layout][0] == status, (layout, behaviour, seen[layout])
        assert words in (seen[layout][1] or ""), (layout, behaviour, seen[layout])
    assert processes_that_name(str(tmp_path)) == []
