"""Mixtures of experts beside what was measured: whole runs of Qwen3 and single layers by dispatcher, nothing fitted.

Run by `make bench`; writes benchmarks/results/mixtures.md.
"""

from __future__ import annotations

import csv
from functools import reduce
from pathlib import Path

import numpy as np

from trimaran.cost.calibration import prior
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.kernels import Kernels, rates
from trimaran.cost.layers.exchange import Exchanges
from trimaran.cost.memory.rank_memory import GIB
from trimaran.cost.memory.stage import rank_expert_parameters
from trimaran.cost.score import kendall_tau, mape
from trimaran.cost.shapes import part_of
from trimaran.cost.table.predict_table import PredictedRow, predict_table, score_groups
from trimaran.files.catalogue import CATALOG, load_cluster, load_model, load_stack
from trimaran.files.row_nouns import nouns_of
from trimaran.files.row_table import packaged_table
from trimaran.nouns.model import Model
from trimaran.nouns.workload import Workload
from trimaran.operators.casts import kept_weight_bytes
from trimaran.operators.mixture import exchange_bytes, mixture_block

RESULTS = Path(__file__).parent / "results" / "mixtures.md"
RUNS, LAYERS = "moe_qwen3_megatron", "micro_moe_layer_h100"
# What a layer alone leaves out: the norm before it and the sum behind it (the table's notes).
NOT_TIMED = ("experts norm", "MLP residual")
# cuBLAS's of 32 MiB, one and one for each of four streams (TransformerEngine 2.9, pytorch/module/base.py,
# get_cublas_workspace_size_bytes and get_multi_stream_cublas_workspace).
WORKSPACES = 5 * 32.0 * 2**20


def of_runs() -> list[str]:
    """Whole runs: TFLOPs measured and predicted, by row."""
    rows = predict_table(packaged_table(RUNS), priors_only=True)
    lines = ["| row | layout | measured, TFLOPs | predicted | off |", "| --- | --- | --: | --: | --: |"]
    lines += [_of_run(row) for row in rows]
    answered = [row for row in rows if row.estimate is not None and row.seconds is not None]
    measured = [float(row.row.cells["tflops"]) for row in answered]
    predicted = [row.tflops or 0.0 for row in answered]
    off = mape(measured, predicted)
    lines += ["", f"{len(answered)} rows, none of them fitted to: {off:.1%} off in the mean of times, rank tau "]
    lines[-1] += f"{kendall_tau(predicted, measured) or 0.0:.2f} by TFLOPs."
    total = score_groups(rows)[-1].time
    if total is not None and total.tau is not None:
        lines[-1] += (
            f" As `predict` scores them, rows of one layout averaged: {total.rows} rows, {total.mape:.1%}, tau by time "
            f"per sequence {total.tau:.2f}."
        )
    return [*lines, "", *_of_overlaps(answered)]


def _of_overlaps(rows: list[PredictedRow]) -> list[str]:
    """Runs whose exchanges hid behind another micro-batch, as the notes of their rows say."""
    lines = ["Rows that ran with exchanges hidden behind another micro-batch are predicted above without; with it:", ""]
    lines += ["| row | seconds measured | predicted without | with `ep_overlap` batch |", "| --- | --: | --: | --: |"]
    for row in rows:
        cells = row.row.cells
        # GB200, 2 by its command: A2A_OVERLAP=1
        if "1f1b overlap" not in cells["notes"] and (cells["table"], cells["row"]) != ("GB200", "2"):
            continue
        assert row.row.measurement is not None and row.estimate is not None and row.seconds is not None
        nouns = nouns_of(row.row.measurement)
        case = Case(nouns.workload, nouns.cluster, nouns.stack, prior(nouns.cluster, nouns.stack))
        beside = estimate(case, nouns.layout.model_copy(update={"ep_overlap": "batch"}))
        lines.append(
            f"| {cells['table']}, {cells['row']} | {row.seconds:.1f} | {row.estimate.sec_per_it:.1f} | "
            f"{beside.sec_per_it:.1f} |"
        )
    return lines


def _of_run(row: PredictedRow) -> str:
    cells = row.row.cells
    name = f"| {cells['table']}, {cells['row']} |"
    if row.estimate is None or row.seconds is None:
        return f"{name} {row.error} | {cells['tflops']} | - | - |"
    degrees = ", ".join(f"{axis.upper()} {cells[axis]}" for axis in ("dp", "tp", "cp", "pp", "ep"))
    off = row.estimate.sec_per_it / row.seconds - 1.0
    return f"{name} {degrees} | {float(cells['tflops']):.0f} | {row.tflops or 0.0:.0f} | {off:+.0%} |"


