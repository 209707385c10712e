"""On a CUDA device the trainer does what it does on the CPU. Skipped where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.ports import free_port
from torch.testing._internal.distributed.fake_pg import FakeStore

from shapes import MIXTURE
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.layout.notation import parse_layout
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.job import TrainJob
from trimaran.train.comm.device_kind import lacks_eight_bit
from trimaran.train.comm.group import GroupFactory
from trimaran.train.comm.mesh import build_mesh
from trimaran.train.comm.waiting import RENDEZVOUS_TIMEOUT
from trimaran.train.model.flash_kernels import attend, attend_backward
from trimaran.train.model.narrow import add_narrow_product, cast_gradient, narrow_linear, narrow_product
from trimaran.train.run.device import choose_device

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
on_a_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is at hand")
on_two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two CUDA devices are at hand")
on_four_devices = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="no four CUDA devices are at hand")
on_an_eight_bit_device = pytest.mark.skipif(
    not torch.cuda.is_available() or lacks_eight_bit(torch.device("cuda", 0)) is not None,
    reason="no CUDA device with 8-bit products is at hand",
)


def losses(job: TrainJob) -> list[float]:
    path = Path(job.out_dir) / "job.json"
    path.write_text(job.model_dump_json())
    world = {"WORLD_SIZE": str(job.layout.devices), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "trimaran.train.process.worker", str(path)]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(job.layout.devices)
    ]
    try:
        assert [rank.wait(timeout=250) for rank in ranks] == [0] * len(ranks)
    finally:
        for rank in ranks:
            rank.kill()
    return json.loads((path.parent / "result.json").read_text())["losses"]


@pytest.mark.gpu
@on_a_device
@pytest.mark.parametrize(
    "layout", ["dp1,mbs24", "dp1,mbs8,recompute-full", "dp1,mbs24,zero1", "dp1,mbs8,offload-activations"]
)
def test_a_device_s_loss_is_the_cpu_s(make_job: Callable[..., TrainJob], layout: str) -> None:
    on_cpu = losses(make_job(layout))
    assert losses(make_job(layout).model_copy(update={"device": "cuda"})) == pytest.approx(on_cpu, rel=1e-4)


@pytest.mark.gpu
@on_two_devices
@pytest.mark.parametrize(
    "layout",
    ["dp2,mbs12", "dp2,mbs6,zero1", "dp2,mbs6,zero3", "dp2,mbs12,ps", "tp2,mbs24", "tp2,mbs24,sp", "pp2,mbs6",
     "pp2,vpp2,mbs6", "pp2,mbs6,zero_bubble", "cp2,mbs24", "cp2,mbs24,cp-all_gather", "cp2,mbs24,cp-ulysses,zero1"],
)  # fmt: skip
def test_two_devices_loss_is_the_cpu_s(make_job: Callable[..., TrainJob], layout: str) -> None:
    on_cpu = losses(make_job("dp1,mbs24"))
    assert losses(make_job(layout).model_copy(update={"device": "cuda"})) == pytest.approx(on_cpu, rel=1e-4)


@pytest.mark.gpu
@on_a_device
@pytest.mark.parametrize("layout", ["dp1,mbs24", "dp1,mbs8,recompute-full"])
def test_a_device_s_loss_of_a_mixture_is_the_cpu_s(make_job: Callable[..., TrainJob], layout: str) -> None:
    on_cpu = losses(make_job(layout, model=MIXTURE, balance_loss=0.01))
    on_device = make_job(layout, model=MIXTURE, balance_loss=0.01).model_copy(update={"device": "cuda"})
    assert losses(on_device) == pytest.approx(on_cpu, rel=1e-4)


@pytest.mark.gpu
@on_two_devices
@pytest.mark.parametrize("layout", ["dp2,mbs12,ep2", "dp2,mbs12,ep2,zero1", "dp2,mbs12,etp2", "tp2,mbs24,sp,ep2,etp1"])
def test_two_devices_loss_of_a_mixture_is_the_cpu_s(make_job: Callable[..., TrainJob], layout: str) -> None:
    on_cpu = losses(make_job("dp1,mbs24", model=MIXTURE))
    on_device = make_job(layout, model=MIXTURE).model_copy(update={"device": "cuda"})
    assert losses(on_device) == pytest.approx(on_cpu, rel=1e-4)


@pytest.mark.gpu
@on_four_devices
@pytest.mark.parametrize(
    "layout", ["dp4,shard2,mbs6,zero3", "dp4,shard2,mbs6,zero1", "dp2,cp2,mbs12", "dp2,tp2,mbs12,sp"]
)
def test_four_devices_loss_is_the_cpu_s(make_job: Callable[..., TrainJob], layout: str) -> None:
    on_cpu = losses(make_job("dp1,mbs24"))
    assert losses(make_job(layout).model_copy(update={"device": "cuda"})) == pytest.approx(on_cpu, rel=1e-4)


@pytest.mark.gpu
@on_a_device
@pytest.mark.parametrize("layout", ["dp1,mbs8,bf16", "dp1,mbs4,bf16", "dp1,mbs8,bf16,recompute-full", "dp1,mbs4"])
def test_a_device_s_memory_is_what_is_predicted(make_job: Callable[..., TrainJob], layout: str) -> None:
    """To 10%, of a rank that the allocator and the context together hold."""
    model = Model(layers=8, hidden=1024, heads=16, vocab=300, max_positions=1024)
    job = make_job(layout, model=model, global_batch=8, steps=3)
    long = job.workload.model_copy(update={"seq_len": 1024})
    job = job.model_copy(update={"device": "cuda", "workload": long})
    losses(job)
    held_gib = max(json.loads((Path(job.out_dir) / "result.json").read_text())["mem_gib_per_rank"])
    case = Case.of(job.workload, load_cluster("dgx-h100"), load_stack("trimaran"))
    assert estimate(case, job.layout).mem_gib == pytest.approx(held_gib, rel=0.1)


@pytest.mark.gpu
@on_an_eight_bit_device
@pytest.mark.parametrize("recompute", ["", ",recompute-full"])
def test_a_device_s_fp8_loss_is_the_cpu_s(make_job: Callable[..., TrainJob], recompute: str) -> None:
    """Both cast the same numbers; what they add up in another order, 16 bit round apart."""
    layout = f"dp1,mbs8,fp8{recompute}"
    on_cpu = losses(make_job(layout))
    assert losses(make_job(layout).model_copy(update={"device": "cuda"})) == pytest.approx(on_cpu, rel=5e-3)


@pytest.mark.gpu
@on_an_eight_bit_device
@pytest.mark.parametrize(("tokens", "out", "into"), [(64, 48, 96), (21, 24, 40)])
def test_a_device_s_8_bit_products_are_the_cpu_s(tokens: int, out: int, into: int) -> None:
    numbers = torch.Generator().manual_seed(1)
    x, dy, matrix = (
        torch.randn(shape, generator=numbers).bfloat16() for shape in ((tokens, into), (tokens, out), (out, into))
    )
    found = []
    for device in ("cpu", "cuda"):
        grads = torch.zeros(out, into, device=device)
        gradient = cast_gradient(dy.to(device))
        add_narrow_product(grads, gradient, x.to(device))
        products = (narrow_linear(x.to(device), matrix.to(device)), narrow_product(gradient, matrix.to(device)), grads)
        found.append([each.float().cpu() for each in products])
    for on_cpu, on_device in zip(*found, strict=True):
        torch.testing.assert_close(on_device, on_cpu, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@on_a_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_both_passes_of_a_device_s_attention_are_the_cpu_s(dtype: torch.dtype, masked: bool, kv_heads: int) -> None:
    numbers = torch.Generator().manual_seed(1)
    heads = (4, kv_heads, kv_heads, 4)
    q, k, v, dy = (torch.randn(2, each, 80, 32, generator=numbers).to(dtype) for each in heads)
    mask = None
    if masked:
        mask = torch.zeros(2, 1, 80, 80).masked_fill_(torch.ones(80, 80).triu(1).bool(), -torch.inf)
        mask[0, :, 40:, :40] = -torch.inf
    found = []
    for device in ("cpu", "cuda"):
        there = [tensor.to(device) for tensor in (q, k, v)]
        mask_there = None if mask is None else mask.to(device, dtype)
        y, sums = attend(*there, causal=not masked, mask=mask_there)
        gradients = attend_backward(dy.to(device), *there, y, sums.contiguous(), causal=not masked, mask=mask_there)
        found.append([each.float().cpu() for each in (y, sums, *gradients)])
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for on_cpu, on_device in zip(*found, strict=True):
        torch.testing.assert_close(on_device, on_cpu, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@on_a_device
def test_a_checkpoint_of_a_device_goes_on_there_and_on_the_cpu(
    make_job: Callable[..., TrainJob], tmp_path: Path
) -> None:
    job = make_job("dp1,mbs24", steps=6, checkpoint_every=3).model_copy(update={"device": "cuda"})
    undisturbed = losses(job)
    first = job.model_copy(update={"steps": 3, "checkpoint_dir": str(tmp_path)})
    losses(first)
    resumed = first.model_copy(update={"steps": 6, "resume": True})
    on_cpu = resumed.model_copy(update={"device": "cpu"})
    assert losses(on_cpu) == pytest.approx(undisturbed[3:], rel=1e-4)


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_the_benchmark_s_program_runs_at_a_small_size_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--smoke", "--steps", "6", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.iterdir()
    rows = [line for line in written.read_text().splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[0] for row in rows[1:]] == [
        "| plain PyTorch", "| plain PyTorch, torch.compile", "| Trimaran", "| Trimaran, recompute",
        "| Trimaran, fp8",
    ]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_benchmark_says_so_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "no CUDA device is at hand: nothing is measured\n"
    assert done.stdout.strip() in (tmp_path / "gpu.md").read_text()


def test_what_goes_down_a_pipeline_has_a_communicator_of_its_own_on_a_device() -> None:
    """Also where the pipeline is the whole world, which has a communicator from the start."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = build_mesh(parse_layout("pp2"), 0, range(2), GroupFactory(torch.device("cuda")))
        assert mesh is not None and mesh.pp.handle is not mesh.pp_returning.handle
    finally:
        dist.destroy_process_group()


