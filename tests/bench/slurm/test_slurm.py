"""Claims about sweeps on a real Slurm of two nodes: what Slurm runs ends as what runs here, and leaves nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from on_slurm import LIMITS, SUBMITS, Run, squeue
from pydantic import ValidationError

from trial_helpers import fake_worker
from trimaran.bench.launch.slurm.node import node_file
from trimaran.bench.launch.slurm.slurm_launcher import SlurmLauncher
from trimaran.bench.launchers import launcher_of
from trimaran.bench.sweep import run_sweep
from trimaran.bench.trial.trial import prepare_trial, run_trial
from trimaran.bench.watch.limits import Limits
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.slurm_settings import SlurmSettings
from trimaran.recipe.recipe import Recipe
from trimaran.store import Store
from trimaran.study.workspace import Workspace


@pytest.mark.proof
@pytest.mark.timeout(900)  # a busy machine loads PyTorch slowly
@pytest.mark.parametrize("submit", ["allocation", "job"])
def test_two_nodes_train_for_real_through_sbatch(
    trainable: Recipe, two_nodes: Cluster, tmp_path: Path, submit: str
) -> None:
    slurm = SlurmSettings(submit=submit, time_limit_min=10)
    real = trainable.model_copy(update={"sweep": trainable.sweep.model_copy(update={"slurm": slurm})})
    workspace = Workspace(tmp_path)
    layouts = [parse_layout("dp2,pp2,mbs2"), parse_layout("dp1,mbs4")]
    with Store(workspace.store) as store, launcher_of(real.sweep, two_nodes) as launcher:
        rows = run_sweep(
            real, two_nodes, layouts, store, data_dir=workspace.data(real), work_dir=workspace.trials,
            launcher=launcher, limits=Limits(timeout_s=250),
        )  # fmt: skip
    for row in rows:
        assert row.status == "ok", row.evidence
        assert len(row.step_times_s) == 6
    assert [row.nodes for row in rows] == [2, 1]
    assert rows[0].losses == pytest.approx(rows[1].losses, rel=1e-4), "the loss is the same on every layout"


@pytest.mark.parametrize(
    ("behaviour", "submit", "status", "says"),
    [
        ("ok", "allocation", "ok", None),
        ("fail", "job", "fail", "rank 3 left with status 1: ValueError: the data has run out"),
        *(pytest.param(*end, marks=pytest.mark.proof) for end in (
            ("oom", "job", "oom", "rank 3 ran out of memory: DefaultCPUAllocator: can't allocate memory"),
            ("segfault", "allocation", "crash", "rank 3 was killed by SIGSEGV"),
            ("hang", "allocation", "hang", r"rank \d gave no sign for [\d.]+ s after step 2"),
            ("hang", "job", "hang", r"rank \d gave no sign for [\d.]+ s after step 2"),
            ("leave-children", "allocation", "ok", None),
        )),
    ],
)  # fmt: skip
def test_every_end_on_slurm_has_its_status_and_its_reason(
    run_on_slurm: Run, behaviour: str, submit: str, status: str, says: str | None
) -> None:
    row = run_on_slurm(behaviour, submit)
    assert row.status == status, row.evidence
    if says is not None:
        assert re.search(says, (row.evidence or "").splitlines()[0])
    if status == "hang":
        # a rank that was slower than the others may not have come so far
        assert (row.evidence or "").count("most recent call first") == 4, row.evidence
        assert (row.evidence or "").count("in sleep_for_ever") >= 2, row.evidence


def test_ranks_are_laid_on_nodes_in_blocks(run_on_slurm: Run, tmp_path: Path) -> None:
    row = run_on_slurm("ok", layout="dp2,tp1,pp2,mbs1")
    (result,) = (tmp_path / "runs").glob("*/result.json")
    saw = json.loads(result.read_text())["ranks_saw"]
    assert (row.status, row.nodes) == ("ok", 2), row.evidence
    assert (saw["LOCAL_RANK"], saw["LOCAL_WORLD_SIZE"], saw["MASTER_ADDR"]) == ("0", "2", "127.0.0.1")
    assert saw["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.proof
def test_ranks_have_the_sweeps_environment_in_a_job_that_was_given_none(
    run_on_slurm: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind `#SBATCH --export=NONE`: rows said what tunes ranks, and these had none of it."""
    monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")
    monkeypatch.setenv("A_VARIANT_OF_THE_SHELL", "told")
    assert run_on_slurm("ok").status == "ok"
    (result,) = tmp_path.rglob("result.json")
    assert json.loads(result.read_text())["ranks_saw"]["A_VARIANT_OF_THE_SHELL"] == "told"


