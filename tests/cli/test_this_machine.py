"""A study of this machine: it is probed once, by one process, and its cluster file counts on no other machine."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from command import TRIMARAN, run, tiny_recipe
from trimaran.files.catalogue import dump_toml, load_cluster
from trimaran.files.recipe_file import load_recipe
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.protocol.host import processor_name
from trimaran.recipe.recipe import Recipe
from trimaran.study import torch_programs, workspace
from trimaran.study.workspace import Workspace


def of_this_machine(folder: Path, layouts: list[str] | None = None) -> Path:
    """A recipe that names no cluster."""
    recipe = tiny_recipe(folder, layouts)
    recipe.write_text(re.sub(r"(?m)^cluster = .*\n", "", recipe.read_text()))
    return recipe


def probed(folder: Path, name: str, cores: int = 1) -> None:
    """A cluster file of two slots of a processor of that name, as a probe leaves it on a machine of so many cores."""
    cluster = load_cluster(str(folder / "machine.toml"))
    device = cluster.device.model_copy(update={"name": name})
    (folder / "runs" / "tiny").mkdir(parents=True)
    source = "trimaran 0.1.0 probe --quick, 2026-11-01 10:00 UTC"
    update = {"device": device, "source": source, "cores_per_node": cores}
    dump_toml(cluster.model_copy(update=update), folder / "runs" / "tiny" / "cluster.toml")


def test_a_cluster_file_of_another_machine_is_planned_by_and_not_measured_by(tmp_path: Path) -> None:
    recipe = of_this_machine(tmp_path)
    probed(tmp_path, "Another Processor, 1 core")
    done = run("bench", str(recipe), cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f"is of Another Processor, 1 core, and this machine is {processor_name()}: remove it" in done.stderr
    assert run("plan", str(recipe), cwd=tmp_path).returncode == 0


def test_a_cluster_file_of_a_larger_machine_with_the_same_processor_is_not_measured_by(tmp_path: Path) -> None:
    recipe, here = of_this_machine(tmp_path), os.cpu_count()
    probed(tmp_path, f"{processor_name()}, 1 core", cores=4096)
    done = run("bench", str(recipe), cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f"cluster.toml is of 4096 cores, and this machine has {here}: remove it" in done.stderr
    assert run("plan", str(recipe), cwd=tmp_path).returncode == 0


def test_a_layout_of_more_slots_than_were_probed_says_which_file_to_remove(tmp_path: Path) -> None:
    recipe = of_this_machine(tmp_path, ["dp4,mbs1"])
    probed(tmp_path, f"{processor_name()}, 1 core")
    done = run("bench", str(recipe), cwd=tmp_path)
    assert done.returncode == 2
    assert "takes 4 slots, but runs/tiny/cluster.toml is of 2" in done.stderr.splitlines()[-1]
    assert "remove the file to have it probed for 4" in done.stderr.splitlines()[-1]


def test_a_machine_is_probed_for_the_slots_of_a_layout_that_the_recipe_does_not_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = 2 * (os.cpu_count() or 1)
    recipe = of_this_machine(tmp_path)
    recipe.write_text(recipe.read_text().replace("global_batch = 4", f"global_batch = {ranks}"))
    place, slots = Workspace(tmp_path / "runs" / "tiny"), list[int]()

    def probe(_: str, arguments: Sequence[str], __: str) -> None:
        slots.append(int(arguments[arguments.index("--slots") + 1]))
        (tmp_path / "runs" / "tiny" / "cluster.toml").write_text(
            (tmp_path / "machine.toml").read_text().replace("devices_per_node = 2", f"devices_per_node = {slots[0]}")
        )

    monkeypatch.setattr(torch_programs, "run_program", probe)
    cluster = place.cluster(load_recipe(str(recipe)), [parse_layout(f"dp{ranks},mbs1")])
    assert slots == [ranks] and cluster.devices_per_node == ranks


def test_two_commands_at_once_probe_once_and_the_other_says_for_whom_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, place, probes = (
        load_recipe(str(of_this_machine(tmp_path))),
        Workspace(tmp_path / "runs" / "tiny"),
        list[str](),
    )

    def probe(_: Recipe, layouts: Sequence[Layout], cluster_file: Path) -> None:
        probes.append(threading.current_thread().name)
        time.sleep(1.0)
        device = load_cluster(str(tmp_path / "machine.toml"))
        named = device.device.model_copy(update={"name": f"{processor_name()}, 1 core"})
        dump_toml(device.model_copy(update={"device": named}), cluster_file)

    monkeypatch.setattr(workspace, "probe_machine", probe)
    threads = [threading.Thread(target=place.cluster, args=(recipe,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(probes) == 1 and place.cluster(recipe).devices_per_node == 2
    assert not (place.folder / "probe.claims").exists()
    assert capsys.readouterr().err == f"process {os.getpid()} on {platform.node()} probes; waiting\n"


@pytest.mark.proof
def test_a_program_that_is_waited_for_ends_with_the_command(tmp_path: Path) -> None:
    """SIGTERM to the command alone, as a batch system or `timeout` sends it, while a probe is at work below it."""
    recipe = of_this_machine(tmp_path)
    with subprocess.Popen(
        [TRIMARAN, "bench", str(recipe)], cwd=tmp_path, stderr=subprocess.PIPE, text=True, env={**os.environ}
    ) as command:
        assert command.stderr is not None
        assert any("probe" in line for line in iter(command.stderr.readline, ""))
        command.send_signal(signal.SIGTERM)
        began = time.monotonic()
        command.stderr.read()
        assert command.wait(30) == 143
        assert time.monotonic() - began < 10
