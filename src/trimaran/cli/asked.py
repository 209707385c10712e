"""What plan and export are asked about: a recipe, options, or a recipe with options over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from trimaran.api import DEFAULT_STACK, calibration_of, workload_of
from trimaran.cost.calibration import Calibration
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload

if TYPE_CHECKING:
    from trimaran.nouns.measurement import Measurement, Status
    from trimaran.recipe.recipe import Recipe

# The stack whose abilities are those of a trainer that export writes for.
TRAINER_STACKS = {
    "megatron-lm": "megatron",
    "megatron-deepspeed": "megatron-deepspeed",
    "torchtitan": "torchtitan",
    "deepspeed": "torch-fsdp",
}


_MOST_PRICE = 1e9


@dataclass(frozen=True)
class Study:
    """Nouns of one question, and what a recipe's sweep says of the search."""

    workload: Workload
    cluster: Cluster
    stack: Stack
    calibration: Calibration | None
    device_counts: tuple[int, ...] = ()
    mem_margin: float = 0.05
    fixed: dict[str, object] = field(default_factory=dict)


def study_of(
    recipe: Path | None,
    runs: Path,
    *,
    model: str | None,
    cluster: str | None,
    gbs: int | None,
    seq: int | None = None,
    stack: str | None = None,
    optimizer: str | None = None,
    tokens: float | None = None,
    ramp_up: str | None = None,
    calibration: str | None = None,
    price: float | None = None,
) -> Study:
    """The study that recipe and options state together; options win. Raises TrimaranError."""
    base = None
    if recipe is not None:
        from trimaran.files.recipe_file import (
            load_recipe,
        )  # a large noun, which a question asked by options does without

        base = load_recipe(str(recipe))
    if base is None:
        for name, value in (("--model", model), ("--cluster", cluster), ("--gbs", gbs)):
            if value is None:
                raise TrimaranError(f"{name} is missing: state it, or give a recipe file")
    known_cluster = _priced(_cluster(base, cluster, runs), price)
    known_stack = base.stack if base and stack is None else load_stack(stack or DEFAULT_STACK)
    known_calibration = calibration_of(calibration, known_cluster, known_stack)
    workload = _workload(base, model, gbs, seq, optimizer, tokens, ramp_up)
    if base is None:
        return Study(workload, known_cluster, known_stack, known_calibration)
    sweep = base.sweep
    return Study(
        workload,
        known_cluster,
        known_stack,
        known_calibration,
        device_counts=sweep.devices,
        mem_margin=sweep.mem_margin,
        fixed=dict(sweep.fixed),
    )


def retried(words: list[str] | None) -> frozenset[Status]:
    """The statuses to run again; raises TrimaranError naming a word that is none."""
    from trimaran.nouns.measurement import Status

    known: dict[str, Status] = {status: status for status in get_args(Status)}
    for word in words or ():
        if word not in known:
            raise TrimaranError(f"--retry {word!r} is not a status: it is one of {', '.join(known)}")
    return frozenset(known[word] for word in words or ())


def some_ran(rows: Sequence[Measurement]) -> None:
    """Raise TrimaranError, with the first reason, when not one of the measured layouts ran."""
    if any(row.status == "ok" for row in rows):
        return
    first = rows[0]
    told = (first.evidence or "no evidence").strip().splitlines()[0]
    raise TrimaranError(
        f"none of {len(rows)} layouts ran; {first.layout_label} ended as {first.status}: {told}; "
        f"mend that and run again with --retry {first.status}"
    )


def _cluster(base: Recipe | None, cluster: str | None, runs: Path) -> Cluster:
    if cluster is not None or base is None:
        return load_cluster(cluster or "")
    from trimaran.study.workspace import Workspace

    return Workspace(runs / base.name).cluster(base)


def _priced(cluster: Cluster, price: float | None) -> Cluster:
    if price is None:
        return cluster
    if not 0 < price < _MOST_PRICE:
        raise TrimaranError(f"--price {price:g} is not between 0 and {_MOST_PRICE:g} a device-hour: state another")
    return cluster.model_copy(update={"price_per_device_hour": price})


def _workload(
    base: Recipe | None,
    model: str | None,
    gbs: int | None,
    seq: int | None,
    optimizer: str | None,
    tokens: float | None,
    ramp_up: str | None,
) -> Workload:
    stated = base.workload if base else None
    ramp = _numbers(ramp_up) if ramp_up is not None else None
    if ramp is None and stated and stated.ramp_up:
        ramp = list(stated.ramp_up.model_dump().values())
    own_seq = stated.seq_len if stated and model is None else None
    return workload_of(
        model or (stated.model if stated else ""),
        gbs if gbs is not None else (stated.global_batch if stated else 0),
        seq=seq if seq is not None else own_seq,
        optimizer=optimizer or (stated.optimizer if stated else "adam"),
        tokens=tokens if tokens is not None else (stated.tokens if stated else None),
        ramp_up=ramp,
    )


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise TrimaranError(
            f"--ramp-up {text!r} is not START,INCREMENT,SAMPLES: write for example 32,32,6000000"
        ) from None
