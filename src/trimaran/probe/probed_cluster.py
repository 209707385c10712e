"""Runs the ranks of a probe as processes and makes a Cluster of what they report."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from pydantic import ValidationError

from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.device import Device
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.hardware.measured import CollectiveTime, four_digits
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.precision import Rate
from trimaran.nouns.probed_model import ProbedModel
from trimaran.nouns.text import counted
from trimaran.probe.probe_result import ProbeResult
from trimaran.probe.probe_settings import ProbeSettings
from trimaran.protocol import environment as env
from trimaran.protocol import progress
from trimaran.protocol.exits import signal_name
from trimaran.protocol.host import QUIET_SHARE, Work, memory_gib, usable_cores
from trimaran.protocol.nursery import ForkedRank, Nursery, NurseryLostError
from trimaran.protocol.programs import PROBE

# Long enough for a slow disk to load PyTorch on as many ranks as there may be, and all sizes.
TIMEOUT_S = 1800.0

# The command of one rank, in the folder of its settings; it settles without cores, limits and memory of its own.
_RANK = (sys.executable, *PROBE)
_SETTLES = ("-", "-", "-")
_SETTINGS = "settings.json"


def measure(settings: ProbeSettings, name: str) -> Cluster:
    """Measure this machine as one node of `settings.ranks` slots.

    Raises TrimaranError with a rank's last words where one fails.
    """
    before = Work.so_far()
    with tempfile.TemporaryDirectory(prefix="trimaran-probe-") as folder:
        _run_ranks(settings, Path(folder))
        try:
            result = ProbeResult.model_validate_json((Path(folder) / "result.json").read_text("utf-8"))
        except (OSError, ValidationError) as error:
            raise TrimaranError(f"probe: the ranks left no result that can be read ({error})") from None
    cluster = cluster_from(settings, result, name)
    after = Work.so_far()
    others = before.others_share(after) if before and after else 0.0
    if others > QUIET_SHARE:
        busy = f"other programs took {others:.0%} of the cores' time"
        progress.tell(f"{busy}, so the figures may be too low: probe again on a quiet machine")
        cluster = cluster.model_copy(update={"source": f"{cluster.source}; {busy}"})
    return cluster


def cluster_from(settings: ProbeSettings, result: ProbeResult, name: str) -> Cluster:
    """The cluster file's content: one node, its slots, and everything measured."""
    on_cpu = settings.device == "cpu"
    peaks: dict[Rate, float] = {
        precision: max(rate.tflops for rate in result.matmul if rate.precision == precision)
        for precision in settings.precisions
    }
    if result.eight_bit_tflops:
        peaks["fp8"] = result.eight_bit_tflops
    threads = settings.threads_per_rank
    device = Device(
        name=f"{result.device_name}, {counted(threads, 'core')}" if on_cpu else result.device_name,
        kind="cpu" if on_cpu else "gpu",
        peak_tflops={precision: four_digits(peak) for precision, peak in peaks.items()},
        mem_gib=four_digits(result.mem_gib),
        mem_bandwidth_gb_s=four_digits(result.mem_bandwidth_gb_s),
        context_gib=four_digits(result.context_gib),
        multiprocessors=result.multiprocessors,
        cores=threads if on_cpu else 0,
        op_overhead_us=four_digits(result.op_overhead_us),
        experts_code_mib={precision: four_digits(mib) for precision, mib in result.experts_code_mib.items()},
    )
    link = _link(result.collectives, result.mem_bandwidth_gb_s)
    return Cluster(
        name=name,
        device=device,
        nodes=1,
        devices_per_node=settings.ranks,
        intra=link,
        inter=link,
        cores_per_node=usable_cores() if on_cpu else 0,
        host_mem_gib=four_digits(memory_gib()) if on_cpu else 0.0,
        source=f"trimaran {version('trimaran')} probe{' --quick' if settings.quick else ''}, "
        f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC",
        matmul=tuple(rate.model_copy(update={"tflops": four_digits(rate.tflops)}) for rate in result.matmul),
        collectives=tuple(c.model_copy(update={"time_us": four_digits(c.time_us)}) for c in result.collectives),
        attention=tuple(
            a.model_copy(update={"forward_us": four_digits(a.forward_us), "backward_us": four_digits(a.backward_us)})
            for a in result.attention
        ),
        contention=tuple(
            c.model_copy(
                update={k: four_digits(getattr(c, k)) for k in ("matmul", "memory", "passes", "overhead", "often")}
            )
            for c in result.contention
        ),
        models=_models(settings, result),
    )