def test_ranks_wait_for_each_other_as_long_in_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's own limit is 10 minutes, and that of the world, which is stated, 30."""
    make, limits = dist.new_group, list[object]()

    def made(ranks: list[int], **stated: object) -> object:
        limits.append(stated.get("timeout"))
        return make(ranks, **stated)

    monkeypatch.setattr(dist, "new_group", made)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        assert build_mesh(parse_layout("dp2,pp2"), 0, range(4), GroupFactory(torch.device("cuda"))) is not None
    finally:
        dist.destroy_process_group()
    assert limits and set(limits) == {RENDEZVOUS_TIMEOUT}


def test_fp8_is_refused_on_a_device_without_8_bit_products(
    make_job: Callable[..., TrainJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch, "set_flush_denormal", lambda mode: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    job = make_job("dp1,mbs24,fp8").model_copy(update={"device": "cuda"})
    with pytest.raises(TrimaranError, match=r"fp8 needs .* 8\.9 or later, but cuda:0 is of .* 8\.0: set prec"):
        choose_device(job)
    assert not chosen
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_device(job) == torch.device("cuda", 0)


@pytest.mark.parametrize(("count", "local_rank", "index"), [(1, 0, 0), (1, 3, 0), (4, 3, 3), (2, 2, None)])
def test_a_rank_takes_its_own_device_or_the_only_one_it_is_shown(
    make_job: Callable[..., TrainJob], monkeypatch: pytest.MonkeyPatch, count: int, local_rank: int, index: int | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "set_flush_denormal", lambda mode: None)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    job = make_job("dp1,mbs24").model_copy(update={"device": "cuda"})
    if index is None:
        with pytest.raises(TrimaranError, match="local rank 2 has no CUDA device, this node shows 2"):
            choose_device(job)
    else:
        assert choose_device(job) == torch.device("cuda", index)
