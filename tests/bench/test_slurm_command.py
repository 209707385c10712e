"""Containers, modules and interpreters of a sweep's Slurm section stand in the commands that Slurm is given."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from pydantic import ValidationError

from trial_helpers import LIMITS
from trimaran.bench.launch.contract import Launch, TrialRefusedError
from trimaran.bench.launch.slurm import allocations, dead_nodes, queue, slurm_launcher
from trimaran.bench.launch.slurm.allocations import Allocations
from trimaran.bench.launch.slurm.dead_nodes import DeadNodes
from trimaran.bench.launch.slurm.node import exit_file
from trimaran.bench.launch.slurm.queue import TIME_IS_OVER, Job
from trimaran.bench.launch.slurm.slurm_launcher import SlurmLauncher, step_of
from trimaran.bench.trial.trial import prepare_trial, run_once
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.slurm_settings import SlurmSettings
from trimaran.protocol import rank_process
from trimaran.protocol.exits import USER_ERROR
from trimaran.protocol.files import RunFile
from trimaran.recipe.data_settings import DataSettings
from trimaran.recipe.recipe import Recipe
from trimaran.study.stated import runnable_recipe

FOLDER = Path(slurm_launcher.__file__).parent
NODE, MODULES = str(FOLDER / "node.py"), str(FOLDER / "modules.sh")
# What a site's Lmod or Environment Modules gives every shell, as bash hands functions on.
FAKE_MODULE = '() { if [ "$2" = nosuch/1 ]; then echo "no $2" >&2; return 1; fi; shift; export A_VARIANT_HAS="$*"; }'


def launch(folder: Path, *reads: Path) -> Launch:
    return Launch(command=(sys.executable, "worker.py"), ranks=4, out_dir=folder, ranks_per_node=2, reads=reads)


def test_a_step_is_as_before_where_nothing_more_is_stated(tmp_path: Path) -> None:
    step = step_of(launch(tmp_path), SlurmSettings(), 2, "7")
    assert step[-6:] == [sys.executable, "-I", "-S", NODE, "rank", str(tmp_path / "launch.json")]
    assert not any("container" in word for word in step) and MODULES not in step


def test_a_container_has_the_folders_of_the_run_and_the_interpreter_of_the_image(tmp_path: Path) -> None:
    trials, data = tmp_path / "trials", tmp_path / "data"
    settings = SlurmSettings(
        container_image="registry.example#team/trimaran:1.0",
        container_mounts=("/corpus:/corpus:ro", "/scratch:/scratch"),
        python="/opt/venv/bin/python",
    )
    step = step_of(launch(trials / "a", data), settings, 2, "7")
    assert "--container-image=registry.example#team/trimaran:1.0" in step
    (mounts,) = [word.partition("=")[2].split(",") for word in step if word.startswith("--container-mounts=")]
    paths = (trials, data, NODE, rank_process.__file__)
    assert mounts == [*(f"{path}:{path}" for path in paths), "/corpus:/corpus:ro", "/scratch:/scratch"]
    assert step[-6:-2] == ["/opt/venv/bin/python", "-I", "-S", NODE]
    assert step.index("/opt/venv/bin/python") > max(i for i, word in enumerate(step) if word.startswith("--"))
    with pytest.raises(TrimaranError, match="its name holds a comma or a colon"):
        step_of(launch(trials / "a", tmp_path / "a,b"), settings, 2, "7")


class Refuses:
    """A launcher that keeps what it is asked to start."""

    tells_groups = False

    def start(self, asked: Launch) -> NoReturn:
        self.asked = asked
        raise TrialRefusedError("not here")


def test_a_container_is_given_tokens_where_they_lie_and_weights_as_long_as_they_are_there(
    recipe: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    """Ranks told of Megatron-LM's files that they were gone, and of weights that were, a training could not go on."""
    weights, tokens = tmp_path / "snapshots" / "1", tmp_path / "corpus" / "a.bin"
    weights.mkdir(parents=True)
    (weights / "config.json").symlink_to("../../blobs/2")  # as Hugging Face's cache lies
    data = DataSettings(paths=(str(tokens), str(tokens.with_suffix(".idx")), str(tmp_path / "more.txt")))
    train = recipe.train.model_copy(update={"init_from": str(weights)})
    asked = recipe.model_copy(update={"data": data, "train": train})
    layout = parse_layout("dp2,mbs1")
    trial = prepare_trial(asked, cluster, layout, data_dir=tmp_path / "data", work_dir=tmp_path / "runs")
    launcher = Refuses()
    for there in ((weights, tmp_path / "blobs"), ()):
        run_once(trial, launcher, LIMITS)  # type: ignore[arg-type]  # it is asked for no more
        assert launcher.asked.reads == (tmp_path / "data", tokens, *there)
        shutil.rmtree(weights, ignore_errors=True)


