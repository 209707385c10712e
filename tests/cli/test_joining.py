"""Under torchrun and Slurm the started processes are the ranks, and rank 0 alone speaks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command import run, tiny_recipe
from processes import processes_in, rank_of
from trimaran.bench.launch.joined import Joined, JoinedLauncher, first_host, joined
from trimaran.cli.live_progress import TrainingProgress
from trimaran.files.recipe_file import load_recipe
from trimaran.layout.notation import parse_layout
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.variant import Variant
from trimaran.study.train_recipe import train_recipe
from trimaran.study.workspace import Workspace

PYTHON = (sys.executable, "-P", "-m")


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["lm_loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def torchrun(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    start = [*PYTHON, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trimaran", *command]
    return subprocess.run(start, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.proof
def test_torchrun_s_processes_are_the_ranks(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    done = torchrun("train", str(recipe), "--layout", "dp2,mbs2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("12 steps with dp2") == 1 and done.stderr.count("step 1 of 12") == 1
    assert run("train", str(recipe), "--layout", "dp2,mbs2", "--runs", "own", cwd=tmp_path).returncode == 0
    assert losses(tmp_path / "runs/tiny/train") == losses(tmp_path / "own/tiny/train")

    refused = torchrun("train", str(recipe), "--layout", "dp1,mbs4", cwd=tmp_path)
    assert refused.returncode
    assert refused.stderr.count("layout dp1,tp1,pp1,mbs4 needs 1 ranks, but 2 were started") == 1


@pytest.mark.proof
def test_a_training_goes_on_when_torchrun_starts_its_ranks_again(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("steps = 12", "steps = 300\ncheckpoint_every = 10"))
    start = [*PYTHON, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [*start, "-m", "trimaran", "train", str(recipe), "--layout", "dp2,mbs2"]
    running = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    notices = tmp_path / "runs/tiny/train/notices.jsonl"
    while not (notices.exists() and "saved" in notices.read_text()):
        assert running.poll() is None
        time.sleep(0.02)
    os.kill(next(int(p.name) for p in processes_in(notices.parent) if rank_of(p) == 0), signal.SIGKILL)
    told = running.communicate(timeout=250)[1]
    assert running.returncode == 0, told
    assert "going on from step " in told
    assert len(losses(notices.parent)) == 300 and len(losses(tmp_path / "runs/tiny/train-1")) < 300


def started_by_srun(
    command: list[str], cwd: Path, step: str = "0", **of_rank_1: str
) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """Ranks 0 and 1 with the variables that srun sets; the port follows from the job's and the step's number."""
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": step, "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "node1",
    }  # fmt: skip
    one, zero = (
        subprocess.Popen(
            command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), **extra},
        )
        for rank, extra in ((1, of_rank_1), (0, {}))
    )  # fmt: skip
    return zero, one


@pytest.mark.proof
def test_srun_s_processes_are_the_ranks(tmp_path: Path) -> None:
    command = [*PYTHON, "trimaran", "train", str(tiny_recipe(tmp_path)), "--layout", "tp2,mbs4"]
    ranks = started_by_srun(command, tmp_path)
    (told, errors), (silent, _) = (rank.communicate(timeout=200) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    assert silent == "" and told.startswith("12 steps with dp1,tp2")


# Raises ValueError in the main thread of a process that imports it once a training has made three steps.
FAILS = """
import ctypes, pathlib, threading, time
log, main = pathlib.Path("runs/tiny/train/log.jsonl").resolve(), threading.main_thread().ident
def fail():
    while not (log.exists() and log.read_text().count("\\n") >= 3):
        time.sleep(0.02)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(ValueError))
