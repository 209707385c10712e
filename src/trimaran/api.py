"""The command line's verbs as functions, with the same words: nouns, catalogue names or file paths.

    from trimaran.api import plan, predict

    found = plan("bloom-176b", "jean-zay-a100-80gb", gbs=2048, devices=384)
    print(found.best.layout, found.best.sec_per_it)

`trimaran.plan(...)` and `trimaran.predict(...)` are the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType

from pydantic import ValidationError

from trimaran.cost.calibration import Calibration, load_calibration, prior
from trimaran.cost.case import Case
from trimaran.cost.table.predict_table import Predictions, predict_table
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.files.row_table import Table, packaged_table, packaged_tables, read_table
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError, first_error
from trimaran.nouns.stack import Optimizer, Stack
from trimaran.nouns.text import quoted
from trimaran.nouns.workload import RampUp, Workload
from trimaran.planner.plan import Plan
from trimaran.planner.planner import plan_with
from trimaran.planner.search.objective import Goal
from trimaran.planner.search.settings import settings_from

# The stack of a plan that names none, on devices whose file names none either.
DEFAULT_STACK = "trimaran"


def plan(
    model: Model | str | Path,
    cluster: Cluster | str | Path,
    gbs: int,
    *,
    devices: int | None = None,
    seq: int | None = None,
    stack: Stack | str | Path | None = None,
    optimizer: Optimizer = "adam",
    tokens: float | None = None,
    ramp_up: Sequence[int] | None = None,
    fix: Mapping[str, object] | None = None,
    objective: Goal = "time",
    deadline_days: float | None = None,
    budget: float | None = None,
    top: int = 20,
    mem_margin: float = 0.05,
    gbs_tolerance: float = 0.0,
    calibration: Calibration | str | Path | None = None,
) -> Plan:
    """Rank every valid layout for training `model` on `cluster` with a global batch of `gbs` sequences.

    `seq` defaults to the model's positions, `stack` to the usual one of the cluster's devices; `ramp_up` is (start,
    increment, samples); `fix` holds choices (`{"tp": 8}`); the rest is as PlanSettings says. Raises TrimaranError.
    """
    _expect("cluster", cluster, Cluster)
    _expect("stack", stack, Stack, NoneType)
    if not isinstance(fix, Mapping | None):
        raise TrimaranError(f"fix is {quoted(fix)}: give choices by name, as {{'tp': 8}}")
    settings = settings_from(
        devices=devices, goal=objective, deadline_days=deadline_days, budget=budget, top=top,
        fixed=dict(fix or {}), mem_margin=mem_margin, gbs_tolerance=gbs_tolerance,
    )  # fmt: skip
    workload = workload_of(model, gbs, seq=seq, optimizer=optimizer, tokens=tokens, ramp_up=ramp_up)
    known_cluster = cluster if isinstance(cluster, Cluster) else load_cluster(str(cluster))
    known_stack = stack if isinstance(stack, Stack) else load_stack(str(stack or usual_stack(known_cluster)))
    known = calibration_of(calibration, known_cluster, known_stack)
    return plan_with(Case.of(workload, known_cluster, known_stack, known), settings)


def usual_stack(cluster: Cluster) -> str:
    """The catalogue name of the stack that a plan assumes where nobody names one: what its devices are trained with."""
    return cluster.device.usual_stack or DEFAULT_STACK


def predict(
    table: str | Path | Table,
    *,
    cluster: str | None = None,
    stack: str | None = None,
    calibration: Calibration | str | Path | None = None,
) -> Predictions:
    """Predict every row of a table: a CSV's path, a packaged table's name (`seeds`), or a Table.

    `cluster` and `stack` serve the rows that name none; `calibration` is a Calibration, a file, or `none`
    for the priors. A row that cannot be answered says why in its `error`. Raises TrimaranError where the
    table cannot be read.
    """
    _expect("table", table, Table)
    for given_name, load in ((cluster, load_cluster), (stack, load_stack)):
        if given_name is not None:
            load(str(given_name))  # a name that does not exist is told before any row is read
    if isinstance(table, Table):
        rows = table
    else:
        rows = packaged_table(str(table)) if str(table) in packaged_tables() else read_table(table)
    priors_only = calibration == "none"
    given = None if priors_only else _stated_calibration(calibration)
    answers = predict_table(rows, cluster=cluster, stack=stack, calibration=given, priors_only=priors_only)
    return Predictions(answers)


def workload_of(
    model: Model | str | Path,
    gbs: int,
    *,
    seq: int | None = None,
    optimizer: Optimizer = "adam",
    tokens: float | None = None,
    ramp_up: Sequence[int] | None = None,
) -> Workload:
    """A Workload from plain values; raises TrimaranError naming the field in one line."""
    _expect("model", model, Model)
    shape = model if isinstance(model, Model) else load_model(str(model))
    if not isinstance(ramp_up, Sequence | None) or isinstance(ramp_up, str):
        raise TrimaranError(f"ramp_up is {quoted(ramp_up)}: give three numbers, start, increment and samples")
    if ramp_up is not None and len(ramp_up) != len(RampUp.model_fields):
        raise TrimaranError(f"ramp_up has {len(ramp_up)} numbers, needs 3: start, increment and samples")
    fields = {
        "model": shape,
        "seq_len": shape.max_positions if seq is None else seq,
        "global_batch": gbs,
        "optimizer": optimizer,
        "tokens": tokens,
        "ramp_up": None if ramp_up is None else dict(zip(RampUp.model_fields, ramp_up, strict=True)),
    }
    try:
        return Workload.model_validate(fields)
    except ValidationError as error:
        raise TrimaranError(f"workload: {first_error(error)}") from None


def calibration_of(given: Calibration | str | Path | None, cluster: Cluster, stack: Stack) -> Calibration | None:
    """A calibration by file, the word `none` for the prior, or None for the shipped one."""
    return prior(cluster, stack) if given == "none" else _stated_calibration(given)


def _stated_calibration(given: Calibration | str | Path | None) -> Calibration | None:
    _expect("calibration", given, Calibration, NoneType)
    return load_calibration(given) if isinstance(given, str | Path) else given


def _expect(what: str, given: object, noun: type, *others: type) -> None:
    """Raise TrimaranError where an argument is neither such a noun nor a name or path."""
    if not isinstance(given, (str, Path, noun, *others)):
        raise TrimaranError(f"{what} is {quoted(given)}: give a {noun.__name__}, a name or a file's path")
