"""What one rank of a probe does, from meeting the others to the result."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional

from trimaran.probe.alone import (
    attention_times,
    eight_bit_tflops,
    eight_bit_timing,
    experts_code_mib,
    kernels_timing,
    matmul_rates,
    memory_bandwidth_gb_s,
    op_overhead_us,
    products_timing,
)
from trimaran.probe.parts import part_times, parts_timing
from trimaran.probe.probe_result import ProbeResult
from trimaran.probe.probe_settings import ProbeSettings
from trimaran.probe.together import CollectiveTiming, ContentionLooks, make_groups
from trimaran.protocol import progress
from trimaran.protocol.host import GIB, memory_gib, processor_name

# How often a probe goes through all its parts, so that the samples of each lie apart.
SPELLS = 3
# Of a spell's time, by part, on two cores: without a model, and with one.
SHARES = (0.25, 0.55, 0.12, 0.08)
SHARES_WITH_MODEL = (0.12, 0.28, 0.3, 0.25, 0.05)


def run(settings_file: Path) -> None:
    """Measure as one rank of the probe that `settings_file` states; rank 0 leaves `result.json` beside it."""
    folder = settings_file.absolute().parent
    settings = ProbeSettings.model_validate_json(settings_file.read_text("utf-8"))
    rank = int(os.environ["RANK"])
    torch.set_num_threads(settings.threads_per_rank)
    device = torch.device(settings.device, rank) if settings.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=(folder / "rendezvous").as_uri(), rank=rank, world_size=settings.ranks)
    result = _measure(settings, rank, device)
    if result is not None:
        (folder / "result.json").write_text(result.model_dump_json(), encoding="utf-8")
    dist.destroy_process_group()


def _measure(settings: ProbeSettings, rank: int, device: torch.device) -> ProbeResult | None:
    """All measurements, each in spells that lie apart; the result on rank 0, None on the others."""
    groups = make_groups(settings, rank, device)
    context_gib = _context_gib(device)
    contexts = [torch.zeros(1, device=device) for _ in range(settings.ranks)]
    dist.all_gather(contexts, torch.tensor([context_gib], device=device))

    looks = ContentionLooks(settings, groups, rank, device)
    collectives = CollectiveTiming(settings, groups, device)
    # before products of many shapes, for which the library would give up older code meanwhile
    code = experts_code_mib(settings.precisions, device) if rank == 0 else {}
    alone = Alone(settings, device)
    progress_told = _Progress(rank, SHARES if settings.model is None else SHARES_WITH_MODEL)
    for spell in range(SPELLS):
        share = (spell + 1) / SPELLS
        progress_told.enter(f"contention of {settings.ranks} slots")
        looks.spell(share)
        progress_told.enter("collectives and sends")
        collectives.spell(share)
        dist.barrier()
        if rank == 0:
            alone.spell(share, progress_told)
        dist.barrier()  # the others sleep here while rank 0 measures alone
    if rank:
        return None
    products, kernels = alone.products.seconds(), alone.kernels.seconds()
    return ProbeResult(
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        mem_gib=torch.cuda.mem_get_info(device)[1] / GIB if device.type == "cuda" else memory_gib(),
        multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0,
        context_gib=torch.cat(contexts).median().item(),
        mem_bandwidth_gb_s=memory_bandwidth_gb_s(kernels, settings.stream_mib),
        op_overhead_us=op_overhead_us(kernels),
        experts_code_mib=code,
        matmul=matmul_rates(products, alone.products.left_out),
        eight_bit_tflops=eight_bit_tflops(alone.eight_bit.seconds()),
        attention=attention_times(kernels),
        collectives=collectives.result(),
        contention=looks.result(),
        parts=part_times(alone.parts.seconds(), settings.model) if alone.parts and settings.model else (),
    )


class Alone:
    """What rank 0 is timed with while the others sleep."""

    def __init__(self, settings: ProbeSettings, device: torch.device) -> None:
        self._settings = settings
        self.products = products_timing(settings, device)
        self.eight_bit = eight_bit_timing(settings, device)
        self.parts = parts_timing(settings.model, settings, device) if settings.model else None
        self.kernels = kernels_timing(settings, device)

    def spell(self, share: float, progress_told: _Progress) -> None:
        """Take samples until `share` of all has been taken."""
        precisions = ", ".join(self._settings.precisions)
        progress_told.enter(f"{len(self._settings.products)} matrix products in {precisions}")
        self.products.spell(share)
        self.eight_bit.spell(share)
        if self.parts is not None:
            progress_told.enter(f"layers and head of the model, {len(self._settings.parts)} cases in {precisions}")
            self.parts.spell(share)
        progress_told.enter("attention, memory, operators")
        self.kernels.spell(share)


def _context_gib(device: torch.device) -> float:
    """What a rank holds before it has a model: libraries, connections, the kernels of a first step."""
    x = torch.randn(1, 2, 16, 16, device=device, requires_grad=True)
    y = functional.layer_norm(functional.gelu(x @ x), (16,))
    torch.autograd.grad(functional.scaled_dot_product_attention(y, y, y, is_causal=True).sum(), x)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return (total - free - torch.cuda.memory_reserved(device)) / GIB
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / GIB


class _Progress:
    """Tells, on rank 0, which part of the probe is measured and about how long the rest takes."""

    def __init__(self, rank: int, shares: tuple[float, ...]) -> None:
        self._tells, self._begin, self._entered = rank == 0, time.perf_counter(), 0
        self._shares = tuple(share / SPELLS for share in shares) * SPELLS

    def enter(self, doing: str) -> None:
        """The part that begins now."""
        past = sum(self._shares[: self._entered])
        self._entered += 1
        if not self._tells:
            return
        left = f", about {(time.perf_counter() - self._begin) * (1 - past) / past:.0f} s left" if past else ""
        progress.tell(f"probe {self._entered} of {len(self._shares)}, {doing}{left}", sys.stdout)
