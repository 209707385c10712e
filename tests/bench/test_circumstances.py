"""Claims about what surrounds a trial: variants in a sweep, the clock, the kernel's memory limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from trial_helpers import LIMITS, fake_worker
from trimaran.bench.launch import held_memory
from trimaran.bench.launch.cgroup import memory_group
from trimaran.bench.launch.clock import capped_clock
from trimaran.bench.launch.contract import Launch
from trimaran.bench.launch.local import LocalLauncher, cores_of
from trimaran.bench.sweep import run_sweep
from trimaran.bench.trial.trial import prepare_trial, run_trial
from trimaran.files.catalogue import write_atomically
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.slurm_settings import SlurmSettings
from trimaran.nouns.variant import Variant
from trimaran.recipe.recipe import Recipe
from trimaran.store import Store
from trimaran.study.train_recipe import fastest_layout
from trimaran.study.workspace import Workspace


def test_each_layout_is_measured_under_each_variant(recipe: Recipe, cluster: Cluster, tmp_path: Path) -> None:
    variants = [Variant(), Variant(environment={"OMP_NUM_THREADS": "2"}), Variant(pin_cpus=True, python=sys.executable)]
    layouts = [parse_layout("dp1,mbs1"), parse_layout("dp2,mbs1")]
    with Store(tmp_path / "store.sqlite") as store:
        options = {"data_dir": tmp_path, "work_dir": tmp_path / "runs", "limits": LIMITS, "worker": fake_worker("ok")}
        rows = run_sweep(recipe, cluster, layouts, store, variants=variants, **options)
        assert [(row.dp, row.variant or "") for row in rows] == [(n, v.text()) for n in (1, 2) for v in variants]
        assert len({row.trial_key for row in rows}) == len(rows)
        assert run_sweep(recipe, cluster, layouts, store, variants=variants, **options) == rows
        assert len(store.measurements()) == 6
    assert all(row.status == "ok" for row in rows)
    assert all(row.libraries["torch"] for row in rows)


@pytest.mark.proof
def test_a_layout_is_measured_anew_in_other_software_of_the_nodes(
    recipe: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    def stated(slurm: SlurmSettings | None) -> Recipe:
        return recipe.model_copy(update={"sweep": recipe.sweep.model_copy(update={"slurm": slurm})})

    def measured(slurm: SlurmSettings | None, *variants: Variant) -> list[Measurement]:
        with Store(tmp_path / "store.sqlite") as store, closing(LocalLauncher()) as launcher:
            return run_sweep(
                stated(slurm), cluster, [parse_layout("dp1,mbs1")], store, variants=variants or (Variant(),),
                data_dir=tmp_path, work_dir=tmp_path / "runs", limits=LIMITS, worker=fake_worker("ok"),
                launcher=launcher,
            )  # fmt: skip

    image, python = "registry#team/pt:2.8", sys.executable
    said = {
        "": SlurmSettings(partition="gpu"),
        f"container_image={image};python={python}": SlurmSettings(container_image=image, python=python),
        f"container_image={image[:-1]}9;python={python}": SlurmSettings(
            container_image=f"{image[:-1]}9", python=python
        ),
        f"python={python}": SlurmSettings(python=python),
        f"python={python};modules=cuda/12.4,gcc/13": SlurmSettings(python=python, modules=("cuda/12.4", "gcc/13")),
        "modules=cuda/13": SlurmSettings(modules=("cuda/13",)),
    }
    rows = [row for slurm in said.values() for row in measured(slurm)]
    assert [row.variant or "" for row in rows] == list(said)
    assert len({row.trial_key for row in rows}) == len(said)
    assert measured(None) == rows[:1], "where Slurm's nodes have no other software, nothing is measured anew"
    # the ranks run under the variant's interpreter, whatever the nodes' own is
    assert measured(SlurmSettings(python="/usr/bin/python3"), Variant(python=python)) == [rows[3]]
    fastest = [fastest_layout(stated(slurm), Workspace(tmp_path)) for slurm in said.values()]
    assert fastest == [parse_layout("dp1,mbs1")] * len(said)
    assert fastest_layout(stated(SlurmSettings(modules=("cuda/14",))), Workspace(tmp_path)) is None


def test_an_interpreter_that_cannot_serve_stops_the_sweep_before_it_begins(
    recipe: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.write_text('#!/bin/sh\necho \'{"python": "3.11", "numpy": "2"}\'\n')
    bare.chmod(0o755)
    for python, says in (
        ("/no/such/python", "does not run"),
        ("/bin/true", "does not run"),
        (str(bare), "no trimaran"),
    ):
        with Store(tmp_path / "store.sqlite") as store, pytest.raises(TrimaranError, match=says):
            run_sweep(
                recipe, cluster, [parse_layout("dp1,mbs1")], store,
                data_dir=tmp_path, work_dir=tmp_path / "runs", variants=[Variant(), Variant(python=python)],
            )  # fmt: skip
        assert not (tmp_path / "runs").exists()


def fake_cpufreq(folder: Path) -> list[Path]:
    files = []
    for core in range(2):
        place = folder / f"cpu{core}" / "cpufreq"
        place.mkdir(parents=True)
        (place / "cpuinfo_min_freq").write_text("800000\n")
        (place / "cpuinfo_max_freq").write_text("3200000\n")
        (place / "scaling_max_freq").write_text("3200000\n")
        files.append(place / "scaling_max_freq")
    return files


def test_the_clock_is_capped_for_the_trial_alone(tmp_path: Path) -> None:
    files, kept = fake_cpufreq(tmp_path), tmp_path / "kept.json"
    with pytest.raises(KeyboardInterrupt), capped_clock(2.0, tmp_path, kept):
        assert [file.read_text() for file in files] == ["2000000"] * 2
        raise KeyboardInterrupt
    assert [file.read_text() for file in files] == ["3200000\n"] * 2
    with (
        pytest.raises(TrimaranError, match=r"clock_ghz 5 is not between this machine's 0.8 and 3.2"),
        capped_clock(5.0, tmp_path, kept),
    ):
        pass
    with pytest.raises(TrimaranError, match="no control over its clock"), capped_clock(2.0, tmp_path / "none", kept):
        pass
    assert not kept.exists()


def test_the_clock_that_a_killed_sweep_left_capped_is_given_back(tmp_path: Path) -> None:
    files, kept = fake_cpufreq(tmp_path), tmp_path / "kept.json"
    if (child := os.fork()) == 0:
        with capped_clock(2.0, tmp_path, kept):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [file.read_text() for file in files] == ["2000000"] * 2
    with capped_clock(None, tmp_path, kept):
        assert [file.read_text() for file in files] == ["3200000\n"] * 2
    assert not kept.exists()


def test_trials_of_two_commands_never_share_a_capped_clock(tmp_path: Path) -> None:
    """The second took the first's cap for what had been before, and left it behind; and one without a cap ran under it.

    A command is a process, but a lock of one is kept from another of the same process, too.
    """
    files, kept = fake_cpufreq(tmp_path), tmp_path / "kept.json"
    with capped_clock(2.0, tmp_path, kept):
        for other in (1.5, None):
            with pytest.raises(TrimaranError, match=r"run this again when"), capped_clock(other, tmp_path, kept):
                pass
        assert [file.read_text() for file in files] == ["2000000"] * 2
    assert [file.read_text() for file in files] == ["3200000\n"] * 2
    with capped_clock(None, tmp_path, kept), capped_clock(None, tmp_path, kept):
        with pytest.raises(TrimaranError, match=r"share its clock"), capped_clock(2.0, tmp_path, kept):
            pass
        assert [file.read_text() for file in files] == ["3200000\n"] * 2
    with capped_clock(2.0, tmp_path, kept):
        assert [file.read_text() for file in files] == ["2000000"] * 2


def test_pinned_ranks_have_cores_of_their_own_while_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 4, 5})

    def cores(ranks: int, threads: int) -> list[list[int]]:
        launch = Launch(command=(), ranks=ranks, out_dir=Path(), threads_per_rank=threads)
        return [cores_of(rank, launch) for rank in range(ranks)]

    assert cores(4, 1) == [[0], [1], [4], [5]]
    assert cores(2, 2) == [[0, 1], [4, 5]]
    assert cores(6, 1) == [[0], [1], [4], [5], [0], [1]]
    assert cores(1, 8) == [[0, 1, 4, 5]]


def held_gib(folder: Path) -> float:
    """What processes hold whose command names the folder."""
    ranks = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(folder) in file.read_bytes().decode(errors="replace"):
                ranks.append(int(file.parent.name))
    return held_memory.resident_gib(ranks)


@pytest.mark.parametrize(
    ("available_gib", "behaviour", "status", "says"),
    [
        (8.0, "ok-slowly", "lost", "other programs have taken the memory: the machine has 0.10 of 10.00 GiB left"),
        (0.1, "ok-slowly", "lost", "GiB that were available when they began; end what else runs here"),
        (0.6, "eat", "oom", "the machine has 0.10 of 10.00 GiB left, the ranks hold 0."),
    ],
    ids=["taken later", "taken before", "of the layout"],
)
def test_memory_that_other_programs_took_is_not_laid_to_the_layout(
    recipe: Recipe, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    available_gib: float, behaviour: str, status: str, says: str,
) -> None:  # fmt: skip
    machine = tmp_path / "meminfo"
    monkeypatch.setattr(held_memory, "_MACHINE", machine)

    def have(gib: float) -> None:
        write_atomically(machine, f"MemTotal: {10 << 20} kB\nMemAvailable: {int(gib * 2**20)} kB\n")

    def take(step: int) -> None:
        while behaviour == "eat" and step == 2 and held_gib(tmp_path) < 0.39:
            time.sleep(0.05)
        if step >= 2:
            have(0.1)

    have(available_gib)
    trial = prepare_trial(recipe, cluster, parse_layout("dp1,mbs1"), data_dir=tmp_path, work_dir=tmp_path / "runs")
    with closing(LocalLauncher()) as launcher:
        row = run_trial(trial, launcher, LIMITS, worker=fake_worker(behaviour), on_step=take)
    assert row.status == status and says in (row.evidence or "").splitlines()[0], row.evidence


def test_a_memory_group_leaves_nothing_behind() -> None:
    group = memory_group(0.5)
    if group is None:  # no right to make one here: then the watch alone keeps the limit, as test_trials shows
        assert memory_group(None) is None
        return
    folder = group.processes_file.parent
    assert folder.exists()
    assert not group.over_memory()
    group.close()
    assert not folder.exists()


def test_a_sweep_removes_the_groups_of_dead_sweeps_and_of_no_living_one() -> None:
    waiting = memory_group(0.5)
    if waiting is None:
        assert memory_group(None) is None
        return
    name = waiting.processes_file.parent.name
    dead = subprocess.Popen(["true"])
    dead.wait()
    left_over = waiting.processes_file.parent.with_name(name.replace(str(os.getpid()), str(dead.pid)))
    left_over.mkdir()
    other = [sys.executable, "-c", "from trimaran.bench.launch.cgroup import memory_group; memory_group(0.5).close()"]
    subprocess.run(other, check=True)
    assert waiting.processes_file.exists(), "its ranks are still to come"
    assert not left_over.exists()
    waiting.close()