def test_modules_are_loaded_by_a_login_shell_that_reads_nothing_of_the_sweep(tmp_path: Path) -> None:
    settings = SlurmSettings(modules=("cuda/12.4", "gcc/13+cuda"), python="/opt/python")
    step = step_of(launch(tmp_path), settings, 2, None)
    shell = step.index("bash")
    assert step[shell : shell + 7] == ["bash", "-l", MODULES, str(tmp_path), "cuda/12.4", "gcc/13+cuda", "--"]
    assert step[shell + 7] == "/opt/python"


def run_script(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    variables = {"BASH_FUNC_module%%": FAKE_MODULE, "SLURM_PROCID": "3", "SLURMD_NODENAME": "n2"}
    return subprocess.run(
        ["bash", "-l", MODULES, str(folder), *words],
        env=os.environ | variables, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_script_becomes_the_command_with_its_modules(tmp_path: Path) -> None:
    look = "import os, sys; print(os.environ['A_VARIANT_HAS'], sys.argv[1:])"
    done = run_script(tmp_path, "cuda/12.4", "gcc/13", "--", sys.executable, "-c", look, "a b", "$(id)", "--")
    assert done.stdout.splitlines()[-1] == "cuda/12.4 gcc/13 ['a b', '$(id)', '--']", done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_is_not_there_is_a_refusal_of_that_rank(tmp_path: Path) -> None:
    run_script(tmp_path, "nosuch/1", "--", "true")
    ending = json.loads(exit_file(tmp_path, 3).read_text())
    assert ending == {"code": USER_ERROR, "oom": False, "asked_to_end": False}
    said = RunFile.STDERR.of(tmp_path, 3).read_text()
    assert said == "trimaran: module load nosuch/1 failed on node n2: no nosuch/1 (modules of [sweep.slurm])\n"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"container_mounts": ["/a:/a"]}, "container_image is not stated"),
        ({"container_image": "image"}, "python is not"),
        ({"container_image": "image", "python": "/p", "modules": ["cuda"]}, "drop one of them"),
        ({"modules": ["cuda; id"]}, "pattern"),
        ({"modules": ["-x"]}, "pattern"),
        ({"modules": ["--"]}, "pattern"),
        ({"python": "python3"}, "pattern"),
        ({"container_image": "image --wrap", "python": "/p"}, "pattern"),
        ({"container_image": "image", "python": "/p", "container_mounts": ["/a:/b,/c:/d"]}, "pattern"),
        ({"container_image": "image", "python": "/p", "container_mounts": ["a:/b"]}, "pattern"),
    ],
)
def test_what_makes_no_sense_or_is_hostile_is_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        SlurmSettings.model_validate(fields)


def test_an_image_or_an_interpreter_needs_trust(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    model = '[model]\nname = "gpt3-1b3"\n[workload]\nseq_len = 2048\nglobal_batch = 8\n[sweep.slurm]\n'
    for section in ('python = "/opt/python"', 'container_image = "evil"\npython = "/usr/bin/python3"'):
        recipe.write_text(model + section)
        with pytest.raises(TrimaranError, match=r"sweep\.slurm: .*add --trust"):
            runnable_recipe(recipe, trust=False)
        assert runnable_recipe(recipe, trust=True).sweep.slurm
    recipe.write_text(model + 'modules = ["cuda/12.4"]')
    runnable_recipe(recipe, trust=False)


def test_ranks_run_under_the_nodes_interpreter_and_a_variant_s_goes_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch file that a node reads, as a real launcher writes it for a stand-in of srun."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sbatch", "srun", "squeue", "scancel"):
        (programs / name).write_text('#!/bin/sh\necho "$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    launcher = SlurmLauncher(SlurmSettings(python="/opt/python"))
    for program, wanted in ((sys.executable, "/opt/python"), ("/variant/python", "/variant/python")):
        folder = tmp_path / "runs" / wanted.strip("/").replace("/", "-")
        folder.mkdir(parents=True)
        ranks = launcher.start(Launch(command=(program, "w.py"), ranks=4, out_dir=folder, ranks_per_node=2))
        assert json.loads((folder / "launch.json").read_text())["command"] == [wanted, "w.py"]
        ranks.kill()
    launcher.close()


def test_a_dead_node_is_back_once_its_daemon_was_started_again_or_it_answers_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts = {"n1": "2026-03-01T12:00:00", "n2": "2026-03-01T12:00:00", "n3": ""}
    monkeypatch.setattr(dead_nodes, "node_starts", lambda: dict(starts))
    dead = DeadNodes()
    dead.before_a_start()
    dead.add(["n2", "n3"])
    everybody = {"n1", "n2", "n3"}
    # Slurm notices late that a node has died, and has no other word of one whose start it does not know
    assert dead.left_of(everybody) == {"n1"}
    starts["n2"] = "2026-03-01T12:34:56"
    assert dead.left_of(everybody) == {"n1", "n2"} and dead.names() == ["n3"]
    assert dead.left_of({"n1", "n2"}) == {"n1", "n2"}
    assert dead.left_of(everybody) == everybody and dead.names() == []
    dead.before_a_start()
    dead.add(["n2"])
    assert dead.left_of(everybody) == {"n1", "n3"}, "it died once more"


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    """A program in place of one of Slurm's."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_what_a_shell_has_slurm_show_or_wait_for_is_none_of_a_sweep_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiting job that SQUEUE_STATES hid counted as ended, and SBATCH_WAIT kept sbatch until the job's end."""
    stand_in(tmp_path, monkeypatch, "squeue", "env")
    mine = ("SQUEUE_STATES", "SQUEUE_PARTITION", "SCANCEL_INTERACTIVE", "SINFO_PARTITION", "SBATCH_WAIT")
    kept = ("SBATCH_PARTITION", "SBATCH_ACCOUNT", "SLURM_CONF", "SLURM_CLUSTERS")
    for name in (*mine, *kept):
        monkeypatch.setenv(name, "x")
    seen = {line.partition("=")[0] for line in queue.run("squeue").splitlines()}
    assert seen.isdisjoint(mine) and seen.issuperset(kept)


def test_a_command_that_does_not_answer_is_told_in_few_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "squeue", "exec sleep 60")
    monkeypatch.setattr(queue, "_COMMAND_WITHIN_S", 0.2)
    with pytest.raises(
        TrimaranError, match=r"^squeue did not answer within 0 s: see whether Slurm's controller is up$"
    ):
        queue.run("squeue", "--noheader")