@pytest.mark.proof
def test_ranks_are_on_the_nodes_that_they_are_placed_on(run_on_slurm: Run, tmp_path: Path) -> None:
    row = run_on_slurm("ok", layout="dp2,tp1,pp2,mbs1,on3.0.2.1")
    (result,) = (tmp_path / "runs").glob("*/result.json")
    saw = json.loads(result.read_text())["ranks_saw"]
    assert (row.status, row.nodes) == ("ok", 2), row.evidence
    assert (saw["LOCAL_RANK"], saw["LOCAL_WORLD_SIZE"]) == ("1", "2"), "rank 0 is on the second device of its node"
    nodes = [node_file(result.parent, rank).read_text() for rank in range(4)]
    assert nodes[0] == nodes[2] > nodes[1] == nodes[3]


@pytest.mark.proof
def test_trials_run_side_by_side_on_an_array(recipe: Recipe, two_nodes: Cluster, tmp_path: Path) -> None:
    layouts = [parse_layout(text) for text in ("dp1,mbs1", "dp1,mbs2", "dp2,mbs1", "tp2,mbs1")]
    settings = SlurmSettings(at_once=2, partition="main", time_limit_min=5)
    seen: list[str] = []
    with Store(tmp_path / "store.sqlite") as store, closing(SlurmLauncher(settings)) as launcher:
        rows = run_sweep(
            recipe, two_nodes, layouts, store, data_dir=tmp_path, work_dir=tmp_path / "runs", launcher=launcher,
            limits=LIMITS, worker=fake_worker("ok"), on_progress=lambda progress: seen.extend(squeue()),
        )  # fmt: skip
        assert store.measurements() == sorted(rows, key=lambda row: store.measurements().index(row))
    assert [row.status for row in rows] == ["ok"] * 4, [row.evidence for row in rows]
    assert {line.split()[0].split("_")[1] for line in seen if "RUNNING" in line} == {"0", "1"}


