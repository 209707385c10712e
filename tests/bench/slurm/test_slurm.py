"""Claims about sweeps on a real Slurm of two nodes: what Slurm runs ends as what runs here, and leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import ValidationError
from virtual_cluster import killed_node

from command import tiny_recipe
from trial_helpers import fake_worker, processes_that_name
from trimaran.bench.launch.slurm import slurm_ranks
from trimaran.bench.launch.slurm.slurm_launcher import SlurmLauncher
from trimaran.bench.launchers import launcher_of
from trimaran.bench.sweep import run_sweep
from trimaran.bench.trial.trial import prepare_trial, run_trial
from trimaran.bench.watch.limits import Limits
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.slurm_settings import SlurmSettings
from trimaran.recipe.data_settings import DataSettings
from trimaran.recipe.recipe import Recipe
from trimaran.store import Store
from trimaran.study.workspace import Workspace

Run = Callable[..., Measurement]
LIMITS = Limits(timeout_s=60, start_s=30, hang_s=3, peers_s=1)
SUBMITS = pytest.mark.parametrize("submit", ["allocation", "job"])


def squeue() -> list[str]:
    done = subprocess.run(["squeue", "--noheader", "--format=%i %T"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.fixture(autouse=True)
def nothing_is_left(in_slurm: None, tmp_path: Path) -> Iterator[None]:
    yield
    deadline = time.monotonic() + 20
    while (squeue() or processes_that_name(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert squeue() == []
    assert processes_that_name(str(tmp_path)) == []


@pytest.fixture
def run_on_slurm(recipe: Recipe, two_nodes: Cluster, tmp_path: Path) -> Run:
    """One trial of the fake worker on four ranks of two nodes."""

    def run(behaviour: str, submit: str = "allocation", layout: str = "dp4,mbs1", **limits: float) -> Measurement:
        trial = prepare_trial(recipe, two_nodes, parse_layout(layout), data_dir=tmp_path, work_dir=tmp_path / "runs")
        sweep = recipe.sweep.model_copy(update={"slurm": SlurmSettings(submit=submit)})
        with launcher_of(sweep, two_nodes) as launcher:
            return run_trial(trial, launcher, Limits(**{**vars(LIMITS), **limits}), worker=fake_worker(behaviour))

    return run


@pytest.mark.timeout(900)  # a busy machine loads PyTorch slowly
@pytest.mark.parametrize("submit", ["allocation", pytest.param("job", marks=pytest.mark.proof)])
def test_two_nodes_train_for_real_through_sbatch(
    recipe: Recipe, two_nodes: Cluster, tmp_path: Path, submit: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 2000)
    model = recipe.workload.model.model_copy(update={"vocab": 384})
    real = recipe.model_copy(
        update={
            "data": DataSettings(paths=(str(text),), tokenizer="bytes"),
            "workload": recipe.workload.model_copy(update={"model": model}),
            "sweep": recipe.sweep.model_copy(update={"slurm": SlurmSettings(submit=submit, time_limit_min=10)}),
        }
    )
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
        ("oom", "job", "oom", "rank 3 ran out of memory: DefaultCPUAllocator: can't allocate memory"),
        ("segfault", "allocation", "crash", "rank 3 was killed by SIGSEGV"),
        ("fail", "job", "fail", "rank 3 left with status 1: ValueError: the data has run out"),
        ("hang", "allocation", "hang", r"rank \d gave no sign for [\d.]+ s after step 2"),
        pytest.param("hang", "job", "hang", r"rank \d gave no sign for [\d.]+ s after step 2", marks=pytest.mark.proof),
        ("leave-children", "allocation", "ok", None),
    ],
)
def test_every_end_on_slurm_has_its_status_and_its_reason(
    run_on_slurm: Run, behaviour: str, submit: str, status: str, says: str | None
) -> None:
    row = run_on_slurm(behaviour, submit)
    assert row.status == status, row.evidence
    if says is not None:
        assert re.search(says, (row.evidence or "").splitlines()[0])
    if status == "hang":
        assert (row.evidence or "").count("in sleep_for_ever") == 4, row.evidence


def test_ranks_are_laid_on_nodes_in_blocks(run_on_slurm: Run, tmp_path: Path) -> None:
    row = run_on_slurm("ok", layout="dp2,tp1,pp2,mbs1")
    (result,) = (tmp_path / "runs").glob("*/result.json")
    saw = json.loads(result.read_text())["ranks_saw"]
    assert (row.status, row.nodes) == ("ok", 2), row.evidence
    assert (saw["LOCAL_RANK"], saw["LOCAL_WORLD_SIZE"], saw["MASTER_ADDR"]) == ("0", "2", "127.0.0.1")
    assert saw["GLOO_SOCKET_IFNAME"] == "lo"


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
        ["srun", "--nodes=2", "--ntasks=2", sys.executable, "-c", look], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'MASTER_ADDR': '127.0.0.1'") == done.stdout.count("'GLOO_SOCKET_IFNAME': 'lo'") == 2


def test_sigterm_ends_a_training_that_waits_in_the_queue(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("[train]", "[sweep.slurm]\n[train]"))
    blocker = ["sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 300"]
    number = subprocess.run(blocker, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.strip()
    waiting = subprocess.Popen(
        [str(Path(sys.executable).with_name("trimaran")), "train", str(recipe), "--layout", "dp1,mbs4"],
        cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert waiting.stderr is not None
        while "waits (" not in (line := waiting.stderr.readline()):
            assert line, "it ended before it waited"
        waiting.send_signal(signal.SIGTERM)
        told = waiting.communicate(timeout=30)[1]
        assert waiting.returncode == 75, told
        assert "stopped before its ranks were started" in told
        assert [line.split()[0] for line in squeue() if "COMPLETING" not in line] == [number]
    finally:
        waiting.kill()
        subprocess.run(["scancel", number], check=True)


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


@pytest.mark.proof
@SUBMITS
def test_a_job_that_is_taken_away_is_run_again_where_asked(
    recipe: Recipe, two_nodes: Cluster, tmp_path: Path, submit: str
) -> None:
    trial = prepare_trial(recipe, two_nodes, parse_layout("dp4"), data_dir=tmp_path, work_dir=tmp_path / "runs")
    starts = tmp_path / "starts"
    starts.touch()

    def cancel_the_first(step: int) -> None:
        if starts.stat().st_size == 0:
            starts.write_text("one")
            (number,) = {line.split()[0] for line in squeue() if "RUNNING" in line}
            subprocess.run(["scancel", number], check=True)

    for requeue, status in ((False, "lost"), (True, "ok")):
        starts.write_text("")
        with closing(SlurmLauncher(SlurmSettings(submit=submit, requeue=requeue))) as launcher:
            row = run_trial(trial, launcher, LIMITS, worker=fake_worker("ok-slowly"), on_step=cancel_the_first)
        assert row.status == status, row.evidence
        if status == "lost":
            assert "Slurm ended job" in (row.evidence or "")


def processes_of_node(name: str, folder: Path) -> list[int]:
    """The ranks of a trial under `folder` that run on a node, and their parents."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            on_node = f"SLURMD_NODENAME={name}\0".encode() in file.read_bytes()
            if on_node and str(folder).encode() in (file.parent / "cmdline").read_bytes():
                found.append(int(file.parent.name))
    return found