@pytest.mark.parametrize(
    ("limit", "minutes"), [("1:00", 1), ("10:30", 10.5), ("2:00:00", 120), ("1-00:00:00", 1440), ("UNLIMITED", None)]
)
def test_the_time_limit_of_a_job_is_read_in_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, minutes: float | None
) -> None:
    stand_in(tmp_path, monkeypatch, "squeue", f"echo {limit}")
    assert Job("7").time_limit_min() == minutes


@pytest.mark.parametrize(
    ("state", "log", "began", "says"),
    [
        ("TIMEOUT", "", True, "the time limit of 5 min of Slurm job 7 is over: raise time_limit_min in [sweep.slurm]"),
        ("COMPLETING", TIME_IS_OVER, True, "the time limit of 5 min of Slurm job 7 is over: raise time_limit_min in "
                                           "[sweep.slurm]"),
        ("CANCELLED", "", True, "Slurm job 7 was cancelled: look who did"),
        ("COMPLETING", "CANCELLED AT noon", True, "Slurm job 7 was cancelled: look who did"),
        ("CANCELLED", "", False, "Slurm job 7 was cancelled while it waited for nodes: look who did"),
        ("RUNNING", "", True, "Slurm told the ranks of job 7 to end, as scancel does: look who did"),
        ("NODE_FAIL", "", True, "Slurm ended job 7 (NODE_FAIL): see whether a node was lost"),
    ],
)  # fmt: skip
def test_why_slurm_ended_a_job_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, log: str, began: bool, says: str
) -> None:
    """Each was `Slurm ended job 7 (COMPLETING): raise time_limit_min or look who did`."""
    stand_in(tmp_path, monkeypatch, "squeue", "echo 5:00")
    assert Job("7").why_ended(state, log, began=began) == says


def test_the_way_out_of_a_time_limit_inside_a_job_is_sbatch_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "squeue", "echo 5:00")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert Job("7").why_ended("TIMEOUT", began=True).endswith("is over: raise --time of its sbatch")


def test_a_trial_that_waits_for_anothers_allocation_is_given_a_new_one_when_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An array's time is over for all of it at about once: the trial that waited ended the whole sweep."""
    members = [("7", "RUNNING", "None"), ("8", "RUNNING", "None")]
    monkeypatch.setattr(allocations, "submit", lambda *asked, **stated: Job("7"))
    monkeypatch.setattr(Allocations, "_members", lambda self: members)
    held = Allocations(
        SlurmSettings(at_once=2),
        1,
        launch(tmp_path),
        ["python"],
        tmp_path,
        [],
        [],
        lambda text: None,
        threading.Event(),
    )
    jobs = [held.take(lambda text: None, threading.Event()) for _ in range(2)]
    assert [job.number for job in jobs if job] == ["7", "8"]
    members.clear()
    assert held.take(lambda text: None, threading.Event()) is None


