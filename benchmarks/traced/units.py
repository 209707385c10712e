"""What FSDP copies of a unit's weights and gradients in a step, traced beside the cost model's bytes a parameter.

    python benchmarks/traced/units.py

A block of two linear layers without biases, in bf16 with gradients reduced in fp32, under PyTorch's own FSDP1 and FSDP2
on a fake process group of 8. Bytes are read and written of what is whole; what a rank does to its own eighth is left
out. Writes benchmarks/results/traced_units.md.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trimaran.api import workload_of
from trimaran.cost.case import Case
from trimaran.cost.effects.effect import IterationCost
from trimaran.cost.effects.gradient_traffic import laid_bytes
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.states import gathered_bytes, sent_gradient_bytes
from trimaran.files.catalogue import load_cluster, load_stack

RESULTS = Path(__file__).parents[1] / "results" / "traced_units.md"
RANKS, WIDTH = 8, 512
PARAMETERS = 2 * WIDTH * WIDTH
COPYING = {"split_with_sizes_copy", "chunk_cat", "cat", "_to_copy", "copy_"}


class Copied(TorchDispatchMode):
    """Adds up the bytes that copies of whole units read and write while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in COPYING:
            read = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
            written = [t for t in tree_leaves((kwargs or {}).get("out", out)) if isinstance(t, Tensor)]
            if name == "copy_":
                written, read = read[:1], read[1:]
            if sum(t.numel() for t in read) >= PARAMETERS:
                self.moved[name] += sum(t.numel() * t.element_size() for t in (*read, *written))
        return out


def block() -> nn.Module:
    """Two linear layers: one unit."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))


def first() -> nn.Module:
    """Under FSDP1, as Composer's DEFAULT mixed precision asks for it."""
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    root = nn.Sequential(FullyShardedDataParallel(block(), mixed_precision=mixed, device_id=torch.device("cpu")))
    return FullyShardedDataParallel(root, mixed_precision=mixed, device_id=torch.device("cpu"))


def second() -> nn.Module:
    """Under FSDP2, as torchtitan asks for it."""
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(nn.Sequential(fully_shard(block(), mesh=mesh, mp_policy=policy)), mesh=mesh, mp_policy=policy)


def traced(made: Callable[[], nn.Module]) -> Counter[str]:
    """The copies of a step behind the first one."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        model = made()
        for _ in range(2):
            with Copied() as copied:
                model(torch.zeros(4, WIDTH, requires_grad=True)).sum().backward()
    finally:
        dist.destroy_process_group()
    return copied.moved


def counted(stack: str) -> float:
    """Bytes a parameter by the cost model."""
    known = load_stack(stack)
    case = Case.of(workload_of("llama3.1-8b", 16), load_cluster("dgx-h100"), known)
    grid = LayoutGrid.build(
        case.workload, known, dp=RANKS, mbs=1, precision="bf16", zero_stage=3, dp_kind="fully_sharded"
    )
    iteration = IterationCost(case, grid)
    return float(laid_bytes(iteration, gathered_bytes(case, grid), sent_gradient_bytes(grid, known))[0])


def main() -> None:
    """Trace, count, write."""
    warnings.simplefilter("ignore")
    rows = ["| software | traced, bytes a parameter | of these | cost model |", "| --- | --: | --- | --: |"]
    for name, stack, made in (("FSDP1", "torch-fsdp", first), ("FSDP2", "torchtitan", second)):
        moved, model = traced(made), counted(stack)
        total = sum(moved.values()) / PARAMETERS
        parts = ", ".join(f"{kind} {size / PARAMETERS:g}" for kind, size in sorted(moved.items()))
        rows.append(f"| {name}, `{stack}` | {total:g} | {parts} | {model:g} |")
        if total != model:
            raise SystemExit(f"the cost model counts other bytes: {rows[-1]}")
    title, _, rest = (__doc__ or "").partition("\n\n")
    RESULTS.write_text("\n".join([f"# {title}", "", rest.strip(), "", *rows, ""]), encoding="utf-8")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
