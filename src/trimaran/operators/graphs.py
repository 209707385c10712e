"""CUDA graphs: which operators of a layer the host replays as one, instead of launching each of them.

After Megatron-Core (megatron/core/transformer/transformer_layer.py at d98e8a6, lines 1233 to 1261), whose words for the
modules of a layer these are; a layer's modules that stand side by side are captured as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trimaran.nouns.stack import GraphedModule, Stack
from trimaran.operators.casts import Number
from trimaran.operators.modules import MODULES
from trimaran.operators.operator import Operator

# What the host launches for a graph: a copy of its input to where the graph reads it, and the replay (the same folder,
# cuda_graphs.py, line 849; transformer_engine/pytorch/graph.py, forward of Graphed).
GRAPH_LAUNCHES = 2.0

GRAPHED: Mapping[GraphedModule, tuple[str, ...]] = {
    "attn": (
        "attention norm", "qkv", "query and key norms", "rotary angles", "attention", "projection",
        "attention output norm", "attention residual", "latent attention norm", "latent down", "latent norms",
        "queries up", "keys and values up", "latent angles",
    ),
    "mlp": ("MLP norm", *MODULES["mlp"].operators, "MLP output norm", "MLP residual"),
    "moe": ("experts norm", *MODULES["moe"].operators, "MLP output norm", "MLP residual"),
    # shared experts among them, unless they run beside the exchange
    "moe_router": ("experts norm", "router", *MODULES["shared_experts"].operators),
    # counts, and the permutation before an exchange
    "moe_preprocess": ("dispatch",),
}  # fmt: skip


def launched(operators: Sequence[Operator], stack: Stack) -> Number:
    """How many launches of a layer's forward its host makes: operators one by one, runs of graphed ones at once."""
    covered = {name for module in stack.graphed for name in GRAPHED[module]}
    launches: Number = np.float64(0.0)
    before = False
    for operator in operators:
        graphed = operator.name in covered
        launches = launches + (operator.launches if not graphed else 0.0 if before else GRAPH_LAUNCHES)
        before = graphed
    return launches