def of_layers() -> list[str]:
    """Single layers: milliseconds forward and backward and peak memory, measured and predicted."""
    with (CATALOG / "measurements" / f"{LAYERS}.csv").open(encoding="utf-8") as table:
        rows = list(csv.DictReader(table))
    lines = [
        "| layer | forward, ms | predicted | backward | predicted | memory, GiB | predicted |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    off, memory_off = [], []
    for cells in rows:
        layer = _Layer(cells)
        forward, backward = (1e3 * seconds for seconds in layer.seconds())
        measured = float(cells["forward_ms"]), float(cells["backward_ms"])
        memory, peak = layer.memory_gib(), float(cells["max_allocated_gib"])
        off.append(abs((forward + backward) / sum(measured) - 1.0))
        memory_off.append(abs(memory / peak - 1.0))
        lines.append(
            f"| {cells['row']} | {measured[0]:.2f} | {forward:.2f} | {measured[1]:.2f} | {backward:.2f} | {peak:.2f} | "
            f"{memory:.2f} |"
        )
    return [
        *lines, "",
        f"Forward and backward together: {np.mean(off):.1%} off in the mean; memory: {np.mean(memory_off):.1%}.",
    ]  # fmt: skip


class _Layer:
    """One layer of experts as Megatron-LM's performance test builds it.

    Its TransformerConfig names neither an activation nor shared experts nor fusions (moe_perf/__main__.py,
    _build_transformer_config), so it is a GELU MLP of two products, weighed by operators of its own
    (megatron/core/transformer/transformer_config.py, gated_linear_unit and bias_activation_fusion; experts.py,
    bias_act_func).
    """

    def __init__(self, cells: dict[str, str]) -> None:
        sizes = {name: int(cells[name]) for name in ("hidden", "experts", "top_k", "moe_ffn_hidden")}
        as_built: dict[str, object] = {"heads": 32, "kv_heads": 8, "head_dim": 128, "shared_experts": 0, "mlp": "gelu"}
        if cells["row"].startswith("deepseek"):
            as_built |= {"expert_groups": 8, "top_groups": 4}  # test_cases.py, DEEPSEEK_PROXY
        model = Model.model_validate(load_model("mixtral-8x7b").model_dump() | sizes | as_built)
        dispatcher = {"a2a": "alltoall"}.get(cells["dispatcher"], cells["dispatcher"])
        narrow = cells["precision"].startswith("fp8")
        facts = {"fp8_scaling": "blockwise", "gathers_casts": False, "pads_experts": True}
        facts |= {"fused_gelu": False, "native_gelu": True}
        stack = load_stack("megatron-core").model_copy(update=facts)
        workload = Workload(model=model, seq_len=int(cells["seq_len"]), global_batch=8)
        cluster = load_cluster("dgx-h100")
        # a layer alone for some seconds runs at the rate of products alone, not at that of hours under a power limit
        cool = cluster.model_copy(update={"device": cluster.device.model_copy(update={"sustained_share": 1.0})})
        self.case = Case.of(workload, cool, stack, prior(cool, stack))
        self.grid = LayoutGrid.build(
            workload, stack, dp=8, ep=int(cells["ep"]), etp=1, dispatcher=dispatcher,
            precision="fp8" if narrow else "bf16",
        )  # fmt: skip
        self.part = part_of(self.case, self.grid)
        self.operators = [operator for operator in mixture_block(self.part) if operator.name not in NOT_TIMED]

    def seconds(self) -> tuple[float, float]:
        """Forward and backward."""
        kernels = Kernels(self.case, rates(self.case, self.grid.precision, np.ones(1, dtype=np.int64)))
        forward, backward = (reduce(np.add, phase) for phase in zip(*map(kernels.time, self.operators), strict=True))
        exchanges = Exchanges(self.case, self.grid, np.zeros(1, dtype=np.int64))
        return (
            float((forward + exchanges.seconds(self.operators, "forward"))[0]),
            float((backward + exchanges.seconds(self.operators, "backward"))[0]),
        )

    def memory_gib(self) -> float:
        """Weights and their 16-bit gradients, what is kept and what stands beside it, and workspaces of products."""
        model = self.case.model
        parameters = float(rank_expert_parameters(model, self.grid)[0])
        casts = float(np.asarray(kept_weight_bytes(self.part.casts, self.case.stack)).ravel()[0])
        kept = sum(
            float(np.asarray(tensor.size).ravel()[0])
            for operator in self.operators
            for tensor in (*operator.inputs, *operator.inside)
        )
        forward, backward = (float(np.asarray(size).ravel()[0]) for size in exchange_bytes(self.part))
        # gradients of the second product's weights, half of all, are there when the backward is at its fullest
        beside = max(forward, backward + parameters / 2.0 * 2.0)
        # what it gives, and the gradient of that
        ends = 2.0 * float(np.asarray(self.part.message).ravel()[0])
        return (parameters * (2.0 + casts) + kept + beside + ends + WORKSPACES) / GIB


def main() -> None:
    lines = [
        "# Mixtures of experts beside what was measured", "",
        "Nothing here is fitted to these rows: rates are those of devices, links and kernels as stated elsewhere.", "",
        "## Qwen3-235B-A22B, Megatron-Core", "", *of_runs(), "",
        "## One layer on 8 H100, by dispatcher", "", *of_layers(),
    ]  # fmt: skip
    text = "\n".join(lines)
    print(text)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
