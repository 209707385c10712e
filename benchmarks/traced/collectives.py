"""What torchtitan's layer has its TP ranks do, under each recompute: traced, beside the cost model's collectives.

    python benchmarks/traced/collectives.py

Needs `make peers`. Llama-3.1-8B over 8 TP ranks with sequence parallelism, two sequences and one, under torchtitan
0.2.2's own apply_tp and apply_ac on a fake process group; a layer's are those of a model of two layers less those of
one. Copies are of what is whole, to lay slices along the sequence: DTensor's gathers and scatters have them along the
first dimension. A selective recompute in eager mode copies once more, for a scatter whose result it has kept: not
counted. Writes benchmarks/results/traced_collectives.md.
"""

from __future__ import annotations

import sys
from collections import Counter
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

sys.path.append(str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch._inductor.compile_fx
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from tracer import fake_mode

from _peers import need_peers
from trimaran.cost.kernels import recomputed
from trimaran.cost.layers.tensor_sums import copied
from trimaran.files.catalogue import load_model, load_stack
from trimaran.operators.layer import layer_operators
from trimaran.operators.operator import Part, Phase
from trimaran.train.programs.tracing import as_on_cuda

need_peers()
RESULTS = Path(__file__).parents[1] / "results" / "traced_collectives.md"
MODEL, SEQ_LEN, TP, STACK = "llama3.1-8b", 8192, 8, "torchtitan-0.2"
COUNTED = {"all_gather_into_tensor": "gathers", "reduce_scatter_tensor": "scatters"}
COPIES = {"gathers": "copies behind gathers", "scatters": "copies before scatters"}
COPIED_AGAIN = ("selective", COPIES["scatters"])  # one more than is counted
# torchtitan's word for each, and what the cost model's collectives of that word are beyond forward and backward
RECOMPUTES: dict[str, tuple[str, Phase | None]] = {
    "none": ("", None), "selective": ("op", "recompute"), "full": ("full", "forward"),
}  # fmt: skip


class Calls(TorchDispatchMode):
    """Counts the collectives that run while it is entered, and the copies of what they gather and scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.found[COUNTED.get(name, "")] += 1
        if name == "cat":
            along = args[1] if len(args) > 1 else 0
            self.found[COPIES["gathers" if along else "scatters"]] += 1
        return func(*args, **(kwargs or {}))


def traced(layers: int, mbs: int, word: str) -> tuple[Counter[str], Counter[str]]:
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
                logits = whole(torch.zeros(mbs, SEQ_LEN, dtype=torch.int64))
            with Calls() as backward:
                logits.to_local().sum().backward()
    finally:
        dist.destroy_process_group()
    return forward.found, backward.found


def counted(mbs: int, phase: Phase, *, again: bool = False) -> Counter[str]:
    """A layer's collectives and copies of a phase by the cost model: a sum is a scatter and a gather.

    Run `again`, they end where the recompute stops: the scatters of what does not run are left out.
    """
    stack = load_stack(STACK)
    part = Part(load_model(MODEL), SEQ_LEN, stack, False, float(TP), float(mbs), True, 2.0, 2.0)
    found: Counter[str] = Counter()
    operators = layer_operators(part, "dense")
    stop = recomputed(operators) if again else len(operators)
    for index, operator in enumerate(operators):
        for collective in operator.collectives:
            if collective.axis == "tp" and collective.phase == phase:
                found["gathers"] += 1
                found["scatters"] += collective.kind == "all_reduce" and index < stop
    copies = copied(stack, np.array([mbs]))
    return found + Counter(
        {COPIES[name]: found[name] for name, each in zip(COUNTED.values(), copies, strict=True) if each}
    )


def main() -> None:
    """Trace, count, write."""
    rows = ["| sequences | recompute | of a layer | traced forward | cost model | traced backward | cost model |",
            "| --: | --- | --- | --: | --: | --: | --: |"]  # fmt: skip
    for mbs, (recompute, (word, again)) in product((2, 1), RECOMPUTES.items()):
        one, two = traced(1, mbs, word), traced(2, mbs, word)
        forward, backward = (more - fewer for more, fewer in zip(two, one, strict=True))
        repeated = counted(mbs, again, again=True) if again else Counter[str]()
        model = counted(mbs, "forward"), counted(mbs, "backward") + repeated
        for name in (*COUNTED.values(), *COPIES.values()):
            rows.append(
                f"| {mbs} | {recompute} | {name} | {forward[name]} | {model[0][name]} | {backward[name]} | "
                f"{model[1][name]} |"
            )
            more = (recompute, name) == COPIED_AGAIN
            if (forward[name], backward[name]) != (model[0][name], model[1][name] + more):
                raise SystemExit(f"the cost model counts other {name} under {recompute}: {rows[-1]}")
    title, _, rest = __doc__.partition("\n\n")
    RESULTS.write_text("\n".join([f"# {title}", "", rest.strip(), "", *rows, ""]), encoding="utf-8")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
