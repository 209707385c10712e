"""Claims about modules, interpreters and containers on a real Slurm of two nodes."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from on_slurm import LIMITS, SUBMITS

from test_slurm_command import FAKE_MODULE
from trial_helpers import fake_worker
from trimaran.bench.launch.slurm.slurm_launcher import SlurmLauncher
from trimaran.bench.trial.trial import prepare_trial, run_trial
from trimaran.bench.watch.limits import Limits
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.slurm_settings import SlurmSettings
from trimaran.recipe.recipe import Recipe


def put_before_slurms_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, program: str) -> None:
    """A program that is found under the name of one of Slurm's instead of it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / name).write_text(program)
    (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")


def run_under(
    settings: SlurmSettings, recipe: Recipe, cluster: Cluster, folder: Path, limits: Limits = LIMITS
) -> Measurement:
    sweep = recipe.sweep.model_copy(update={"slurm": settings})
    stated = recipe.model_copy(update={"sweep": sweep})
    trial = prepare_trial(stated, cluster, parse_layout("dp4,mbs1"), data_dir=folder, work_dir=folder / "runs")
    with closing(SlurmLauncher(settings)) as launcher:
        return run_trial(trial, launcher, limits, worker=fake_worker("ok"))


def give_login_shells_modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`module` as a function of login shells alone, as a site's /etc/profile.d has it."""
    (folder / "home").mkdir()
    (folder / "home/.bash_profile").write_text(f"module {FAKE_MODULE}\n")
    monkeypatch.setenv("HOME", str(folder / "home"))


def seen(folder: Path) -> dict[str, str]:
    """What rank 0 saw of its environment."""
    (result,) = (folder / "runs").glob("*/result.json")
    saw: dict[str, str] = json.loads(result.read_text())["ranks_saw"]
    return saw


@pytest.mark.proof
@SUBMITS
def test_ranks_have_the_modules_and_the_interpreter_of_their_nodes(
    recipe: Recipe, two_nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, submit: str
) -> None:
    give_login_shells_modules(tmp_path, monkeypatch)
    python = tmp_path / "python-of-the-nodes"
    python.symlink_to(sys.executable)
    settings = SlurmSettings(submit=submit, modules=("cuda/12.4", "gcc/13"), python=str(python))
    row = run_under(settings, recipe, two_nodes, tmp_path)
    assert (row.status, row.nodes, row.libraries) == ("ok", 2, {}), row.evidence
    assert (seen(tmp_path)["A_VARIANT_HAS"], seen(tmp_path)["python"]) == ("cuda/12.4 gcc/13", str(python))


@pytest.mark.proof
@SUBMITS
def test_a_module_that_no_node_has_is_told_in_one_line(
    recipe: Recipe, two_nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, submit: str
) -> None:
    give_login_shells_modules(tmp_path, monkeypatch)
    row = run_under(SlurmSettings(submit=submit, modules=("nosuch/1",)), recipe, two_nodes, tmp_path)
    assert row.status == "fail"
    says = r"rank \d refused: module load nosuch/1 failed on node n[12]: no nosuch/1 \(modules of"
    assert re.match(says, row.evidence or ""), row.evidence


@pytest.mark.proof
@pytest.mark.parametrize("modules", [(), ("cuda/12.4",)], ids=["no modules", "modules"])
def test_an_interpreter_that_no_node_has_is_told_in_one_line(
    recipe: Recipe, two_nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules: tuple[str, ...]
) -> None:
    """Its ranks were taken for lost ones, whose watcher somebody had ended: the trial was run four times over."""
    give_login_shells_modules(tmp_path, monkeypatch)
    settings = SlurmSettings(submit="job", modules=modules, python="/nosuch/python")
    row = run_under(settings, recipe, two_nodes, tmp_path)
    assert row.status == "fail", row.evidence
    says = r"rank 0 refused: (srun: )?/nosuch/python.* \(python of \[sweep.slurm\]\)"
    assert re.match(says, (row.evidence or "").splitlines()[0]), row.evidence


@pytest.mark.proof
def test_nodes_that_cannot_be_held_for_want_of_the_interpreter_are_told_so(
    recipe: Recipe, two_nodes: Cluster, tmp_path: Path
) -> None:
    """It said to see whether a node was lost."""
    says = r"Slurm job \d+ cannot hold its nodes: /nosuch/python: .*; name an interpreter of theirs as python in"
    with pytest.raises(TrimaranError, match=says):
        run_under(SlurmSettings(python="/nosuch/python"), recipe, two_nodes, tmp_path)


@pytest.mark.proof
@SUBMITS
def test_a_folder_that_the_nodes_do_not_share_is_told(
    recipe: Recipe, two_nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, submit: str
) -> None:
    """What each step and job is told to start in and to write to is not there, on a disk of the login node's own."""
    hidden = HIDES.format(python=sys.executable, sbatch=shutil.which("sbatch"), runs=str(tmp_path / "runs"))
    put_before_slurms_own(monkeypatch, tmp_path, "sbatch", hidden)
    says = rf"see that (they|its nodes) have the folder {tmp_path}/runs, which all nodes must share"
    try:
        told = run_under(SlurmSettings(submit=submit), recipe, two_nodes, tmp_path).evidence or ""
    except TrimaranError as error:
        told = str(error)
    assert re.search(says, told), told


@pytest.mark.proof
@SUBMITS
def test_a_slurm_without_pyxis_is_told_in_one_line(
    recipe: Recipe, two_nodes: Cluster, tmp_path: Path, submit: str
) -> None:
    settings = SlurmSettings(submit=submit, container_image="trimaran:1", python="/usr/bin/python3")
    row = run_under(settings, recipe, two_nodes, tmp_path)
    assert row.status == "fail", row.evidence
    says = "rank 0 refused: srun: unrecognized option '--container-image=trimaran:1' (container_image of [sweep.slurm])"
    assert (row.evidence or "").splitlines()[0] == says


# Stands before the real sbatch: nodes are told of another folder than the one that is here, as where each has its own.
HIDES = """#!{python}
import os, sys
os.execv({sbatch!r}, [word.replace({runs!r}, "/nosuch/runs") for word in sys.argv])
"""
# Stands before the real srun as Pyxis does: takes the options of a container, and looks for what is to be mounted.
PYXIS = """#!{python}
import os, sys
rest = []
for word in sys.argv[1:]:
    if word.startswith("--container-mounts="):
        sources = [mount.split(":")[0] for mount in word.partition("=")[2].split(",")]
        if lacking := [path for path in sources if not os.path.exists(path)]:
            sys.exit(f"slurmstepd: error: pyxis: no such file: {{lacking[0]}}")
    elif word.startswith("--container-image="):
        rest.append(f"--export=ALL,A_VARIANT_IMAGE={{word.partition('=')[2]}}")
    else:
        rest.append(word)
os.execv({srun!r}, [{srun!r}, *rest])
"""


@pytest.mark.proof
def test_ranks_of_a_container_find_what_is_mounted(
    recipe: Recipe, two_nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyxis = PYXIS.format(python=sys.executable, srun=shutil.which("srun"))
    put_before_slurms_own(monkeypatch, tmp_path, "srun", pyxis)
    settings = SlurmSettings(container_image="trimaran:1", python=sys.executable)
    row = run_under(settings, recipe, two_nodes, tmp_path)
    assert row.status == "ok", row.evidence
    assert seen(tmp_path)["A_VARIANT_IMAGE"] == "trimaran:1"
    shutil.rmtree(tmp_path / "runs")
    lacking = settings.model_copy(update={"container_mounts": ("/nosuch:/nosuch",)})
    row = run_under(lacking, recipe, two_nodes, tmp_path)
    assert (row.evidence or "").startswith("rank 0 refused: srun: no such file: /nosuch (container_image of")


@pytest.mark.proof
@SUBMITS
def test_an_image_that_is_fetched_for_long_is_no_hang_of_its_trial(
    recipe: Recipe, two_nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, submit: str
) -> None:
    """Ranks that were not there yet were taken for silent ones, whose nodes did not answer."""
    slow = PYXIS.replace("rest = []", "import time; time.sleep(6); rest = []")
    slow = slow.format(python=sys.executable, srun=shutil.which("srun"))
    put_before_slurms_own(monkeypatch, tmp_path, "srun", slow)
    settings = SlurmSettings(submit=submit, container_image="trimaran:1", python=sys.executable)
    row = run_under(settings, recipe, two_nodes, tmp_path, replace(LIMITS, start_s=2))
    assert row.status == "ok", row.evidence
    assert row.wall_s is not None and row.wall_s < 6, "it is no time of the trial"