def _models(settings: ProbeSettings, result: ProbeResult) -> tuple[ProbedModel, ...]:
    """The model whose parts were measured, if any was."""
    if settings.model is None or not result.parts:
        return ()
    times = (
        time.model_copy(update={k: four_digits(getattr(time, k)) for k in ("forward_us", "backward_us")})
        for time in result.parts
    )
    return (ProbedModel(stack=settings.stack, model=settings.model, times=tuple(times)),)


def _link(collectives: Sequence[CollectiveTime], mem_bandwidth_gb_s: float) -> Link:
    """Latency of the smallest send and bandwidth of the largest.

    A node of one slot has no link: then nothing is ever sent over it, and memory's rate stands in.
    """
    sends = sorted((c.bytes, c.time_us) for c in collectives if c.op == "send")
    if not sends:
        return Link(bandwidth_gbps=four_digits(mem_bandwidth_gb_s * 8), latency_us=0.0)
    size, time_us = sends[-1]
    return Link(bandwidth_gbps=four_digits(size * 8 / time_us / 1e3), latency_us=four_digits(sends[0][1]))


def _run_ranks(settings: ProbeSettings, folder: Path) -> None:
    (folder / _SETTINGS).write_text(settings.model_dump_json(), encoding="utf-8")
    environment = {**os.environ, **env.computing(settings.threads_per_rank), env.GLOO_INTERFACE: env.LOOPBACK_INTERFACE}
    ranks = range(settings.ranks)
    # ranks on GPUs are started by themselves, as the trainer's are
    if settings.device == "cpu" and sys.platform == "linux":
        with contextlib.suppress(NurseryLostError), contextlib.closing(Nursery(_RANK, environment)) as nursery:
            _wait([_forked(nursery, folder, rank) for rank in ranks], folder)
            return
    with contextlib.ExitStack() as ended:
        _wait([_started(environment, folder, rank, ended) for rank in ranks], folder)


def _forked(nursery: Nursery, folder: Path, rank: int) -> ForkedRank:
    with _stderr_of(folder, rank).open("wb") as stderr:
        output = (sys.stderr.fileno(), stderr.fileno())
        return nursery.fork(_SETTLES, [_SETTINGS], {env.RANK: str(rank)}, folder, output, {})


def _started(
    environment: Mapping[str, str], folder: Path, rank: int, ended: contextlib.ExitStack
) -> subprocess.Popen[bytes]:
    with _stderr_of(folder, rank).open("wb") as stderr:
        process = subprocess.Popen(
            [*_RANK, _SETTINGS],
            env={**environment, env.RANK: str(rank)},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            stderr=stderr,
        )
    ended.enter_context(process)
    ended.callback(process.kill)
    return process


def _stderr_of(folder: Path, rank: int) -> Path:
    return folder / f"stderr.{rank}"


def _why(codes: Sequence[int | None], folder: Path) -> str:
    """Which rank failed and why: one that was killed first of all, for want of which the others fail."""
    failed = min((rank for rank, code in enumerate(codes) if code), key=lambda rank: codes[rank] or 0)
    code, which = codes[failed] or 0, f"rank {failed} of {len(codes)}"
    if code < 0:
        return f"{which} was killed by {signal_name(-code)}: try it again"
    lines = _stderr_of(folder, failed).read_text(errors="replace").strip().splitlines()
    return f"{which} failed: {lines[-1] if lines else f'status {code}'}"


def _wait(ranks: Sequence[subprocess.Popen[bytes] | ForkedRank], folder: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        codes = [process.poll() for process in ranks]
        if any(codes):
            raise TrimaranError(f"probe: {_why(codes, folder)}")
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise TrimaranError(f"probe: {len(ranks)} ranks were not done after {TIMEOUT_S:.0f} s: try --quick")
        time.sleep(0.05)
