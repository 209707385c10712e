"""Rules of what some software's own checks stop at, which a stack names as `stops_at`.

Each takes (layout, workload, cluster, stack) and gives the sentence for the user, or None; `RULES` of
trimaran.layout.rules lists them with what they read. Where no version is named, lines are of Megatron-Core 0.16.1,
whose files begin with megatron/core/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trimaran.layout.axes import stated_placement
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.precision import PrecisionName
from trimaran.nouns.recompute import modules_of
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload

# Of what an operand that is cast has rows (tokens, or a slice of weights) and columns (what a product sums over) in
# multiples: Transformer Engine v2.9, pytorch/utils.py:438, pytorch/tensor/mxfp8_tensor.py:101, nvfp4_tensor.py:180.
_BLOCKS: Mapping[PrecisionName, tuple[int, int]] = {"fp8": (8, 16), "mxfp8": (32, 32), "nvfp4": (16, 16)}
# Modules whose inputs are cast again by scales that the backward has moved since.
_CAST_AGAIN = ("layernorm", "moe_act")


def delayed_recompute(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Norms and experts' activations are made again under fp8 where scales are those of now.

    transformer/transformer_config.py, line 1245.
    """
    again = [module for module in modules_of(layout.recompute) if module in _CAST_AGAIN]
    is_delayed = layout.precision == "fp8" and stack.fp8_scaling == "delayed"
    if "delayed_recompute" not in stack.stops_at or not is_delayed or not again:
        return None
    return (
        f"recompute of {' and '.join(again)} in fp8, whose scales {stack.name} takes from the steps before, and it "
        f"refuses the two together: recompute other modules, or choose another precision"
    )


