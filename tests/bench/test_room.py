"""Claims about ranks that cannot find room: refused before they start, and never where they would have run."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trial_helpers import LIMITS, fake_worker
from trimaran.bench.sweep import run_sweep
from trimaran.bench.trial import room
from trimaran.bench.trial.room import Shortage, shortage
from trimaran.cost.calibration import Calibration
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.device import Device
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.workload import Workload
from trimaran.protocol import control_groups, host
from trimaran.recipe.recipe import Recipe
from trimaran.store import Store

WORKLOAD = Workload(model=load_model("gpt2-124m"), seq_len=1024, global_batch=16)
STACK = load_stack("trimaran")
SLOT = Device(kind="cpu", peak_tflops={"fp32": 0.1}, mem_gib=64, mem_bandwidth_gb_s=10, cores=1, context_gib=0.25)
LINK = Link(bandwidth_gbps=10, latency_us=1)
LAYOUTS = ("dp4,mbs1", "dp2,pp2,mbs4", "tp2,pp2,mbs2,recompute-full", "dp4,mbs2,fsdp")


def machine(host_mem_gib: float, nodes: int = 1) -> Cluster:
    return Cluster(
        device=SLOT, nodes=nodes, devices_per_node=4 // nodes, host_mem_gib=host_mem_gib, intra=LINK, inter=LINK
    )


def lacking(layout: Layout, cluster: Cluster, *, here: bool = False, mem_error: float = 0.08) -> Shortage | None:
    calibration = Calibration(mem_error=mem_error)
    return shortage(Case.of(WORKLOAD, cluster, STACK, calibration), layout, here=here)


@cache
def held_together(layout: Layout, *besides: str) -> float:
    """GiB of all ranks, their libraries once, and without parts that are named."""
    found = estimate(Case.of(WORKLOAD, machine(0.0), STACK, Calibration()), layout)
    left_out = ("context", *besides)
    own = [stage.total - sum(getattr(stage, part) for part in left_out) for stage in found.memory]
    return SLOT.context_gib + sum(own) * layout.devices / layout.pp


@given(text=st.sampled_from(LAYOUTS), has=st.floats(0.05, 4.0), mem_error=st.floats(0.0, 0.5))
def test_a_job_is_refused_only_well_above_what_there_is(text: str, has: float, mem_error: float) -> None:
    layout = parse_layout(text)
    needed = held_together(layout)
    lack = lacking(layout, machine(has * needed), mem_error=mem_error)
    assert (lack is not None) == (has < 1.0)
    if lack is not None:
        # by three standard errors of states and activations, no less than those of one that was fitted to nothing
        own = held_together(layout, "buffers") - SLOT.context_gib
        assert lack.certain == (own * math.exp(-3.0 * max(mem_error, 0.08)) > has * needed)
        assert ("may fail" in lack.sentence) != lack.certain
        assert f"{needed:.1f} GiB" in lack.sentence and f"host_mem_gib is {has * needed:.1f} GiB" in lack.sentence


def test_this_machine_counts_where_ranks_run_on_it_and_what_others_hold_of_it_is_never_certain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = parse_layout("dp4,mbs2")
    needed = held_together(layout)
    has = {"all": 2.0, "left": 0.5, "swap": 0.0}
    monkeypatch.setattr(room, "memory_gib", lambda: has["all"] * needed)
    monkeypatch.setattr(room, "free_memory_bytes", lambda: has["left"] * needed * 2**30)
    monkeypatch.setattr(room, "swap_bytes", lambda free=False: has["swap"] * needed * 2**30)

    def lacks() -> Shortage | None:
        return lacking(layout, machine(10 * needed), here=True)

    lack = lacks()
    assert lack is not None and not lack.certain and "what is left of this machine's memory now" in lack.sentence
    ways = ("end other programs", "recompute-full", "ZeRO stage 0: fsdp", "mbs 2")
    assert all(way in lack.sentence for way in ways)
    assert lacking(layout, machine(10 * needed)) is None, "elsewhere this machine's memory says nothing"
    has |= {"all": 0.5}
    lack = lacks()
    assert lack is not None and lack.certain and "this machine's memory with its swap is" in lack.sentence
    assert "end other programs" not in lack.sentence
    has |= {"swap": 0.6}
    assert lacks() is None


def test_ranks_share_the_memory_of_their_own_machine_alone() -> None:
    layout = parse_layout("dp4,mbs1")
    on_one, on_four = held_together(layout), held_together(layout) / 4 + SLOT.context_gib
    assert lacking(layout, machine(on_one * 0.9)) is not None
    assert lacking(layout, machine(on_four, nodes=4)) is None


def test_a_gpu_has_its_own_memory() -> None:
    layout, cluster = parse_layout("dp8,mbs1,bf16"), load_cluster("dgx-h100")
    workload = Workload(model=load_model("llama3-8b"), seq_len=8192, global_batch=8)
    lack = shortage(Case.of(workload, cluster, STACK), layout, here=False)
    assert lack is not None and lack.certain and "a rank is predicted to hold" in lack.sentence
    assert f"device.mem_gib is {cluster.device.mem_gib:.1f} GiB" in lack.sentence
    sharded = parse_layout("dp8,mbs1,fsdp,recompute-full,bf16")
    assert shortage(Case.of(workload, cluster, STACK), sharded, here=False) is None


def test_a_trial_without_room_is_told_of_in_its_row_and_the_others_run(
    recipe: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    wide = recipe.workload.model.model_copy(update={"vocab": 1_000_000})
    narrow = cluster.model_copy(update={"host_mem_gib": 0.5})
    heavy = recipe.model_copy(update={"workload": recipe.workload.model_copy(update={"model": wide})})
    with Store(tmp_path / "store.sqlite") as store:
        for each, status in ((heavy, "not_run"), (recipe, "ok")):
            (row,) = run_sweep(
                each, narrow, [parse_layout("dp1,mbs1")], store, data_dir=tmp_path, work_dir=tmp_path / "runs",
                limits=LIMITS, worker=fake_worker("ok"),
            )  # fmt: skip
            assert row.status == status, row.evidence
            assert (status == "ok") != ("host_mem_gib is 0.5 GiB" in (row.evidence or ""))


def test_only_of_trials_that_are_run_is_said_that_they_may_find_no_room(
    recipe: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    layout, said = parse_layout("dp1,mbs1"), list[str]()
    (held,) = estimate(Case.of(recipe.workload, cluster, recipe.stack), layout).memory
    tight = cluster.model_copy(update={"host_mem_gib": 0.99 * held.total})
    with Store(tmp_path / "store.sqlite") as store:
        for _ in range(2):
            (row,) = run_sweep(
                recipe, tight, [layout], store, data_dir=tmp_path, work_dir=tmp_path / "runs", limits=LIMITS,
                worker=fake_worker("ok"), say=said.append,
            )  # fmt: skip
            assert row.status == "ok"
    (sentence,) = said
    assert "may fail" in sentence and f"layout {layout}" in sentence


@pytest.mark.parametrize(
    ("line", "folder", "names", "prefix"),
    [
        ("0::/", "", ("memory.max", "memory.current"), ""),
        ("4:memory:/inside", "memory/inside", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"),
    ],
    ids=["version 2", "version 1"],
)
def test_a_control_group_s_limit_counts_and_pages_of_files_are_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, folder: str, names: tuple[str, str], prefix: str
) -> None:
    group = tmp_path / folder
    group.mkdir(parents=True, exist_ok=True)
    (tmp_path / "groups").write_text(f"1:cpu:/\n{line}\n")
    for name, size in zip(names, (1 << 20, 900_000), strict=True):
        (group / name).write_text(f"{size}\n")
    (group / "memory.stat").write_text(f"{prefix}inactive_file 300000\n{prefix}active_file 50000\n{prefix}anon 7\n")
    monkeypatch.setattr(control_groups, "_ROOT", tmp_path)
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "groups")
    assert host.free_memory_bytes() == (1 << 20) - 900_000 + 350_000
    (group / names[0]).write_text("max\n")
    assert host.free_memory_bytes() > 1 << 22