threading.Thread(target=fail, daemon=True).start()
"""


@pytest.mark.proof
def test_a_rank_that_fails_elsewhere_is_named_with_its_reason_in_one_line(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("steps = 12", "steps = 20000"))
    (tmp_path / "fails").mkdir()
    (tmp_path / "fails/sitecustomize.py").write_text(FAILS)
    python_path = os.pathsep.join(filter(None, [str(tmp_path / "fails"), os.environ.get("PYTHONPATH")]))
    command = [*PYTHON, "trimaran", "train", str(recipe), "--layout", "dp2,mbs2"]
    leader, failing = started_by_srun(command, tmp_path, step="1", PYTHONPATH=python_path)
    failing.communicate(timeout=200)
    _, errors = leader.communicate(timeout=60)
    assert leader.returncode == 2, errors
    assert "Traceback" not in errors
    assert "ended as fail: rank 1 failed: ValueError" in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node1", "node1"), ("a,b", "a"), ("gpu[003-007,009],login1", "gpu003"), ("r[1-2]n,x", "r1n")],
)
def test_ranks_meet_at_the_first_node(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_a_port_that_is_no_port_or_another_program_s_is_refused_in_one_line(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    command = [*PYTHON, "trimaran", "train", str(recipe), "--layout", "dp1,mbs4"]
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}

    def refused(port: str) -> str:
        environment = {**os.environ, **one, "MASTER_PORT": port}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 2, done.stderr
        return done.stderr.splitlines()[-1]

    assert refused("29x") == "trimaran: MASTER_PORT is '29x', expected a number: start the ranks with torchrun or srun"
    assert refused("80000") == "trimaran: MASTER_PORT is 80000, and ports are 1 to 65535: name one of these"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert refused(str(port)) == (
            f"trimaran: rank 0 cannot listen at port {port} of 127.0.0.1 (Address already in use): end what listens "
            f"there, or start the ranks anew at another MASTER_PORT"
        )


@pytest.mark.parametrize(
    ("environment", "one_node"),
    [
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, False),
        ({"WORLD_SIZE": "2"}, False),  # of what sets torchrun's variables and does not say
    ],
)
def test_signs_of_ranks_on_several_nodes_may_be_held_up_by_their_file_system(
    environment: dict[str, str], one_node: bool
) -> None:
    others = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    place = joined({**others, **environment})
    assert place is not None and JoinedLauncher(place).on_this_machine == one_node


@pytest.mark.parametrize(
    "environment",
    [
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
        {"PMI_SIZE": "4", "PMI_RANK": "1"},
        # a daemon of mpirun's on each of two nodes is a task of Slurm's
        {"OMPI_COMM_WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
    ],
)
def test_ranks_of_mpirun_are_told_where_they_cannot_meet(environment: dict[str, str], tmp_path: Path) -> None:
    """Each began a training of its own, of which all but one found the folder in use."""
    with pytest.raises(TrimaranError, match="mpirun has started 4 ranks"):
        joined(environment)
    stated = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    place = joined({**environment, **stated})
    assert place is not None and place.rank == 1
    done = subprocess.run(
        [*PYTHON, "trimaran", "train", str(tiny_recipe(tmp_path))], env={**os.environ, **environment}, cwd=tmp_path,
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "start them with torchrun or srun" in done.stderr


def test_a_lone_rank_of_mpirun_or_one_of_srun_with_pmi_is_as_without() -> None:
    assert joined({"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"}) is None
    step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1", "PMI_SIZE": "2", "PMI_RANK": "1"}
    place = joined(step)
    assert place is not None and (place.rank, place.world_size) == (1, 2)


def test_a_batch_script_without_srun_starts_its_own_ranks() -> None:
    assert joined({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None


def test_all_ranks_have_what_the_only_variant_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 alone had it, beside ranks that computed and spoke in another way."""
    monkeypatch.setattr(os, "environ", {"A": "shell", "B": "shell"})
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: became.append([path, *command]))
    Joined(1, 2, {"RANK": "1"}).follow(Variant(environment={"A": "variant"}, python="/opt/python"))
    assert os.environ == {"A": "variant", "B": "shell", "RANK": "1"}
    assert became[0][:2] == ["/opt/python"] * 2 and became[0][-1] == "--joined"


def test_what_only_a_launcher_can_do_is_refused_of_ranks_that_others_have_started(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    for setting in ("pin_cpus = true", "clock_ghz = 1.0"):
        stated = recipe.with_name("pinned.toml")
        stated.write_text(f"{recipe.read_text()}\n[[sweep.variants]]\n{setting}\n")
        with pytest.raises(TrimaranError, match=f"sweep.variants states {setting.split()[0]}, which ranks get as they"):
            train_recipe(
                load_recipe(str(stated)), Workspace(tmp_path / "runs"), parse_layout("dp2,mbs2"),
                joined=Joined(0, 2, {}), show=TrainingProgress, say=print,
            )  # fmt: skip


def test_a_dry_run_among_ranks_is_traced_and_told_by_the_first_alone(tmp_path: Path) -> None:
    """Under torchrun the same table was traced and printed once for each rank."""
    recipe = tiny_recipe(tmp_path)
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    command = [*PYTHON, "trimaran", "train", str(recipe), "--layout", "dp2,mbs2", "--dry-run"]
    told = [
        subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **place, "RANK": rank}, capture_output=True, text=True,
            check=False,
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    assert [(done.returncode, done.stdout) for done in told] == [(2, ""), (0, "")]
    assert "a dry run traces what GPUs hold" in told[0].stderr and told[1].stderr == ""
