"""The nouns that a measured row speaks of, and the cells that nouns fill in a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import cast, get_args

from pydantic import ValidationError

from trimaran.files.catalogue import catalogue_name, catalogue_names, load_model
from trimaran.files.row_as_run import cluster_as_named, cluster_as_run, devices_as_run, stack_as_run
from trimaran.layout.axes import devices_of, in_words
from trimaran.layout.choices import CHOICE, IN_TABLES, usual_chunks, usual_schedule
from trimaran.layout.flops import iteration_flops
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import odd_but_possible
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.columns import ASSUMED, Cell
from trimaran.nouns.flops_formula import FlopsFormula
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.model import Model, padded_vocab
from trimaran.nouns.noun import TrimaranError, first_error
from trimaran.nouns.recompute import stated_by
from trimaran.nouns.spoken.noted import says
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload

# Columns of a model's shape, and those that override it besides where a table has them.
_SHAPE = ("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab")
_EXPERTS = ("experts", "top_k", "shared_experts", "moe_ffn_hidden", "dense_layers")
_OVERRIDES = (*_SHAPE, "head_dim", "mlp", *_EXPERTS)
# What comes with a gated MLP in all published decoders that have one, where a row says no more of its model.
_GATED = {"mlp": "swiglu", "norm": "rmsnorm", "positions": "rotary", "bias": False, "tied_embedding": False}


@dataclass(frozen=True)
class Nouns:
    """What a row speaks of, and `notes` on how cells that are odd were read."""

    workload: Workload
    cluster: Cluster
    stack: Stack
    layout: Layout
    variants: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def oddities(self) -> tuple[str, ...]:
        """What is odd about the run: its notes, and what its stack or cluster is not known to do.

        Raises TrimaranError where nobody can have run it: its sizes are impossible.
        """
        return (*self.notes, *odd_but_possible(self.layout, self.workload, self.cluster, self.stack))


def nouns_of(measurement: Measurement, cluster: str | None = None, stack: str | None = None) -> Nouns:
    """Workload, cluster, stack and layout of a row; the row's own names win over the arguments.

    Raises TrimaranError with the reason when the row cannot be answered.
    """
    if blank := [name for name in ASSUMED if getattr(measurement, name) is None]:
        raise TrimaranError(f"{', '.join(blank)} {'is' if len(blank) == 1 else 'are'} not stated: fill in the column")
    cluster_name = measurement.cluster or cluster
    stack_name = measurement.stack or stack
    if cluster_name is None or stack_name is None:
        missing = "cluster" if cluster_name is None else "stack"
        raise TrimaranError(f"the row names no {missing}: fill in the column or give --{missing}")
    try:
        workload = Workload.model_validate(
            {
                "model": model_of(measurement),
                "seq_len": measurement.seq_len,
                "global_batch": measurement.gbs,
                "optimizer": measurement.optimizer,
                "capacity_factor": measurement.capacity_factor,
                "expert_imbalance": measurement.expert_imbalance or 1.0,
            }
        )
        known_stack, how = stack_as_run(measurement, stack_name)
        layout = _layout_of(devices_as_run(measurement, cluster_name), known_stack)
        stated, where = cluster_as_named(measurement, cluster_name)
    except ValidationError as error:
        raise TrimaranError(first_error(error)) from None
    notes = (*how, *where, *_notes(measurement, stated, layout))
    return Nouns(
        workload, cluster_as_run(measurement, stated, layout.devices), known_stack, layout, measurement.variants, notes
    )


def with_usual_mbs(row: Measurement, stack: str | None = None) -> Measurement:
    """A row that states no micro-batch, with that of its software: a replica's sequences by its stages, or one."""
    try:
        known, _ = stack_as_run(row, row.stack or stack or "")
        layout = _layout_of(row, known)
    except (TrimaranError, ValidationError):
        return row  # which has no answer
    mbs, left = divmod(row.gbs, layout.dp * layout.pp)
    if not known.micro_batches_as_stages or layout.pp == 1 or left or not mbs:
        return row
    return row.model_copy(update={"mbs": mbs})


def seconds_of(row: Measurement, nouns: Nouns) -> float | None:
    """Seconds of one iteration: as measured, or as they follow from tokens a second or from TFLOPs by a known formula.

    The formula is the row's or, where it names none, that of its stack's own logs. None where none of it is stated.
    """
    if row.sec_per_it is not None:
        return row.sec_per_it
    devices = nouns.layout.devices
    if row.tokens_per_s_per_gpu:
        return nouns.workload.tokens_per_step / (row.tokens_per_s_per_gpu * devices)
    formula = formula_of(row, nouns)
    if formula is None or not row.tflops:
        return None
    return iteration_flops(nouns.workload, nouns.layout.tp, formula) / (row.tflops * 1e12 * devices)


