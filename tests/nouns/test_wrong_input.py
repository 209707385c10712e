"""Every number of every noun at 0, -1, 1e30, NaN, text and true, and every name misspelt: one line, or a fair value."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from trimaran.cost.calibration import prior
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.files.row_table import packaged_table, parse_table
from trimaran.layout.layout import Layout
from trimaran.nouns.columns import COLUMNS
from trimaran.nouns.hardware.measured import AttentionTime, CollectiveTime, Contention, MatmulRate
from trimaran.nouns.noun import Noun, first_error
from trimaran.nouns.shaped_network import ShapedNetwork, ShapedPair
from trimaran.nouns.slurm_settings import SlurmSettings
from trimaran.nouns.variant import Variant
from trimaran.nouns.workload import RampUp, Workload
from trimaran.planner.search.objective import Objective
from trimaran.planner.search.settings import PlanSettings
from trimaran.recipe.data_settings import BlendedText, DataSettings
from trimaran.recipe.sweep_settings import SweepSettings
from trimaran.recipe.train_settings import TrainSettings

MODEL = load_model("llama3-8b")
CLUSTER = load_cluster("dgx-h100").model_copy(
    update={
        "matmul": (MatmulRate(precision="bf16", m=8, n=8, k=8, tflops=1.0),),
        "collectives": (CollectiveTime(op="send", ranks=2, bytes=8, time_us=2.0),),
        "attention": (
            AttentionTime(precision="bf16", batch_heads=2, seq_len=8, head_dim=8, forward_us=1.0, backward_us=1.0),
        ),
        "contention": (Contention(ranks=2, matmul=1.0, memory=1.0, overhead=1.0),),
        "price_per_device_hour": 2.0,
    }
)
STACK = load_stack("trimaran")
NETWORK = ShapedNetwork(
    name="slow", latency_ms=1, bandwidth_gbps=1, pairs=(ShapedPair(nodes=(0, 1), latency_ms=1, bandwidth_gbps=1),)
)
NOUNS: dict[str, Noun] = {
    "model": MODEL,
    "workload": Workload(
        model=MODEL, seq_len=128, global_batch=64, tokens=10**9, ramp_up=RampUp(start=16, increment=16, samples=1000)
    ),
    "cluster": CLUSTER,
    "stack": STACK,
    "calibration": prior(CLUSTER, STACK),
    "layout": Layout(dp=2, tp=2, pp=2, stage_split=(2, 2)),
    "data": DataSettings(blend=(BlendedText(paths=("a",), weight=1.0),), max_mib=1.0),
    "train": TrainSettings(decay_steps=50, eval_every=5, validation=0.1, checkpoint_every=3),
    "sweep": SweepSettings(
        devices=(2,), networks=(NETWORK,), slurm=SlurmSettings(time_limit_min=5, nodes=1),
        variants=(Variant(clock_ghz=2.0),),
    ),
    "settings": PlanSettings(devices=8, device_counts=(8,), objective=Objective(deadline_days=5, budget=5)),
}  # fmt: skip
# Where 0 says something: none of it, free of charge, unlimited, no delay, or as the field's description has it.
ZERO_SAYS_SOMETHING = {
    "model": {
        "ffn_hidden", "kv_heads", "head_dim", "dropout", "sliding_window", "full_attention_every", "attention_softcap",
        "logit_softcap", "experts", "top_k", "moe_ffn_hidden", "shared_experts", "dense_layers",
        "expert_groups", "top_groups", "mtp_depth", "swiglu_limit",
    },
    "workload": set[str](),
    "cluster": {
        "context_gib", "multiprocessors", "cores", "clock_ghz", "op_overhead_us", "latency_us",
        "matmul_share", "narrow_share", "flash_share", "cudnn_share", "all_reduce_gb_s", "cards_per_node",
        "cores_per_node", "host_mem_gib", "host_link_gb_s", "host_mem_gb_s", "devices_per_host",
        "price_per_device_hour",
    },
    "stack": {
        "overlap_dp", "master_weight_bytes", "bucket_elements", "zero_stages", "loss_chunk_cpu_tokens",
        "loss_chunk_gpu_tokens", "fragmentation", "low_gradient_bytes", "overlapped_zero_stages",
        "pipelined_zero_stages", "wide_gradient_stages", "gradient_passes", "experts_block_rows", "bucket_passes",
        "gradient_buffer_passes", "live_parameters", "reuse_parameters", "stage_places",
    },
    "calibration": {"rows", "time_error", "mem_error", "dp_overlap", "micro_batch_ms", "iteration_ms", "buffer_gib"},
    "layout": {"zero_stage", "shard", "etp", "stage_split", "local_steps", "outer_delay"},
    "data": set[str](),
    "train": {
        "seed", "min_learning_rate", "warmup_steps", "warmup_samples", "warmup_tokens", "weight_decay", "beta1",
        "beta2", "clip_grad", "checkpoint_every", "snapshot_seconds", "restarts", "spike_sigmas",
        "balance_loss", "router_z_loss", "router_bias_rate", "outer_momentum", "outer_mixing",
    },
    "sweep": {"mem_margin", "latency_ms", "nodes"},
    "settings": {"mem_margin", "gbs_tolerance"},
}  # fmt: skip
Path = tuple[str | int, ...]


def numbers(value: Any, path: Path = ()) -> Iterator[Path]:
    """Where the numbers are, a workload's own model left to the model."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not (name == "model" and isinstance(inner, dict)):
                yield from numbers(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from numbers(inner, (*path, index))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def changed(value: Any, path: Path, new: object) -> Any:
    if not path:
        return new
    first, rest = path[0], path[1:]
    if isinstance(value, dict):
        return {**value, first: changed(value[first], rest, new)}
    return [changed(inner, rest, new) if index == first else inner for index, inner in enumerate(value)]


def tables(value: Any, path: Path = ()) -> Iterator[Path]:
    """Where tables with names of their own are: nouns within the noun."""
    if isinstance(value, dict):
        if path[-1:] not in [("peak_tflops",), ("fixed",), ("environment",)]:
            yield path
        for name, inner in value.items():
            yield from tables(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from tables(inner, (*path, index))


def named(path: Path) -> str:
    return next(step for step in reversed(path) if isinstance(step, str))


def refusal(noun: Noun, table: Any) -> str | None:
    """The one line that a table gets, or None where it is taken."""
    try:
        type(noun).model_validate(table)
    except ValidationError as error:
        line = first_error(error)
        assert "\n" not in line
        return line
    return None


@pytest.mark.parametrize("kind", NOUNS)
@pytest.mark.parametrize("value", [0, -1, 1e30, 10**30, math.nan, -math.inf, "text", "", True], ids=repr)
def test_a_number_that_cannot_be_is_refused_by_name(kind: str, value: object) -> None:
    table = json.loads(NOUNS[kind].model_dump_json())
    paths = list(numbers(table))
    assert paths
    for path in paths:
        line = refusal(NOUNS[kind], changed(table, path, value))
        if value == 0 and value is not True and named(path) in ZERO_SAYS_SOMETHING[kind]:
            continue
        # Where two fields contradict each other, the line names both kinds of them.
        assert line and (named(path) in line or named(path).split("_")[0] + "_" in line), f"{path} = {value!r}: {line}"


@pytest.mark.parametrize("kind", NOUNS)
def test_every_misspelt_name_is_refused_with_the_nearest(kind: str) -> None:
    table = json.loads(NOUNS[kind].model_dump_json())
    for path in tables(table):
        inner = table
        for step in path:
            inner = inner[step]
        for name in inner:
            slip = name[:-1] + name[-1] * 2
            wrong = {(slip if own == name else own): value for own, value in inner.items()}
            line = refusal(NOUNS[kind], changed(table, path, wrong))
            assert line and f"{slip!r} is not known: did you mean " in line


@pytest.mark.parametrize("value", ["0", "-1", "1e30", "NaN", "inf", "text", "true"])
def test_every_number_of_a_row_is_checked(value: str) -> None:
    header = ",".join(column.name for column in COLUMNS)
    whole = packaged_table().rows[0].cells
    for column in COLUMNS:
        if column.kind == "text" or (value == "0" and column.minimum == 0):
            continue
        cells = {**{name: cell.replace(",", " ") for name, cell in whole.items()}, column.name: value}
        (row,) = parse_table(f"{header}\n{','.join(cells[one.name] for one in COLUMNS)}\n", "t").rows
        assert (row.error and row.error.startswith(f"row 1: {column.name} is {value!r}"[: len(row.error)])) or (
            row.error and f"{column.name} is {value}" in row.error
        ), row.error