@pytest.mark.proof
@SUBMITS
def test_a_node_that_freezes_is_told_from_a_hang_and_its_trial_run_again(
    recipe: Recipe, two_nodes: Cluster, tmp_path: Path, submit: str
) -> None:
    trial = prepare_trial(recipe, two_nodes, parse_layout("dp4"), data_dir=tmp_path, work_dir=tmp_path / "runs")
    frozen: list[int] = []

    def freeze(step: int) -> None:
        if not frozen:
            frozen.extend(processes_of_node("n2", tmp_path))
            for process in frozen:
                os.kill(process, signal.SIGSTOP)

    for restarts, status in ((0, "lost"), (1, "ok")):
        frozen.clear()
        with closing(SlurmLauncher(SlurmSettings(submit=submit))) as launcher:
            launcher.restarts = restarts
            row = run_trial(trial, launcher, LIMITS, worker=fake_worker("ok-slowly"), on_step=freeze)
        assert len(frozen) >= 4
        assert row.status == status, row.evidence
        if status == "lost":
            assert (row.evidence or "").startswith("node n2 of rank 2, 3 does not answer (Slurm job ")


@pytest.mark.proof
def test_a_node_that_dies_is_named_and_left_out_of_the_next_allocation(
    recipe: Recipe, two_nodes: Cluster, tmp_path: Path, slurm_conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks leave no status, and those of the other node fail for want of them long before Slurm knows."""
    monkeypatch.setattr(slurm_ranks, "_SEEN_WITHIN_S", 4.0)
    trial = prepare_trial(recipe, two_nodes, parse_layout("dp4"), data_dir=tmp_path, work_dir=tmp_path / "runs")
    limits = Limits(timeout_s=60, start_s=30, hang_s=20, peers_s=1)
    with contextlib.ExitStack() as stack:
        launcher = stack.enter_context(closing(SlurmLauncher(SlurmSettings(partition="wide"))))
        dead: list[str] = []

        def power_off(step: int) -> None:
            if not dead:
                dead.append("n2")
                stack.enter_context(killed_node(slurm_conf, "n2"))

        launcher.restarts = 0
        row = run_trial(trial, launcher, limits, worker=fake_worker("meet"), on_step=power_off)
        assert row.status == "lost", row.evidence
        evidence = row.evidence or ""
        assert evidence.startswith("node n2 of rank 2, 3 does not answer (Slurm job ")
        assert "rank 3: was on node n2, and nothing answers for it" in evidence
        row = run_trial(trial, launcher, limits, worker=fake_worker("meet"))
        assert row.status == "ok", row.evidence
        nodes = {(Path(trial.job.out_dir) / f"node.{rank}").read_text() for rank in range(4)}
        assert nodes == {"n1", "n3"}


@pytest.mark.proof
def test_a_stopped_rank_on_another_node_is_named(recipe: Recipe, two_nodes: Cluster, tmp_path: Path) -> None:
    trial = prepare_trial(recipe, two_nodes, parse_layout("dp4"), data_dir=tmp_path, work_dir=tmp_path / "runs")

    def stop_rank_3(step: int) -> None:
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                at_rank_3 = b"\0RANK=3\0" in file.read_bytes()
                if at_rank_3 and str(tmp_path).encode() in (file.parent / "cmdline").read_bytes():
                    os.kill(int(file.parent.name), signal.SIGSTOP)

    with closing(SlurmLauncher(SlurmSettings())) as launcher:
        limits = Limits(timeout_s=60, start_s=30, hang_s=1, peers_s=1)
        row = run_trial(trial, launcher, limits, worker=fake_worker("ok-slowly"), on_step=stop_rank_3)
    assert row.status == "hang", row.evidence
    assert (row.evidence or "").startswith("rank 3 is stopped; rank 3 gave no sign for")


@pytest.mark.proof
@pytest.mark.parametrize(
    ("victim", "says"),
    [
        ("node.py rank", "what watches rank 3 on node n2 was ended"),
        ("srun", "srun, which stands for the ranks, was ended by signal 9"),
    ],
)
def test_what_serves_the_ranks_is_no_part_of_the_layout(
    recipe: Recipe, two_nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, says: str
) -> None:
    monkeypatch.setattr(slurm_ranks, "_SEEN_WITHIN_S", 4.0)
    trial = prepare_trial(recipe, two_nodes, parse_layout("dp4"), data_dir=tmp_path, work_dir=tmp_path / "runs")
    killed: list[int] = []

    def kill(step: int) -> None:
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                command = (file.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                at_rank_3 = victim == "srun" or b"SLURM_PROCID=3\0" in file.read_bytes()
                if not killed and at_rank_3 and victim in command and str(tmp_path) in command:
                    killed.append(int(file.parent.name))
                    os.kill(killed[0], signal.SIGKILL)

    with closing(SlurmLauncher(SlurmSettings())) as launcher:
        launcher.restarts = 0
        row = run_trial(trial, launcher, LIMITS, worker=fake_worker("meet"), on_step=kill)
        assert row.status == "lost" and says in (row.evidence or ""), row.evidence
        launcher.restarts = 1
        killed.clear()
        assert run_trial(trial, launcher, LIMITS, worker=fake_worker("meet"), on_step=kill).status == "ok"


@pytest.mark.proof
@SUBMITS
def test_what_a_killed_sweep_left_on_the_nodes_ends_by_itself(
    recipe: Recipe, two_nodes: Cluster, tmp_path: Path, submit: str
) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\nfrom trial_helpers import fake_worker\n"
        "from trimaran.bench.launch.contract import Launch\n"
        "from trimaran.bench.launch.slurm.slurm_launcher import SlurmLauncher\n"
        "from trimaran.nouns.slurm_settings import SlurmSettings\n"
        "out = Path(sys.argv[2]) / 'trial'; out.mkdir()\n"
        "(out / 'job.json').write_text('{\"out_dir\": \"' + str(out) + '\", \"steps\": 3}')\n"
        "launch = Launch((*fake_worker('silent'), str(out / 'job.json')), 4, out, ranks_per_node=2)\n"
        "ranks = SlurmLauncher(SlurmSettings(submit=sys.argv[3])).start(launch)\n"
        "print('started', flush=True); input()\n"
    )
    environment = {**os.environ, "TRIMARAN_LOST_AFTER_S": "3"}
    sweep = subprocess.Popen(
        [sys.executable, "-c", script, str(Path(__file__).parents[1]), str(tmp_path), submit],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert sweep.stdout is not None
    assert sweep.stdout.readline() == "started\n"
    deadline = time.monotonic() + 20
    while len(processes_that_name("fake_worker.py silent")) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    sweep.kill()
    sweep.communicate()
    deadline = time.monotonic() + 30
    while (squeue() or processes_that_name(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.2)  # the fixture asserts that nothing is left


@pytest.mark.proof
def test_an_interrupted_sweep_gives_everything_back(recipe: Recipe, two_nodes: Cluster, tmp_path: Path) -> None:
    timer = threading.Timer(6.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with Store(tmp_path / "store.sqlite") as store:
        with closing(SlurmLauncher(SlurmSettings(at_once=2))) as launcher, pytest.raises(KeyboardInterrupt):
            run_sweep(
                recipe, two_nodes, [parse_layout("dp1,mbs1"), parse_layout("dp2,mbs1")], store, data_dir=tmp_path,
                work_dir=tmp_path / "runs", launcher=launcher, limits=Limits(start_s=100), worker=fake_worker("silent"),
            )  # fmt: skip
        assert store.measurements() == []
    timer.join()


@pytest.mark.parametrize("word", ["main --wrap=id", "$(id)", "main;id", "-p other", "a\nb", ""])
def test_hostile_words_of_a_sweep_file_are_refused(word: str) -> None:
    for field in ("partition", "account", "constraint"):
        with pytest.raises(ValidationError):
            SlurmSettings(**{field: word})