def formula_of(row: Measurement, nouns: Nouns) -> FlopsFormula | None:
    """The calculator behind a row's TFLOPs: the one that it names, or else that of its stack's own logs."""
    name = row.flops_formula or nouns.stack.flops_formula
    return cast(FlopsFormula, name) if name in get_args(FlopsFormula) else None


@cache
def _catalogue_models() -> tuple[Model, ...]:
    return tuple(load_model(name) for name in catalogue_names("models"))


@cache
def _named_model(text: str) -> Model:
    """The model that a cell of the column `model` speaks of: a catalogue name, a file, or a Model as JSON."""
    if not text.startswith("{"):
        return load_model(catalogue_name("models", text))
    try:
        return Model.model_validate_json(text)
    except ValidationError as error:
        raise TrimaranError(f"model: {first_error(error)}") from None


def _known_model(text: str | None) -> Model | None:
    """The model of a cell, or None where it has none or a name that only its author knows."""
    try:
        return None if text is None else _named_model(text)
    except TrimaranError:
        if text and (text.startswith("{") or Path(text).is_file()):
            raise
        return None


def _reshaped(model: Model, cells: Mapping[str, Cell]) -> Model:
    """The model with the sizes that cells state; sizes that it derives from others follow them."""
    stated = {name: cells[name] for name in _OVERRIDES if cells.get(name) is not None}
    if all(getattr(model, name) == size for name, size in stated.items()):
        return model
    derived = {"ffn_hidden": 4 * model.hidden, "kv_heads": model.heads, "head_dim": model.hidden // model.heads}
    kept = {name: value for name, value in model.model_dump().items() if derived.get(name) != value}
    try:
        return Model.model_validate(kept | stated)
    except ValidationError as error:
        raise TrimaranError(first_error(error)) from None


def model_of(row: Measurement) -> Model:
    """The row's model, with which its column `attention` must agree.

    Raises TrimaranError where it does not.
    """
    model = _shape_of(row)
    shares = model.kv_heads < model.heads
    if (row.attention == "mla") != (model.latent_attention is not None) and row.attention is not None:
        raise TrimaranError(
            f"attention is {row.attention}, but model {row.model or model.name} has "
            f"{'none that is latent' if model.latent_attention is None else 'latent attention'}: name its model in the "
            f"column model, or correct attention"
        )
    if row.attention == "mla":
        return model
    if row.attention is not None and (row.attention == "gqa") != shares:
        raise TrimaranError(
            f"attention is {row.attention}, but heads {model.heads} have {model.kv_heads} key-value heads: "
            f"correct attention or kv_heads"
        )
    return model


def _shape_of(row: Measurement) -> Model:
    """The row's model; without one, a shape that the catalogue knows brings what a row has no column for.

    Head, tied embedding, position and norm kinds are not columns. They are those of the model that the row
    names or, where it names none, of the catalogue model of the same layers, hidden, heads, ffn and
    vocabulary (padded or not).
    """
    if (named := _known_model(row.model)) is not None:
        model = _reshaped(named, _cells_of(row))
        too_long = model.positions == "learned" and model.max_positions < row.seq_len
        return model.model_copy(update={"max_positions": row.seq_len}) if too_long else model
    ffn = row.ffn_hidden or 4 * row.hidden
    for known in _catalogue_models():
        if known.experts != (row.experts or 0):
            continue
        same = (known.layers, known.hidden, known.heads, known.ffn_hidden) == (row.layers, row.hidden, row.heads, ffn)
        if same and row.vocab in {known.vocab, padded_vocab(known.vocab, row.tp or 1), padded_vocab(known.vocab, 1)}:
            longest = max(known.max_positions, row.seq_len)
            return _reshaped(known.model_copy(update={"max_positions": longest}), _cells_of(row))
    cells = {name: value for name, value in _cells_of(row).items() if value is not None}
    traits = _GATED if row.mlp == "swiglu" or row.experts else {}
    return Model.model_validate(
        {"name": f"{row.layers}x{row.hidden}", "max_positions": row.seq_len, **cells, "ffn_hidden": ffn, **traits}
    )


def _cells_of(row: Measurement) -> dict[str, Cell]:
    """What a row's columns say of its model."""
    return _of_dense_model({name: getattr(row, name) for name in _OVERRIDES})


def _of_dense_model(cells: Mapping[str, Cell]) -> dict[str, Cell]:
    """The cells without what some tables say of a dense model: that all of its layers have a dense MLP."""
    is_dense = not cells.get("experts") and cells.get("dense_layers") == cells.get("layers")
    return {**cells, "dense_layers": None} if is_dense else dict(cells)


def _layout_of(row: Measurement, stack: Stack) -> Layout:
    """The row's layout: what its label says, where it has one, with which its columns must agree.

    What has no column, sequence parallelism, is as the row's words have it, or as the stack has it by itself.
    """
    if row.layout_label is None:
        layout = _as_meant(_layout_of_columns(row), stack)
        said = _sequence_parallel_said(row)
        wanted = stack.sequence_parallel_default if said is None else said
        splits = wanted and layout.tp > 1 and row.seq_len % layout.tp == 0
        return layout.model_copy(update={"sequence_parallel": splits})
    layout = parse_layout(row.layout_label)
    stated = dict(layout_cells(_layout_of_columns(row.model_copy(update={"dp": row.dp or layout.dp}))))
    for name, value in layout_cells(layout):
        if stated[name] != value:
            raise TrimaranError(
                f"{name} is {stated[name]}, but layout_label {row.layout_label} says {value}: correct the wrong one"
            )
    return layout


def _sequence_parallel_said(row: Measurement) -> bool | None:
    """Whether a row's words say that ranks of a tensor share the sequence between products, or deny it; else None.

    Beside context parallelism the words may mean that, as those of DeepSpeed's Ulysses do.
    """
    if (row.cp or 1) > 1 or "ulysses" in (row.notes or "").lower():
        return None
    said = (says("sequence parallel", text) for text in (row.notes, row.system) if text)
    return next((each for each in said if each is not None), None)


def _layout_of_columns(row: Measurement) -> Layout:
    stated = {choice.name: getattr(row, choice.name) for choice in IN_TABLES}
    cells = stated | {name: CHOICE[name].default for name, cell in stated.items() if cell is None}
    of_replica = devices_of(cells, without="dp")
    if row.dp is None:
        devices = row.devices or _ranks_stated(row)
        if not devices or devices % of_replica:
            raise TrimaranError(
                f"dp is empty, and devices {devices} over {in_words(cells, without='dp')} does not give it: fill in dp"
            )
        cells["dp"] = devices // of_replica
    elif row.devices is not None and row.devices != row.dp * of_replica and _ranks_stated(row) != row.dp * of_replica:
        raise TrimaranError(
            f"{in_words(cells)} = {row.dp * of_replica}, but devices is {row.devices}: correct the one that is wrong"
        )
    recompute, every = stated_by(row.recompute or "none")
    schedule = row.schedule if (row.pp or 1) > 1 else "none"
    return Layout.model_validate(cells | {"recompute": recompute, "recompute_every": every, "schedule": schedule})


def _as_meant(layout: Layout, stack: Stack) -> Layout:
    """What columns that others filled in mean: their words for schedules and FSDP are less strict than the notation.

    1F1B with several chunks a stage is the interleaved schedule, which with one is 1F1B, or has as many as its software
    takes by itself; folded ones have two, though a table may not count them; FSDP shards all, as ZeRO 3 does. Experts
    whose ETP is left out are cut as TP, but for software that leaves them whole, and for ranks that are too few.
    """
    meant: dict[str, object] = {}
    if layout.schedule in ("1f1b", "interleaved"):
        chunks = stack.interleaved_chunks if layout.schedule == "interleaved" and layout.vpp == 1 else layout.vpp
        meant.update(vpp=chunks, schedule=usual_schedule(layout.pp, chunks))
    elif layout.vpp == 1:
        meant["vpp"] = usual_chunks(layout.schedule)
    if layout.dp_kind == "fully_sharded" and layout.zero_stage == 0:
        meant["zero_stage"] = 3
    if layout.zero_stage == 3 and layout.dp_kind == "all_reduce" and "fully_sharded" in stack.dp_kinds:
        meant["dp_kind"] = "fully_sharded"
    ranks = layout.dp * layout.cp * layout.tp
    too_few = ranks % (layout.ep * layout.tp) > 0 and ranks % layout.ep == 0
    if layout.etp == 0 and layout.tp > 1 and layout.ep > 1 and (too_few or stack.whole_experts):
        meant["etp"] = 1
    return layout.model_copy(update=meant)


def _ranks_stated(row: Measurement) -> int:
    """Ranks by nodes and ranks a node, 0 where the row does not state both."""
    return (row.nodes or 0) * (row.devices_per_node or 0)


def _notes(row: Measurement, cluster: Cluster, layout: Layout) -> tuple[str, ...]:
    """What is odd about a row's cells beside each other, and how they were read."""
    odd = (
        (
            row.model is not None and _known_model(row.model) is None,
            f"model {row.model!r} is not in the catalogue: read by the columns of its shape",
        ),
        (
            row.layout_label is None and row.etp is None and layout.etp == 1,
            f"etp is empty: experts on {layout.ep} ranks are counted as whole, ETP 1",
        ),
        (row.recompute == "unknown", "recompute is unknown: counted as none"),
        (
            row.layout_label is None and layout.tp > 1 and _sequence_parallel_said(row) is not None,
            f"counted with{'' if layout.sequence_parallel else 'out'} sequence parallelism, as the row's words say",
        ),
        (
            row.devices is not None and row.devices != layout.devices,
            f"devices is {row.devices}, but {in_words(vars(layout))} = nodes x devices_per_node = {layout.devices}",
        ),
        (
            row.layout_label is None and not (row.dp or row.devices or _ranks_stated(row)),
            f"dp and devices are empty: counted as all {layout.devices} of {row.nodes} nodes of {cluster.name}",
        ),
        (
            (row.pp or 1) > 1 and row.schedule == "interleaved" and row.vpp == 1,
            f"schedule is interleaved, but vpp is 1: read as {layout.schedule}"
            + (f" with {layout.vpp}, as the software has it by itself" if layout.vpp > 1 else "")
            + "; state vpp",
        ),
        (
            (row.devices_per_node or 0) > cluster.devices_per_node,
            f"devices_per_node is {row.devices_per_node}, but nodes of {cluster.name} have {cluster.devices_per_node}"
            + (", whose cores are shared" if cluster.device.cores else ""),
        ),
        (
            row.dp_kind == "fully_sharded" and row.zero_stage == 0,
            "dp_kind is fully_sharded, but zero_stage is 0 or empty: read as 3",
        ),
    )
    return tuple(sentence for is_odd, sentence in odd if is_odd)


def run_cells(workload: Workload, layout: Layout) -> dict[str, Cell]:
    """All that a row says of what ran: the columns of workload and layout, and both of them whole."""
    whole = {"layout_label": layout.label(), "model": model_cell(workload.model)}
    return {**dict(workload_cells(workload)), **dict(layout_cells(layout)), **whole}


def model_cell(model: Model) -> str:
    """A whole model as a cell of the column `model`: its name where the catalogue has that very model, else JSON."""
    named = model.name in catalogue_names("models") and _named_model(model.name) == model
    return model.name if named else model.model_dump_json(exclude_none=True)


def measured_workload(row: Measurement, workload: Workload) -> bool:
    """Whether a row is of this workload, whatever its model is called; one that keeps no model is told by its shape."""
    if any(getattr(row, name) != value for name, value in workload_cells(workload)):
        return False
    nameless = {"name": ""}
    return row.model is None or model_of(row).model_copy(update=nameless) == workload.model.model_copy(update=nameless)


def implied_cells(stated: Mapping[str, Cell]) -> dict[str, Cell]:
    """The cells that follow from a row's `model` and `layout_label`, for columns that it leaves blank.

    Raises TrimaranError where the model is not known or has no such shape, or the notation is not understood.
    """
    cells: dict[str, Cell] = {}
    whole = all(stated.get(name) is not None for name in ("layers", "hidden", "heads", "vocab"))
    if (model := stated.get("model")) and not (whole and _known_model(str(model)) is None):
        cells |= model_cells(_reshaped(_named_model(str(model)), _of_dense_model(stated)))
    if label := stated.get("layout_label"):
        cells |= layout_cells(parse_layout(str(label)))
    return cells


def layout_cells(layout: Layout) -> Iterator[tuple[str, Cell]]:
    """The columns that a layout fills in a row, None where it leaves one blank."""
    return ((choice.name, choice.cell(getattr(layout, choice.name))) for choice in IN_TABLES)


def workload_cells(workload: Workload) -> Iterator[tuple[str, Cell]]:
    """The columns that a workload fills in a row."""
    yield from model_cells(workload.model)
    yield from (("seq_len", workload.seq_len), ("gbs", workload.global_batch), ("optimizer", workload.optimizer))
    yield "capacity_factor", workload.capacity_factor
    yield "expert_imbalance", None if workload.expert_imbalance == 1.0 else workload.expert_imbalance


def model_cells(model: Model) -> Iterator[tuple[str, int]]:
    """The columns that a model's shape fills in a row."""
    return ((name, getattr(model, name)) for name in _SHAPE)
