"""What torchtitan's layer has its TP ranks do, under each recompute: traced, beside the cost model's collectives.

    python benchmarks/traced/collectives.py

Needs `make peers`. Llama-3.1-8B over 8 TP ranks with sequence parallelism, under torchtitan 0.2.2's own apply_tp and
apply_ac on a fake process group; a layer's are those of a model of two layers less those of one. Writes
benchmarks/results/traced_collectives.md.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch._inductor.compile_fx
import torch.distributed as dist
from cases import PEERS
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from tracer import fake_mode

from trimaran.cost.kernels import recomputed
from trimaran.files.catalogue import load_model, load_stack
from trimaran.operators.layer import layer_operators
from trimaran.operators.operator import Part, Phase
from trimaran.train.programs.tracing import as_on_cuda

assert PEERS.is_dir(), "run `make peers` first"
RESULTS = Path(__file__).parents[1] / "results" / "traced_collectives.md"
MODEL, MBS, SEQ_LEN, TP = "llama3.1-8b", 2, 8192, 8
COUNTED = {"all_gather_into_tensor": "gathers", "reduce_scatter_tensor": "scatters"}
# torchtitan's word for each, and what the cost model's collectives of that word are beyond forward and backward
RECOMPUTES: dict[str, tuple[str, Phase | None]] = {
    "none": ("", None), "selective": ("op", "recompute"), "full": ("full", "forward"),
}  # fmt: skip


class Calls(TorchDispatchMode):
    """Counts the collectives that run while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[COUNTED.get(func.overloadpacket.__name__, "")] += 1
        return func(*args, **(kwargs or {}))


def traced(layers: int, word: str) -> tuple[Counter[str], Counter[str]]:
    """The collectives of a forward and of a backward."""
    torch._utils._get_available_device_type = lambda: "cpu"
    sys.modules.setdefault("torchtitan.models.moe.kernels", MagicMock())
    from torchtitan.distributed.activation_checkpoint import apply_ac
    from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list, apply_tp
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    model = load_model(MODEL)
    arguments = TransformerModelArgs(
        dim=model.hidden, n_layers=layers, n_heads=model.heads, n_kv_heads=model.kv_heads, multiple_of=1024,
        ffn_dim_multiplier=model.ffn_hidden * 3 / (8 * model.hidden), max_seq_len=SEQ_LEN, vocab_size=model.vocab,
    )  # fmt: skip
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TP)
    try:
        mesh = init_device_mesh("cpu", (TP,))
        with fake_mode(torch.bfloat16), as_on_cuda(fused_rms_norm=False):
            whole = Transformer(arguments)
            apply_tp(whole, mesh, loss_parallel=True, enable_float8_tensorwise_tp=False)
            if word:
                config = SimpleNamespace(
                    mode="full" if word == "full" else "selective", selective_ac_option=word,
                    per_op_sac_force_recompute_mm_shapes_by_fqns=[], preserve_rng_state=False,
                    determinism_check="none", early_stop=True, debug=False,
                )  # fmt: skip
                apply_ac(whole, config, model_compile_enabled=False, op_sac_save_list=_op_sac_save_list)
            with Calls() as forward:
                logits = whole(torch.zeros(MBS, SEQ_LEN, dtype=torch.int64))
            with Calls() as backward:
                logits.to_local().sum().backward()
    finally:
        dist.destroy_process_group()
    return forward.found, backward.found


def counted(phase: Phase, *, again: bool = False) -> Counter[str]:
    """A layer's collectives of a phase by the cost model: a sum is a scatter and a gather.

    Run `again`, they end where the recompute stops: the scatters of what does not run are left out.
    """
    part = Part(load_model(MODEL), SEQ_LEN, load_stack("torchtitan-0.2"), False, float(TP), float(MBS), True, 2.0, 2.0)
    found: Counter[str] = Counter()
    operators = layer_operators(part, "dense")
    stop = recomputed(operators) if again else len(operators)
    for index, operator in enumerate(operators):
        for collective in operator.collectives:
            if collective.axis == "tp" and collective.phase == phase:
                found["gathers"] += 1
                found["scatters"] += collective.kind == "all_reduce" and index < stop
    return found


def main() -> None:
    """Trace, count, write."""
    rows = ["| recompute | of a layer | traced forward | cost model | traced backward | cost model |",
            "| --- | --- | --: | --: | --: | --: |"]  # fmt: skip
    for recompute, (word, again) in RECOMPUTES.items():
        one, two = traced(1, word), traced(2, word)
        forward, backward = (more - fewer for more, fewer in zip(two, one, strict=True))
        model = counted("forward"), counted("backward") + (counted(again, again=True) if again else Counter())
        for name in COUNTED.values():
            rows.append(
                f"| {recompute} | {name} | {forward[name]} | {model[0][name]} | {backward[name]} | {model[1][name]} |"
            )
            if (forward[name], backward[name]) != (model[0][name], model[1][name]):
                raise SystemExit(f"the cost model counts other {name} under {recompute}: {rows[-1]}")
    title, _, rest = __doc__.partition("\n\n")
    RESULTS.write_text("\n".join([f"# {title}", "", rest.strip(), "", *rows, ""]), encoding="utf-8")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