@pytest.mark.proof
def test_a_sweep_inside_a_job_uses_that_job(recipe: Recipe, two_nodes: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "sweep.py"
    (tmp_path / "recipe.json").write_text(recipe.model_dump_json())
    (tmp_path / "cluster.json").write_text(two_nodes.model_dump_json())
    script.write_text(
        "#!/usr/bin/env python3\n"
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from pathlib import Path\n"
        "from trial_helpers import LIMITS, fake_worker\n"
        "from contextlib import closing\n"
        "from trimaran.bench.sweep import run_sweep\n"
        "from trimaran.bench.launch.slurm.slurm_launcher import SlurmLauncher\n"
        "from trimaran.nouns.cluster import Cluster\nfrom trimaran.layout.notation import parse_layout\n"
        "from trimaran.recipe.recipe import Recipe\n"
        "from trimaran.nouns.slurm_settings import SlurmSettings\nfrom trimaran.store import Store\n"
        "folder = Path(sys.argv[1])\n"
        "with closing(SlurmLauncher(SlurmSettings(at_once=3))) as launcher:\n"
        "    rows = run_sweep(Recipe.model_validate_json((folder / 'recipe.json').read_text()),\n"
        "        Cluster.model_validate_json((folder / 'cluster.json').read_text()),\n"
        "        [parse_layout('dp4,mbs1'), parse_layout('dp2,mbs1')], Store(folder / 'store.sqlite'),\n"
        "        data_dir=folder, work_dir=folder / 'runs', launcher=launcher, limits=LIMITS,\n"
        "        worker=fake_worker('ok'))\n"
        "print([row.status for row in rows], [row.evidence for row in rows])\n"
    )
    done = subprocess.run(
        ["sbatch", "--wait", "--nodes=2", "--exclusive", f"--output={tmp_path}/out", "--wrap",
         f"{sys.executable} {script} {tmp_path}"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, (tmp_path / "out").read_text()
    assert (tmp_path / "out").read_text() == "['ok', 'ok'] [None, None]\n"


def test_a_job_that_is_too_small_is_told_so(run_on_slurm: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    with pytest.raises(TrimaranError, match="a layout needs 2 nodes, this Slurm job has 1: ask sbatch for --nodes=2"):
        run_on_slurm("ok")


def test_a_layout_larger_than_the_partition_is_refused_before_the_first_trial(
    recipe: Recipe, two_nodes: Cluster, tmp_path: Path
) -> None:
    larger = two_nodes.model_copy(update={"nodes": 4})
    with Store(tmp_path / "store.sqlite") as store, closing(SlurmLauncher(SlurmSettings())) as launcher:
        with pytest.raises(TrimaranError, match="a layout needs 4 nodes, Slurm's partition main gives 2 at most"):
            run_sweep(
                recipe, larger, [parse_layout("dp1,mbs1"), parse_layout("dp8,mbs1")], store, data_dir=tmp_path,
                work_dir=tmp_path / "runs", launcher=launcher, limits=LIMITS, worker=fake_worker("ok"),
            )  # fmt: skip
        assert store.measurements() == []
    assert not (tmp_path / "runs").exists()


def test_a_recipe_without_a_partition_counts_the_nodes_of_the_one_that_sbatch_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher = SlurmLauncher(SlurmSettings())
    assert (launcher.nodes_left(), launcher.has_nodes(3)) == (2, False)
    with pytest.raises(TrimaranError, match="Slurm's partition main gives 2 at most"):
        launcher.expect(3)
    monkeypatch.setenv("SBATCH_PARTITION", "wide")
    assert (launcher.nodes_left(), launcher.has_nodes(3)) == (3, True)
    launcher.expect(3)


def test_a_sweep_asks_for_its_largest_size_and_keeps_that_allocation(
    recipe: Recipe, two_nodes: Cluster, tmp_path: Path
) -> None:
    seen: set[str] = set()
    with Store(tmp_path / "store.sqlite") as store, closing(SlurmLauncher(SlurmSettings())) as launcher:
        rows = run_sweep(
            recipe, two_nodes, [parse_layout("dp1,mbs1"), parse_layout("dp4,mbs1")], store, data_dir=tmp_path,
            work_dir=tmp_path / "runs", launcher=launcher, limits=LIMITS, worker=fake_worker("ok"),
            on_progress=lambda progress: seen.update(line.split()[0] for line in squeue() if "RUNNING" in line),
        )  # fmt: skip
    assert [row.status for row in rows] == ["ok", "ok"], [row.evidence for row in rows]
    assert len(seen) == 1


def test_ranks_of_srun_meet_where_slurm_reaches_their_nodes_without_a_name_service(tmp_path: Path) -> None:
    look = "import os; from trimaran.bench.launch.joined import joined; print(dict(joined(os.environ).environment))"
    done = subprocess.run(
        ["srun", "--nodes=2", "--ntasks=2", sys.executable, "-c", look],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'MASTER_ADDR': '127.0.0.1'") == done.stdout.count("'GLOO_SOCKET_IFNAME': 'lo'") == 2


@SUBMITS
@pytest.mark.parametrize(
    ("settings", "says"),
    [({"partition": "nosuch"}, "nosuch|partition"), ({"constraint": "nosuch"}, "feature|BadConstraints"),
     ({"time_limit_min": 600}, "can never start|time limit")],
)  # fmt: skip
def test_what_slurm_can_never_give_is_told_in_one_line(
    recipe: Recipe, two_nodes: Cluster, tmp_path: Path, submit: str, settings: dict[str, object], says: str
) -> None:
    trial = prepare_trial(recipe, two_nodes, parse_layout("dp4"), data_dir=tmp_path, work_dir=tmp_path / "runs")
    with (
        closing(SlurmLauncher(SlurmSettings(submit=submit, **settings))) as launcher,
        pytest.raises(TrimaranError, match=rf"(?i)({says}).*\[sweep.slurm\]"),
    ):
        run_trial(trial, launcher, LIMITS, worker=fake_worker("ok"))


@pytest.mark.parametrize("word", ["main --wrap=id", "$(id)", "main;id", "-p other", "a\nb", ""])
def test_hostile_words_of_a_sweep_file_are_refused(word: str) -> None:
    for field in ("partition", "account", "constraint"):
        with pytest.raises(ValidationError):
            SlurmSettings(**{field: word})