@pytest.mark.parametrize(
    ("reason", "hopeless"),
    [
        ("QOSMaxWallDurationPerJobLimit", True), ("AssocMaxNodePerJobLimit", True), ("QOSMaxGRESPerJob", True),
        ("PartitionTimeLimit", True), ("QOSMaxJobsPerUserLimit", False), ("AssocGrpNodeLimit", False),
        ("Resources", False), ("ReqNodeNotAvail, UnavailableNodes:n1", False),
    ],
)  # fmt: skip
def test_a_job_that_asks_for_more_than_any_may_is_not_waited_for(
    reason: str, hopeless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "run", lambda *command: f"PENDING|{reason}\n")
    stop = threading.Event()
    with pytest.raises(TrimaranError, match="can never start" if hopeless else "the sweep ended before"):
        Job("7").wait_until_running(lambda text: stop.set(), stop)


def test_steps_of_two_trainings_in_one_job_have_names_of_their_own(tmp_path: Path) -> None:
    """By its name a step is found that is ended before its ranks have met; it was the other training's."""
    steps = [step_of(launch(tmp_path / study / "train"), SlurmSettings(), 2, "7") for study in ("a", "b")]
    first, second = ({word for word in step if word.startswith("--job-name=trimaran-")} for step in steps)
    assert first and second and first != second


def test_lines_that_name_a_cluster_are_none_of_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SLURM_CLUSTERS names one they come first: a running job counted as ended, or a sweep ended in a trace."""
    stand_in(tmp_path, monkeypatch, "squeue", 'echo "CLUSTER: alpha"; echo "RUNNING|None"')
    assert Job("7").state() == "RUNNING"


def test_what_an_administrator_wrote_in_another_encoding_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "scontrol", r"printf 'NodeName=n1 SlurmdStartTime=today Reason=d\351faut\n'")
    assert queue.node_starts() == {"n1": "today"}


def test_how_a_batch_script_lays_out_its_tasks_is_none_of_a_step_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun refuses cores beside SLURM_NTASKS_PER_GPU, and gives each rank one GPU by SLURM_GPUS_PER_TASK."""
    of_the_job = (
        "SLURM_GPUS_PER_TASK",
        "SLURM_NTASKS_PER_GPU",
        "SLURM_TRES_PER_TASK",
        "SLURM_HINT",
        "SLURM_MEM_PER_CPU",
    )
    kept = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_CLUSTERS", "SLURM_JOB_GPUS", "PATH")
    for name in (*of_the_job, *kept[:-1]):
        monkeypatch.setenv(name, "1")
    environment = queue.step_environment()
    assert environment.keys().isdisjoint(of_the_job) and environment.keys() >= set(kept)


def test_a_step_is_told_of_cores_where_its_ranks_are_pinned_alone(tmp_path: Path) -> None:
    """One that is told of them has no others: NCCL's threads and autograd's shared a core with each rank of a GPU."""
    plain = step_of(launch(tmp_path), SlurmSettings(), 2, "7")
    assert "--cpu-bind=none" in plain and not any(word.startswith("--cpus-per-task") for word in plain)
    pinned = step_of(replace(launch(tmp_path), pin_cpus=True, threads_per_rank=3), SlurmSettings(), 2, "7")
    assert "--cpu-bind=cores" in pinned and "--cpus-per-task=3" in pinned


def test_nothing_is_asked_of_slurm_once_a_sweep_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial in another thread that was ended with it was started again: its job stood in the queue for nobody."""
    asked = tmp_path / "asked"
    for name in ("sbatch", "srun", "squeue", "scancel", "scontrol"):
        stand_in(tmp_path, monkeypatch, name, f"echo {name} >>{asked}")
    launcher = SlurmLauncher(SlurmSettings(at_once=2, requeue=True))
    launcher.close()
    with pytest.raises(TrimaranError, match="the sweep ended before"):
        launcher.start(launch(tmp_path))
    assert not asked.exists()


def test_an_srun_that_cannot_be_started_is_told_and_keeps_no_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a limit on processes: the next start of a lasting training waited for that allocation without end."""
    for name, prints in (("sbatch", "7"), ("squeue", "7|RUNNING|None"), ("scancel", ""), ("scontrol", "")):
        stand_in(tmp_path, monkeypatch, name, f"echo '{prints}'")
    stand_in(tmp_path, monkeypatch, "srun", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    srun = tmp_path / "srun"
    works = srun.read_text()
    (out_dir := tmp_path / "trials" / "a").mkdir(parents=True)
    launcher = SlurmLauncher(SlurmSettings())
    srun.write_text("#!/no/such/shell\n")
    with pytest.raises(TrimaranError, match=r"srun cannot be started \(No such file or directory\): "):
        launcher.start(launch(out_dir))
    srun.write_text(works)
    too_late = threading.Timer(10.0, launcher.close)  # which ends what waits
    too_late.start()
    launcher.start(launch(out_dir)).kill()
    too_late.cancel()
    launcher.close()
