"""Jobs run on while Slurm's controller is away, and so do the trials that wait for them."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from pathlib import Path
from typing import Literal

import pytest
from virtual_cluster import controller_away

from trial_helpers import fake_worker
from trimaran.bench.launch.slurm import queue, slurm_ranks
from trimaran.bench.launch.slurm.slurm_launcher import SlurmLauncher
from trimaran.bench.trial.trial import prepare_trial, run_trial
from trimaran.bench.watch.limits import Limits
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.slurm_settings import SlurmSettings
from trimaran.recipe.recipe import Recipe

PATIENT = Limits(timeout_s=120, start_s=60, hang_s=60, peers_s=1)


@pytest.fixture(autouse=True)
def soon_in_vain(slurm_conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's commands give up within some seconds, in place of ten to twenty."""
    conf = tmp_path / "slurm.conf"
    conf.write_text(f"{slurm_conf.read_text()}MessageTimeout=3\n")
    monkeypatch.setenv("SLURM_CONF", str(conf))


@pytest.mark.proof
@pytest.mark.parametrize(
    ("behaviour", "stop_at", "status"),
    [("ok", 1, "ok"), ("fail", 2, "fail")],
)
def test_a_trial_ends_as_it_would_while_the_controller_is_away(
    recipe: Recipe, two_nodes: Cluster, tmp_path: Path, slurm_conf: Path, monkeypatch: pytest.MonkeyPatch,
    behaviour: str, stop_at: int, status: str,
) -> None:  # fmt: skip
    """It goes on, and where a rank fails no node is said to be silent, since none could be asked."""
    monkeypatch.setenv("FAKE_STEP_S", "3")
    trial = prepare_trial(recipe, two_nodes, parse_layout("dp4"), data_dir=tmp_path, work_dir=tmp_path / "runs")
    with contextlib.ExitStack() as away, contextlib.closing(SlurmLauncher(SlurmSettings(submit="job"))) as launcher:
        start_again = threading.Timer(12.0, away.close)

        def stop(step: int) -> None:
            if step == stop_at:
                away.enter_context(controller_away(slurm_conf))
                start_again.start()

        launcher.restarts = 0
        try:
            row = run_trial(trial, launcher, PATIENT, worker=fake_worker(behaviour), on_step=stop)
        finally:
            start_again.join()
    assert row.status == status, row.evidence


@pytest.mark.proof
@pytest.mark.parametrize("submit", ["job", "allocation"])
def test_a_trial_begins_when_the_controller_is_there_again(
    recipe: Recipe, two_nodes: Cluster, tmp_path: Path, slurm_conf: Path, submit: Literal["job", "allocation"]
) -> None:
    """Its sweep ended with the first trial whose job was refused, though squeue and sacct were asked again."""
    trial = prepare_trial(recipe, two_nodes, parse_layout("dp4"), data_dir=tmp_path, work_dir=tmp_path / "runs")
    said: list[str] = []
    with contextlib.ExitStack() as away:
        away.enter_context(controller_away(slurm_conf))
        with contextlib.closing(SlurmLauncher(SlurmSettings(submit=submit), said.append)) as launcher:
            start_again = threading.Timer(5.0, away.close)
            start_again.start()
            try:
                launcher.expect(2)  # as every sweep and every training begins
                row = run_trial(trial, launcher, PATIENT, worker=fake_worker("ok"))
            finally:
                start_again.join()
    assert row.status == "ok", row.evidence
    assert [line for line in said if "controller" in line] == [
        "Slurm's controller is away: the job is submitted when it answers again"
    ]


@pytest.mark.proof
def test_a_controller_that_stays_away_is_the_reason_given(
    recipe: Recipe, two_nodes: Cluster, tmp_path: Path, slurm_conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not that its jobs cannot be cancelled either."""
    monkeypatch.setattr(queue, "_AWAY_WITHIN_S", 0.5)
    monkeypatch.setattr(slurm_ranks, "_GONE_WITHIN_S", 0.0)
    trial = prepare_trial(recipe, two_nodes, parse_layout("dp4"), data_dir=tmp_path, work_dir=tmp_path / "runs")
    with contextlib.ExitStack() as away:

        def stop(step: int) -> None:
            if step == 2:  # and no further one is made
                away.enter_context(controller_away(slurm_conf))

        with (
            pytest.raises(TrimaranError, match=r"^squeue refused: .*Unable to contact slurm controller"),
            contextlib.closing(SlurmLauncher(SlurmSettings(submit="job"))) as launcher,
        ):
            run_trial(trial, launcher, PATIENT, worker=fake_worker("hang"), on_step=stop)
    subprocess.run(["scancel", "--user=root"], check=True)  # its ranks end by themselves two minutes later
