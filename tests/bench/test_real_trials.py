"""Claims about trials of the real trainer: real ranks, real text, real time."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest

from trimaran.bench import Limits, prepare_trial, run_sweep, run_trial
from trimaran.bench.local import LocalLauncher
from trimaran.bench.workspace import Workspace
from trimaran.cluster import Cluster
from trimaran.notation import parse_layout
from trimaran.recipe import DataSettings, Recipe
from trimaran.store import Store


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("To be, or not to be, that is the question. " * 2000)
    return path


@pytest.fixture
def real(recipe: Recipe, text: Path) -> Recipe:
    model = recipe.workload.model.model_copy(update={"vocab": 384})  # the tokenizer of bytes has a few more than 256
    return recipe.model_copy(
        update={
            "data": DataSettings(paths=(str(text),), tokenizer="bytes"),
            "workload": recipe.workload.model_copy(update={"model": model}),
        }
    )


@pytest.mark.timeout(900)  # a busy machine loads PyTorch slowly
def test_a_sweep_of_the_real_trainer_measures_every_kind_of_parallelism(
    real: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    workspace = Workspace(tmp_path)
    layouts = [parse_layout(text) for text in ("dp1,mbs4", "dp2,mbs2", "tp2,mbs4,recompute-full", "pp2,mbs2")]
    with Store(workspace.store) as store:
        rows = run_sweep(
            real, cluster, layouts, store, data_dir=workspace.data(real), work_dir=workspace.trials,
            limits=Limits(timeout_s=250),
        )  # fmt: skip
    for row in rows:
        assert row.status == "ok", row.evidence
        assert row.sec_per_it is not None
        assert 1e-4 < row.sec_per_it < 30
        assert len(row.step_times_s) == len(row.losses) == 6
        assert len(row.mem_gib_per_rank) == row.devices
        assert 0.05 < (row.mem_gib or 0) < 8
        assert row.losses[0] == pytest.approx(math.log(384), abs=0.5)
        assert row.losses == pytest.approx(rows[0].losses, rel=1e-4), "the loss is the same on every layout"


def listening_addresses(text: str) -> set[str]:
    """Addresses (hexadecimal, as the kernel prints them) on which processes that name `text` listen."""
    sockets = set()
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text.encode() in command.read_bytes():
                sockets |= {str(fd.readlink()) for fd in (command.parent / "fd").iterdir()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}


def test_ranks_listen_on_the_loopback_alone(real: Recipe, cluster: Cluster, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    trial = prepare_trial(
        real, cluster, parse_layout("dp2,mbs2"), data_dir=workspace.data(real), work_dir=workspace.trials
    )
    seen: set[str] = set()
    row = run_trial(
        trial,
        LocalLauncher(),
        Limits(timeout_s=250),
        on_step=lambda step: seen.update(listening_addresses(str(tmp_path))),
    )
    assert row.status == "ok", row.evidence
    assert seen == {"0100007F"}  # 127.0.0.1


def test_what_the_trainer_refuses_is_a_failure_with_its_own_words(
    real: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    trial = prepare_trial(real, cluster, parse_layout("dp1,mbs4"), data_dir=tmp_path / "no", work_dir=tmp_path)
    row = run_trial(trial, LocalLauncher(), Limits(timeout_s=250))
    assert row.status == "fail"
    assert "rank 0 refused: trimaran: " in (row.evidence or "").splitlines()[0]


def test_a_real_trial_over_its_memory_limit_is_out_of_memory(real: Recipe, cluster: Cluster, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    large = real.workload.model.model_copy(update={"vocab": 400_000})  # 400 MB of weights, gradients, moments
    recipe = real.model_copy(update={"workload": real.workload.model_copy(update={"model": large})})
    trial = prepare_trial(
        recipe, cluster, parse_layout("dp1,mbs4"), data_dir=workspace.data(real), work_dir=workspace.trials
    )
    row = run_trial(trial, LocalLauncher(), Limits(timeout_s=250, memory_gib=0.4))
    assert row.status == "oom", row.evidence
    assert "the trial's limit is 0.40 GiB" in (row.evidence or "")