def stages_among_experts(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Stages lie inside of replicas where experts have as many replicas as the other weights.

    parallel_state.py, line 812.
    """
    edp = layout.size("edp")
    if "stages_among_experts" not in stack.stops_at or not workload.model.experts or layout.pp == 1:
        return None
    if layout.placement[-1] == "pp" or edp == layout.dp:
        return None
    return (
        f"placement {'-'.join(stated_placement(layout.placement))} with PP {layout.pp} and experts in {edp} copies "
        f"(CP x TP x DP / EP / ETP) beside DP {layout.dp}, but {stack.name} wants as many where pp is not last: "
        f"place pp last, or choose EP x ETP = CP x TP = {layout.cp * layout.tp}"
    )


def experts_over_copies(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Each group of replicas that shares out weights has all experts.

    parallel_state.py, line 1260; torchtitan 0.2.2, distributed/parallel_dims.py, build_mesh: dp_replicate lies outside
    of efsdp, ep and etp.
    """
    edp, copies = layout.size("edp"), layout.size("replicate")
    if "experts_over_copies" not in stack.stops_at or not workload.model.experts or not layout.zero_stage:
        return None
    if edp % copies == 0:
        return None
    return (
        f"experts in {edp} copies (CP x TP x DP / EP / ETP) are not a multiple of DP {layout.dp} / shard "
        f"{layout.size('shard')} = {copies} groups that share out weights, which {stack.name} wants: raise shard or "
        f"lower EP"
    )


def whole_experts(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Experts on ranks of their own are sharded, as the other weights of such software are (the same build_mesh)."""
    if not workload.model.experts or not stack.whole_weights_alone:
        return None
    if layout.zero_stage or layout.dp == 1 or layout.ep == 1:
        return None
    return (
        f"EP {layout.ep} with ZeRO stage 0 of DP {layout.dp}, but {stack.name} lays experts over ranks that share out "
        f"weights: set zero_stage to 3 (fsdp) or EP to 1"
    )


def biased_slices(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Experts with biases are whole: transformer/transformer_config.py, line 1591."""
    etp = layout.size("etp")
    if "biased_slices" not in stack.stops_at or not (workload.model.experts and workload.model.bias) or etp == 1:
        return None
    return (
        f"ETP {etp} of experts with biases (model.bias), but {stack.name} adds these in ETP 1 alone: set etp to 1, or "
        f"model.bias to false"
    )


def ulysses_halves(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Sequences make two blocks a rank, also where ranks have one: core_v0.15.0, megatron/training/arguments.py:844."""
    if "ulysses_halves" not in stack.stops_at or layout.cp == 1 or layout.cp_kind != "ulysses":
        return None
    if workload.seq_len % (2 * layout.cp) == 0:
        return None
    return (
        f"seq_len {workload.seq_len} is not a multiple of 2 x CP {layout.cp} = {2 * layout.cp}, which {stack.name} "
        f"wants of every kind of context parallelism: choose a CP whose double divides it"
    )


def halves_of_slices(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Sequences make two blocks for each rank of TP and CP, also where nothing splits them twice.

    torchtitan 0.2.2, distributed/parallel_dims.py, line 372, which all its models/*/infra/parallelize.py assert.
    """
    blocks = 2 * layout.tp * layout.cp
    if "halves_of_slices" not in stack.stops_at or layout.tp == 1 or workload.seq_len % blocks == 0:
        return None
    return (
        f"seq_len {workload.seq_len} is not a multiple of 2 x TP {layout.tp} x CP {layout.cp} = {blocks}, which "
        f"{stack.name} wants: choose a TP and a CP for which it is, or another seq_len"
    )


def further_positions(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Modules for further tokens have no positions to learn: core_v0.15.0, megatron/training/arguments.py:1188."""
    model = workload.model
    if "further_positions" not in stack.stops_at or not model.mtp_depth or model.positions in ("rotary", "none"):
        return None
    return (
        f"model.mtp_depth is {model.mtp_depth} and model.positions {model.positions}, and {stack.name} predicts "
        f"further tokens with rotary positions or none: set mtp_depth to 0, or positions to rotary"
    )


def narrow_blocks(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Operands of dense layers are cast in whole blocks; those of experts are filled up.

    Transformer Engine v2.9, pytorch/module/linear.py:168 and layernorm_linear.py:150.
    """
    if "narrow_blocks" not in stack.stops_at or layout.precision not in _BLOCKS:
        return None
    rows, columns = _BLOCKS[layout.precision]
    for what, size, block in _operands(layout, workload, rows, columns):
        if size % block:
            return (
                f"{what} = {size} is not a multiple of {block}, by which {stack.name} casts to {layout.precision}: "
                f"choose another TP, CP, micro-batch or seq_len for which it is, or another precision"
            )
    return None


def _operands(layout: Layout, workload: Workload, rows: int, columns: int) -> Iterator[tuple[str, int, int]]:
    """What sizes the operands of a rank's dense layers have: words, the size, and the block that it is made of."""
    model, tp = workload.model, layout.tp
    slices = tp if layout.sequence_parallel else 1
    ranks = f" / CP {layout.cp}" * (layout.cp > 1) + f" / TP {tp}" * (slices > 1)
    tokens = workload.seq_len * layout.mbs // (layout.cp * slices)
    yield f"micro-batch {layout.mbs} x seq_len {workload.seq_len}{ranks}", tokens, rows
    yield "hidden", model.hidden, columns
    if model.latent_attention is None:
        yield f"heads {model.heads} x head_dim {model.head_dim} / TP {tp}", model.attention_hidden // tp, columns
        qkv = (model.attention_hidden + 2 * model.kv_hidden) // tp
        yield f"width of queries, keys and values / TP {tp}", qkv, rows
    if "dense" in model.kinds:
        yield f"ffn_hidden {model.ffn_hidden} / TP {tp}", model.ffn_hidden // tp, columns
    if model.shared_experts:
        shared = model.shared_experts * model.moe_ffn_hidden
        yield f"width of shared experts {shared} / TP {tp}", shared // tp, columns


def graphs_again(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """CUDA graphs are no parts of what is made again: transformer/transformer_config.py, lines 1782 and 1792."""
    if "graphs_again" not in stack.stops_at or not stack.graphed:
        return None
    if layout.recompute == "full" or ("moe_router" in stack.graphed and "moe" in modules_of(layout.recompute)):
        return _beside_graphs("recompute", layout.recompute, stack)
    return None


def graphs_offloaded(layout: Layout, workload: Workload, cluster: Cluster, stack: Stack) -> str | None:
    """Nor do they go with layers whose activations lie on the host: the same, line 1722."""
    if "graphs_again" not in stack.stops_at or not stack.graphed or layout.offload != "activations":
        return None
    return _beside_graphs("offload", layout.offload, stack)


def _beside_graphs(name: str, word: str, stack: Stack) -> str:
    return (
        f"{name} {word}, of layers of which {stack.name} replays {', '.join(stack.graphed)} as CUDA graphs, and it "
        f"refuses the two together: choose another {name}, or a stack without graphs"
    )
