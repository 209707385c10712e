"""On racks of several hosts whoever starts ranks counts hosts; a trial is predicted on its part of the racks."""

from __future__ import annotations

from pathlib import Path

import pytest

from trial_helpers import LIMITS
from trimaran.bench.launch.contract import Launch, TrialRefusedError
from trimaran.bench.launch.local import LocalLauncher
from trimaran.bench.launch.ray.ray_launcher import bundle_of
from trimaran.bench.trial.trial import prepare_trial, run_trial
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.files.catalogue import load_cluster, load_model
from trimaran.layout.notation import parse_layout
from trimaran.recipe.recipe import Recipe
from trimaran.study.measure_recipe import predicted

RACKS = load_cluster("gb200-nvl72")


class Asked(LocalLauncher):
    """Keeps what it is asked to start, and starts nothing."""

    def start(self, launch: Launch) -> None:  # type: ignore[override]
        self.launch = launch
        raise TrialRefusedError("nothing is started here")


def test_ranks_are_asked_for_by_hosts_and_the_row_says_so(recipe: Recipe, tmp_path: Path) -> None:
    """Slurm was asked for 72 tasks and 72 GPUs of each node, which has 4."""
    whole = recipe.model_copy(update={"workload": recipe.workload.model_copy(update={"global_batch": 96})})
    launcher = Asked()
    trial = prepare_trial(whole, RACKS, parse_layout("dp96,mbs1,bf16"), data_dir=tmp_path, work_dir=tmp_path / "runs")
    row = run_trial(trial, launcher, LIMITS)
    assert row.status == "not_run" and row.evidence == "nothing is started here"
    assert [len(share) for share in launcher.launch.shares] == [4] * 24
    assert (row.nodes, row.devices_per_node, row.devices) == (24, 4, 96)
    assert bundle_of(RACKS) == {"GPU": 4.0}


def test_a_trial_is_predicted_on_its_part_of_each_rack(recipe: Recipe) -> None:
    """256 devices have the links of 64 of each of four racks: whole racks' made trials seem 6% faster than plans."""
    model = load_model("gpt3-175b")
    workload = recipe.workload.model_copy(update={"model": model, "seq_len": 2048, "global_batch": 16})
    layout = parse_layout("dp16,tp16,mbs1,bf16")
    told = predicted(recipe.model_copy(update={"workload": workload}), RACKS, [layout])[layout]
    case = Case.of(workload, RACKS, recipe.stack)
    assert told.sec_per_it == pytest.approx(estimate(case.on(RACKS.of_a_job(256)), layout).sec_per_it)
    assert told.sec_per_it > 1.05 * estimate(case, layout).sec_per_it
