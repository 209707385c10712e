"""Claims about the probe, measured for real on this machine with real ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from processes import processes_in, rank_of
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.nouns.attention import LatentAttention
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.operators.layer import layer_operators
from trimaran.operators.operator import Part
from trimaran.probe.__main__ import main as probe_main
from trimaran.probe.probe_settings import AttentionShape, ProbedProduct, ProbeSettings, model_products, probe_settings
from trimaran.probe.probed_cluster import measure
from trimaran.protocol.host import Work, memory_gib, processor_name, usable_cores
from trimaran.train.model.product import WIDE_CORES

MODEL = Model(layers=2, hidden=64, heads=4, ffn_hidden=256, vocab=512, max_positions=64)


def tiny_settings(**other: object) -> ProbeSettings:
    """A probe of a second or two: enough to see every part at work."""
    stated = {
        "device": "cpu", "ranks": 2, "threads_per_rank": 1, "groups": (2,), "precisions": ("fp32", "bf16"),
        "products": (ProbedProduct(m=64, n=64, k=64), *model_products(MODEL, 64, (1,), 2)),
        "attention": (AttentionShape(batch_heads=4, seq_len=64, head_dim=16),),
        "collective_bytes": (4096, 65536), "stream_mib": 8, "rounds": 3, "window_s": 0.02, "quick": False,
    }  # fmt: skip
    return ProbeSettings.model_validate({**stated, **other})


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return measure(tiny_settings(), "tiny")


def test_a_probe_measures_every_kind_of_figure(cluster: Cluster) -> None:
    device = cluster.device
    assert (cluster.nodes, cluster.devices_per_node, cluster.cores_per_node) == (1, 2, usable_cores())
    assert (device.kind, device.cores) == ("cpu", 1)
    assert 0.001 < device.peak_tflops["fp32"] < 10
    assert set(device.peak_tflops) == {"fp32", "bf16"}
    assert 0.3 < device.mem_bandwidth_gb_s < 2000
    assert 0.1 < device.op_overhead_us < 1000
    assert device.mem_gib == cluster.host_mem_gib == pytest.approx(memory_gib(), rel=0.01)
    assert 0.05 < device.context_gib < 4  # a process with PyTorch and no model
    # 0.5 MiB for each of 48 products where oneDNN makes those of fp32, next to nothing elsewhere
    assert device.experts_code_mib.get("fp32", 0.0) == pytest.approx(26.0 if WIDE_CORES else 0.0, abs=8.0)
    assert cluster.intra.bandwidth_gbps > 0.01
    assert {op.op for op in cluster.collectives} == {
        "all_reduce", "all_gather", "reduce_scatter", "broadcast", "send",
    }  # fmt: skip
    assert {(op.ranks, op.bytes) for op in cluster.collectives} == {(2, 4096), (2, 65536)}
    (contention,) = cluster.contention
    assert contention.ranks == 2
    kinds = ("matmul", "memory", "passes", "overhead", "often")
    assert all(0.2 < getattr(contention, kind) < 50 for kind in kinds)
    (attention,) = {(a.batch_heads, a.seq_len, a.head_dim) for a in cluster.attention}
    assert attention == (4, 64, 16)


def test_a_models_own_products_are_measured_forward_and_backward(cluster: Cluster) -> None:
    measured = {(rate.precision, rate.m, rate.n, rate.k) for rate in cluster.matmul}
    tokens, out, into = 64, 96, 64  # qkv on one of two ranks
    for precision in ("fp32", "bf16"):
        assert (precision, tokens, out, into) in measured
        assert (precision, tokens, into, out) in measured
        assert {(precision, out, into, tokens), (precision, into, out, tokens)} <= measured
        assert (precision, tokens, 256, 64) in measured, "the head: 512 tokens padded to 2 x 256"
    assert len(measured) == len(cluster.matmul), "a shape has one row"


def test_products_of_latent_attention_are_those_that_are_counted() -> None:
    latent = LatentAttention(query_rank=24, kv_rank=16, plain_dim=16, rotary_dim=8, value_dim=12)
    model = MODEL.model_copy(update={"head_dim": 24, "kv_heads": MODEL.heads, "latent_attention": latent})
    measured = {(each.m, each.n, each.k) for each in model_products(model, 64, (1,), 2)}
    part = replace(Part.whole(model, 64, load_stack("trimaran")), tp=2.0)
    products = [each for operator in layer_operators(part) if operator.kernel == "linear" for each in operator.forward]
    assert len(products) == 6 and {(each.m, each.n, each.k) for each in products} <= measured


def test_degrees_that_do_not_divide_the_model_are_left_out() -> None:
    assert model_products(MODEL, 64, (1,), 3) == []
    settings = probe_settings(
        device="cpu", slots=4, threads_per_rank=1, model=MODEL, seq_len=32, mbs=(1, 2), quick=True
    )  # fmt: skip
    assert settings.groups == (2, 4)
    assert len(settings.products) == len(set(settings.products))
    assert {a.batch_heads for a in settings.attention} == {1, 2, 4, 8}


def probe(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trimaran.probe", *arguments], capture_output=True, text=True, check=False, timeout=120
    )  # fmt: skip


@pytest.mark.proof
def test_the_program_writes_a_cluster_file_that_loads(tmp_path: Path) -> None:
    done = probe("--quick", "--slots", "1", "-o", str(tmp_path / "mine.toml"))
    assert done.returncode == 0, done.stderr
    cluster = load_cluster(str(tmp_path / "mine.toml"))
    assert (cluster.name, cluster.devices, cluster.device.cores) == ("mine", 1, usable_cores())
    assert cluster.collectives == cluster.contention == ()
    assert "probe" in cluster.source
    assert done.stdout == "" and done.stderr.startswith("progress: probe 1 of 12, ")


def test_a_mistake_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(*arguments: str) -> str:
        assert probe_main([*arguments, "-o", str(tmp_path / "x.toml")]) == 2
        said = capsys.readouterr().err
        assert len(said.strip().splitlines()) == 1
        return said

    assert "no-such-model" in refusal("--model", "no-such-model")
    assert "ask for at most" in refusal("--slots", "1000000")
    if not torch.cuda.is_available():
        assert "no CUDA device" in refusal("--device", "cuda")
    with pytest.raises(SystemExit, match="2"):
        probe_main(["--slots", "0"])
    assert not (tmp_path / "x.toml").exists()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("model name\t: AMD EPYC 9654\ncpu family\t: 25\n", "AMD EPYC 9654"),
        (
            "cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n\nmodel name\t: other\n",
            "AMD EPYC, family 26, model 2",
        ),
    ],
)
def test_a_processor_whose_name_lacks_a_number_is_told_from_its_makers_others(
    tmp_path: Path, text: str, name: str
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert processor_name(tmp_path / "cpuinfo") == name
    assert processor_name(tmp_path / "nowhere")


def test_what_other_programs_take_of_the_cores_is_seen_and_what_the_probe_takes_is_not() -> None:
    quiet = Work(at_s=0.0, cores=2, busy_s=50.0, own_s=7.0)
    assert quiet.others_share(Work(at_s=10.0, cores=2, busy_s=64.0, own_s=21.0)) == 0.0
    assert quiet.others_share(Work(at_s=10.0, cores=2, busy_s=69.0, own_s=21.0)) == pytest.approx(0.25)


@pytest.mark.proof
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux says what its cores do")
def test_a_probe_beside_a_busy_program_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    # a shell that leaves makes them nobody's: what this process starts itself counts as its own work
    spin = f"nice -n 5 {sys.executable} -c 'while True: pass' > /dev/null & echo $!"
    busy = [int(subprocess.check_output(["sh", "-c", spin], text=True)) for _ in range(usable_cores())]
    try:
        cluster = measure(tiny_settings(ranks=1, groups=()), "busy")
    finally:
        for one in busy:
            os.kill(one, signal.SIGKILL)
    assert "other programs took" in cluster.source
    assert "probe again on a quiet machine" in capfd.readouterr().err


def test_a_rank_that_fails_ends_the_probe_with_its_last_words() -> None:
    with pytest.raises(TrimaranError, match=r"(?i)rank \d of 2 failed: .*cuda") as error:
        measure(tiny_settings(device="cuda"), "none")
    assert "\n" not in str(error.value)


def ranks_of(folder: Path) -> list[int]:
    """Process ids of the ranks of a probe whose temporary files are in a folder."""
    return [int(process.name) for process in processes_in(folder) if rank_of(process) is not None]


def started_probe(folder: Path) -> subprocess.Popen[str]:
    """A probe of two slots, whose ranks have begun."""
    starter = subprocess.Popen(
        [sys.executable, "-m", "trimaran.probe", "--slots", "2", "-o", str(folder / "x.toml")],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while len(ranks_of(folder)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    return starter


def test_ranks_leave_when_their_starter_is_killed(tmp_path: Path) -> None:
    starter = started_probe(tmp_path)
    starter.send_signal(signal.SIGKILL)
    starter.communicate()
    deadline = time.monotonic() + 60
    while ranks_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ranks_of(tmp_path) == []


def test_what_ranks_are_forked_from_may_be_lost_before_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are then started by themselves, which say in their own words what is wrong."""
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so is of another machine')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(TrimaranError, match=r"rank \d of 2 failed: ImportError: libtorch_cpu.so is of another machine"):
        measure(tiny_settings(), "none")


@pytest.mark.proof
def test_a_killed_rank_ends_the_probe_and_is_named(tmp_path: Path) -> None:
    starter = started_probe(tmp_path)
    assert starter.stderr is not None
    while "contention" not in starter.stderr.readline():
        pass
    os.kill(max(ranks_of(tmp_path)), signal.SIGKILL)
    told = starter.communicate(timeout=60)[1].splitlines()[-1]
    assert starter.returncode == 2 and ranks_of(tmp_path) == []
    assert told == "trimaran: probe: rank 1 of 2 was killed by SIGKILL: try it again"
    assert not (tmp_path / "x.toml").exists()
