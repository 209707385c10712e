"""A whole training step of torchtitan's Llama-3-8B under FSDP2, traced, and what CUDA's allocator would reserve for it.

    python benchmarks/traced/step.py [--devices 8] [--recompute none|op|2|full]

Needs `make peers`. Every tensor's making and freeing over four steps is noted, then played into the allocator's rules
with expandable segments (c10/cuda/CUDACachingAllocator.cpp: the smallest free block that fits, else the end grows). How
far its end stands above the peak of what is alive, of the logits and their copies, is the `fragmentation` of
torchtitan's stacks.
"""

from __future__ import annotations

import argparse
import bisect
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

sys.path.append(str(Path(__file__).parents[1]))

import torch
import torch._inductor.compile_fx
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from tracer import Live, fake_mode

from _peers import need_peers
from trimaran.train.programs.tracing import as_on_cuda

need_peers()
GIB, SPLIT, ROUND, STEPS = 2.0**30, 1 << 20, 512, 4
COPY = 4 * 2 * 8192 * 128256


def traced_step(devices: int, recompute: str) -> Live:
    """Steps of local batch 2 x 8192 tokens on one of `devices` ranks."""
    torch._utils._get_available_device_type = lambda: "cpu"
    sys.modules["torchtitan.models.moe.kernels"] = MagicMock()  # its Triton kernels, which no Llama calls
    from torchtitan.distributed.activation_checkpoint import apply_ac
    from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list, apply_fsdp
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    arguments = TransformerModelArgs(
        dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=1024, rope_theta=500000,
        vocab_size=128256, max_seq_len=8192,
    )  # fmt: skip
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
    mesh, live = init_device_mesh("cpu", (devices,)), Live()
    with fake_mode(), as_on_cuda(fused_rms_norm=False):
        with torch.device("meta"):
            model = Transformer(arguments)
        if recompute != "none":
            config = SimpleNamespace(
                mode="full" if recompute == "full" else "selective", selective_ac_option=recompute,
                per_op_sac_force_recompute_mm_shapes_by_fqns=[], preserve_rng_state=False, determinism_check="none",
                early_stop=True, debug=False,
            )  # fmt: skip
            apply_ac(model, config, op_sac_save_list=_op_sac_save_list)
        apply_fsdp(model, mesh, torch.bfloat16, torch.float32, False)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            live.watch(parameter.to_local(), "parameter")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        with live:
            for _ in range(STEPS):
                live.peak = 0
                optimizer.zero_grad()
                tokens, targets = (torch.zeros(2, 8192, dtype=torch.int64) for _ in range(2))
                logits = model(tokens)
                loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))
                del logits
                loss.backward()
                del loss
                optimizer.step()
    return live


def reserved(events: Iterable[tuple[int, int]]) -> int:
    """Bytes that one expandable segment grows to; blocks of a MiB and less have a pool of their own."""
    free: list[tuple[int, int]] = []
    placed: dict[int, tuple[int, int]] = {}
    end = 0
    for key, change in events:
        size = -(-abs(change) // ROUND) * ROUND
        if size <= SPLIT:
            continue
        if change < 0:
            begin, size = placed.pop(key)
            at = bisect.bisect(free, (begin, 0))
            if at < len(free) and begin + size == free[at][0]:
                size += free.pop(at)[1]
            if at and sum(free[at - 1]) == begin:
                at -= 1
                begin, before = free.pop(at)
                size += before
            free.insert(at, (begin, size))
            continue
        fitting = [(length, begin) for begin, length in free if length >= size]
        if fitting:
            length, begin = min(fitting)
            free.remove((begin, length))
            if length - size > SPLIT:
                bisect.insort(free, (begin + size, length - size))
            else:
                size = length
        else:
            begin = free.pop()[0] if free and sum(free[-1]) == end else end
            end = begin + size
        placed[key] = begin, size
    return end


def main() -> None:
    """Trace, play, print."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--devices", type=int, default=8)
    arguments.add_argument("--recompute", choices=("none", "op", "2", "full"), default="op")
    options = arguments.parse_args()
    live = traced_step(options.devices, options.recompute)
    alive, end, copy = live.peak / GIB, reserved(live.events) / GIB, COPY / GIB
    print(f"alive {alive:.1f} GiB at most, reserved {end:.1f}; one fp32 copy of the logits has {copy:.1f}")


if __name__ == "__main__":
    main()
