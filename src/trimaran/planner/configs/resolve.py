"""What is stated as a layout and a workload; what is not, and is needed, is named."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from trimaran.files.catalogue import load_cluster, load_model
from trimaran.layout.layout import Layout, resolve_split
from trimaran.layout.stages import even_split
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError, first_error
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload
from trimaran.planner.configs.stated import Stated
from trimaran.planner.export.torchtitan_stages import titan_split

# Fields of a model that a name and a configuration may both state, and must then state alike.
SHAPE = ("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "head_dim", "vocab")
_NEEDED = {
    "layers": "--num-layers", "hidden": "--hidden-size", "heads": "--num-attention-heads", "vocab": "--vocab-size",
}  # fmt: skip


@dataclass(frozen=True)
class Given:
    """What the command line says beside the file; what it leaves out comes from the file.

    `shape` are sizes of the model, by the fields of `SHAPE`.
    """

    cluster: str
    model: str | None = None
    stack: str | None = None
    global_batch: int | None = None
    seq_len: int | None = None
    devices: int | None = None
    mbs: int | None = None
    shape: Mapping[str, int] = field(default_factory=dict)


def layout_of(stated: Stated, given: Given, stack: Stack, name: str) -> tuple[Layout, Workload, list[tuple[str, str]]]:
    """The layout and the workload that are stated, and remarks on what is not. Raises TrimaranError."""
    remarks = [("open", sentence) for sentence in stated.open]
    replicas = _replicas(stated, given, name, remarks)
    model = _model(stated, given, name)
    if given.model and stated.named and not _same_model(stated, given.model):
        remarks.append(("note", f"the file names {stated.named}, and you gave {given.model}, which is what is counted"))
    sizes = _sizes(stated, given, replicas, name, remarks)
    fields: dict[str, Any] = {**stated.layout, "dp": replicas, **_stages(stated, model.layers)}
    if fields["tp"] == 1:
        fields["sequence_parallel"] = False
    if replicas == 1 and stated.trainer == "torchtitan" and stated.layout.get("cp", 1) == 1:
        fields |= {"zero_stage": 0, "dp_kind": "all_reduce"}
    if stated.replicate > 1 and fields.get("zero_stage"):
        if replicas % stated.replicate:
            raise TrimaranError(f"{name}: DP {replicas} is not a multiple of its {stated.replicate} groups of shards")
        fields["shard"] = replicas // stated.replicate
    if stated.recomputed_layers is not None:
        fields |= _recomputed(stated.recomputed_layers, model.layers, fields, remarks)
    try:
        workload = Workload.model_validate({"model": model, **sizes})
        layout = Layout.model_validate(fields)
    except ValidationError as error:
        raise TrimaranError(f"{name}: {first_error(error)}") from None
    # A split that the stack makes of itself is none that was chosen.
    unsplit = layout.model_copy(update={"stage_split": ()})
    if layout.stage_split == resolve_split(unsplit, workload, stack):
        layout = unsplit
    remarks += [("not counted", word) for word in (*stated.uncounted, *_refilled(stated, layout, workload))]
    remarks += [("note", sentence) for sentence in stated.notes]
    if stated.unread:
        remarks.append(("not read", ", ".join(stated.unread)))
    return layout, workload, remarks


def _refilled(stated: Stated, layout: Layout, workload: Workload) -> list[str]:
    """How often torchtitan fills a pipeline in an iteration, where that is more than once.

    torchtitan 0.2.2, train.py, train_step: each of the local batches that a global one takes goes through its schedule.
    """
    each = (stated.batch_per_replica or 0) * layout.dp
    times = -(-workload.global_batch // each) if each and stated.titan_stages and layout.pp > 1 else 1
    return [f"that the pipeline fills and drains {times} times an iteration, counted as once"] if times > 1 else []


def _replicas(stated: Stated, given: Given, name: str, remarks: list[tuple[str, str]]) -> int:
    """DP: as stated, or what TP and PP leave of the devices."""
    if stated.replicas is not None and given.devices is None:
        return stated.replicas
    devices = given.devices or stated.devices
    if devices is None:
        devices = load_cluster(given.cluster).devices
        remarks.append(("not stated", f"how many devices it runs on: all {devices} of {given.cluster} (--devices)"))
    inner = math.prod(_number(stated.layout.get(axis, 1)) for axis in ("tp", "cp", "pp"))
    if inner <= 0 or devices % inner:
        words = "TP x CP x PP" if "cp" in stated.layout else "TP x PP"
        raise TrimaranError(f"{name}: {words} = {inner} does not divide {devices} devices: state others by --devices")
    return devices // inner


def _sizes(stated: Stated, given: Given, replicas: int, name: str, remarks: list[tuple[str, str]]) -> dict[str, object]:
    """Sequence length, batch and optimizer. Raises TrimaranError naming all that is missing."""
    sizes = dict(stated.workload)
    if stated.batch_per_replica is not None:
        sizes.setdefault("global_batch", stated.batch_per_replica * replicas)
    sizes |= {"global_batch": given.global_batch} if given.global_batch is not None else {}
    sizes |= {"seq_len": given.seq_len} if given.seq_len is not None else {}
    if given.mbs is not None:
        stated.layout["mbs"] = given.mbs
        if stated.steps is not None:
            sizes.setdefault("global_batch", given.mbs * stated.steps * replicas)
    if "mbs" in stated.layout and "global_batch" not in sizes and stated.trainer.startswith("megatron"):
        # megatron/training/arguments.py, validate_args: global_batch_size is then micro_batch_size x DP
        sizes["global_batch"] = _number(stated.layout["mbs"]) * replicas
        remarks.append(("not stated", "the global batch: a micro-batch a replica, as Megatron-LM takes it"))
    if stated.steps is not None and "mbs" not in stated.layout and "global_batch" in sizes:
        stated.layout["mbs"] = _micro_batch(_number(sizes["global_batch"]), replicas, stated.steps, name)
    missing = [
        *(["the micro-batch (--set mbs=N)"] if "mbs" not in stated.layout else []),
        *(["the sequence length (--seq-len)"] if "seq_len" not in sizes else []),
        *(["the global batch (--gbs)"] if "global_batch" not in sizes else []),
    ]
    if missing:
        more = f" ({'; '.join(stated.open)})" if stated.open else ""
        raise TrimaranError(f"{name} does not state {', '.join(missing)}{more}: state it there or as an option")
    return sizes


def _micro_batch(batch: int, replicas: int, steps: int, name: str) -> int:
    """What a replica takes in a step of a batch. Raises TrimaranError where that is no whole number."""
    if batch % (replicas * steps):
        raise TrimaranError(f"{name}: a batch of {batch} does not divide into {steps} steps of {replicas} replicas")
    return batch // (replicas * steps)


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value


def _model(stated: Stated, given: Given, name: str) -> Model:
    word = given.model or stated.model_name
    known = load_model(word) if word else None
    sizes = {**stated.model, **given.shape}
    if known is not None:
        for size in SHAPE:
            if (value := sizes.get(size)) is not None and value != getattr(known, size):
                said = "--set states" if size in given.shape else f"{name} states"
                raise TrimaranError(
                    f"{said} {size} {value}, and {word} has {getattr(known, size)}: give the model it trains"
                )
        return known
    of_megatron = stated.trainer.startswith("megatron")
    needed = [f"{size} ({flag})" if of_megatron else size for size, flag in _NEEDED.items() if size not in sizes]
    if needed:
        reasons = [*stated.open, *([f"it names {stated.named}, which is not known"] if stated.named else [])]
        more = f" ({'; '.join(reasons)})" if reasons else ""
        way_out = f"add --set {needed[-1].split()[0]}=N, or " if stated.model else ""
        raise TrimaranError(f"{name} does not state the model's {', '.join(needed)}{more}: {way_out}give --model")
    fields = {"max_positions": stated.workload.get("seq_len", 2048), **sizes}
    try:
        return Model.model_validate(fields)
    except ValidationError as error:
        raise TrimaranError(f"{name}: {first_error(error)}") from None


def _same_model(stated: Stated, given: str) -> bool:
    """Whether a name of the catalogue is that of the file, as `qwen3-8b` is of qwen3 8B."""
    words = {re.sub(r"[^a-z0-9.]", "", word.lower()) for word in (stated.model_name or stated.named, given)}
    return len(words) == 1


def _stages(stated: Stated, layers: int) -> dict[str, object]:
    """Virtual stages and the split, where these are stated and are not even."""
    pp, vpp = _number(stated.layout["pp"]), _number(stated.layout.get("vpp", 1))
    if pp <= 1 or "stage_split" in stated.layout:
        return {}
    first_less, last_less = stated.ends_less
    weight = layers + first_less + last_less
    if stated.chunk:
        stages = -(-weight // stated.chunk)
        if stages % pp:
            raise TrimaranError(
                f"{layers} layers in stages of {stated.chunk} make {stages} stages, not a multiple of PP {pp}"
            )
        vpp = stages // pp
    stages = pp * vpp
    if stages > layers:
        raise TrimaranError(f"{layers} layers cannot fill {stages} stages: lower PP or the virtual stages")
    if stated.titan_stages:
        split = titan_split(layers, stages, first_less, last_less)
        if not split:
            raise TrimaranError(f"{layers} layers on {stages} stages leave one without a layer: torchtitan refuses it")
    elif any(end is not None for end in stated.ends):
        split = _between(stated.ends, layers, pp, vpp)
    elif weight % stages:
        raise TrimaranError(
            f"{layers} layers do not divide into {stages} stages, and Megatron-LM refuses it: choose PP and virtual "
            f"stages that divide them, or state --decoder-first-pipeline-num-layers or -last- for an end of fewer"
        )
    else:
        split = (weight // stages - first_less, *[weight // stages] * (stages - 2), weight // stages - last_less)
    return {"vpp": vpp, "stage_split": split}


def _between(ends: tuple[int | None, int | None], layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    """First and last stage as stated, each in equal virtual stages, and the others even (transformer_block.py)."""
    between = pp - sum(end is not None for end in ends)
    rest = layers - sum(end or 0 for end in ends)
    share = rest // between if between else 0
    ranks = [share if end is None else end for end in (ends[0], *[None] * (pp - 2), ends[1])]
    if sum(ranks) != layers or min(ranks) <= 0 or any(rank % vpp for rank in ranks):
        raise TrimaranError(
            f"first and last stage of {ends[0] or 'as many'} and {ends[1] or 'as many'} layers leave {rest} for "
            f"{between} stages of {vpp} virtual ones: they do not divide"
        )
    return tuple(rank // vpp for _ in range(vpp) for rank in ranks)


def _recomputed(
    made_again: int, layers: int, fields: dict[str, Any], remarks: list[tuple[str, str]]
) -> dict[str, object]:
    """Of how many layers one is made again, where a number of each stage's layers is stated: the nearest to it."""
    stages = int(fields["pp"]) * int(fields.get("vpp", 1))
    largest = max(fields.get("stage_split") or even_split(layers, stages))
    if made_again >= largest:
        return {"recompute_every": 1}
    if made_again == 0:
        return {"recompute": "none"}
    every = min(range(1, largest + 1), key=lambda each: abs(-(-largest // each) - made_again))
    if (counted := -(-largest // every)) != made_again:
        remarks.append(
            (
                "note",
                f"--recompute-num-layers {made_again} of a stage's {largest} layers is counted as one in {every}, "
                f"{counted} of them",
            )
        )
    return {"recompute_every": every}
