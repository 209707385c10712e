"""Rows of the table contract: read a CSV, check every cell, and turn a row into nouns."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from trimaran.files.catalogue import CATALOG, catalogue_names, load_cluster, load_model, load_stack, write_atomically
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.columns import BY_NAME, COLUMNS, Cell, missing_required, parse_cell
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.model import Model, padded_vocab
from trimaran.nouns.noun import TrimaranError, first_error
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload
from trimaran.recipe.published import StudyTable

SEEDS = "seeds"
# Allocators that keep freed memory for the process; glibc's gives large blocks back to the system.
KEEPING_ALLOCATORS = ("tcmalloc", "jemalloc", "mimalloc")


@dataclass(frozen=True)
class Row:
    """One line of a table: its cells as they stand, and the Measurement or the reason there is none."""

    number: int
    cells: dict[str, str]
    measurement: Measurement | None
    error: str | None


@dataclass(frozen=True)
class Table:
    """A table as read: header in its order, rows, unknown columns included."""

    header: tuple[str, ...]
    rows: tuple[Row, ...]
    source: str = ""

    @property
    def measurements(self) -> list[Measurement]:
        """The rows that could be read."""
        return [row.measurement for row in self.rows if row.measurement is not None]


@dataclass(frozen=True)
class Nouns:
    """What a row speaks of."""

    workload: Workload
    cluster: Cluster
    stack: Stack
    layout: Layout
    variants: dict[str, str] = field(default_factory=dict)


def read_table(path: str | Path) -> Table:
    """Read a CSV of the table contract.

    A bad cell is named by row and column in that row's `error`, and the other rows go on.
    Raises TrimaranError when the file cannot be read or lacks a required column.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        shipped = f"; tables that ship are {', '.join(packaged_tables())}" if not Path(path).suffix else ""
        raise TrimaranError(
            f"table {path} cannot be read: {error.strerror or error}; check the path{shipped}"
        ) from None
    except UnicodeDecodeError:
        raise TrimaranError(f"table {path} is not UTF-8 text: export it as CSV in UTF-8") from None
    except ValueError as error:  # a path that no file system takes
        raise TrimaranError(f"table {str(path)!r} cannot be read: {error}; check the path") from None
    return parse_table(text, str(path))


def packaged_table(name: str = SEEDS) -> Table:
    """A table of published measurements that Trimaran ships, by name."""
    entry = CATALOG / "measurements" / f"{name}.csv"
    if not entry.is_file():
        raise TrimaranError(f"packaged table {name!r} does not exist: it is one of {', '.join(packaged_tables())}")
    return parse_table(entry.read_text(encoding="utf-8"), name)


def study_table(table: StudyTable) -> Table:
    """The packaged rows of a study's table, in their order. Raises TrimaranError where there are none."""
    wanted = {name: {value} if isinstance(value, str) else set(value) for name, value in table.where.items()}
    whole = packaged_table(table.packaged)
    rows = tuple(row for row in whole.rows if all(row.cells.get(name, "") in values for name, values in wanted.items()))
    if not rows:
        raise TrimaranError(f"tables.{table.name}: no row of {table.packaged} has {table.where}: correct tables.where")
    return Table(whole.header, rows, f"{table.packaged}, {table.name}")


@cache
def packaged_tables() -> tuple[str, ...]:
    """Names of the tables of measured runs that Trimaran ships."""
    folder = CATALOG / "measurements"
    names = (entry.name.removesuffix(".csv") for entry in folder.iterdir() if entry.name.endswith(".csv"))
    return tuple(sorted(name for name in names if not name.startswith("micro_") and name != "seeds_corrections"))


def parse_table(text: str, source: str) -> Table:
    """Parse CSV text of the table contract; see read_table."""
    try:
        lines = list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise TrimaranError(f"table {source} is not valid CSV: {error}") from None
    if not lines:
        raise TrimaranError(f"table {source} is empty: its first line must name the columns")
    header = tuple(name.strip() for name in lines[0])
    if duplicate := next((name for name in header if header.count(name) > 1), None):
        raise TrimaranError(f"table {source} has column {duplicate!r} twice: rename one")
    if missing := missing_required(header):
        hint = "; its cells must be separated by commas" if len(header) == 1 else ""
        raise TrimaranError(f"table {source} lacks column {missing[0]!r}: required are {_required_names()}{hint}")
    rows = tuple(_parse_row(number, header, cells) for number, cells in enumerate(lines[1:], start=1) if any(cells))
    return Table(header, rows, source)


def misspelt_columns(header: Sequence[str]) -> list[str]:
    """A sentence for each unknown column that resembles a missing one: perhaps it was not meant to pass through."""
    missing = [name for name in BY_NAME if name not in header]
    unknown = ((name, get_close_matches(name, missing, n=1, cutoff=0.8)) for name in header if name not in BY_NAME)
    return [
        f"column {name!r} is not known and passes through unread, and column {near[0]!r} is missing: is it that one?"
        for name, near in unknown
        if near
    ]


def _required_names() -> str:
    return ", ".join(column.name for column in COLUMNS if column.required)


def _parse_row(number: int, header: Sequence[str], cells: Sequence[str]) -> Row:
    raw = dict(zip(header, cells, strict=False))
    if len(cells) != len(header):
        error = f"row {number} has {len(cells)} cells, the header {len(header)}: a cell is missing or shifted"
        return Row(number, raw, None, error)
    values: dict[str, Cell] = {}
    for name, column in BY_NAME.items():
        try:
            values[name] = parse_cell(column, raw.get(name, ""))
        except ValueError as error:
            return Row(number, raw, None, f"row {number}: {error}")
        if column.required and values[name] is None:
            return Row(number, raw, None, f"row {number}: {name} is empty, and it has no default: fill it in")
    try:
        return Row(number, raw, Measurement.model_validate(values), None)
    except ValidationError as error:
        return Row(number, raw, None, f"row {number}: {first_error(error)}")


def write_table(path: str | Path, measurements: Iterable[Measurement], extra: Sequence[str] = ()) -> None:
    """Write measurements as CSV of the table contract, with `extra` harness fields behind, atomically."""
    write_atomically(path, format_table(measurements, extra))


def format_table(measurements: Iterable[Measurement], extra: Sequence[str] = ()) -> str:
    """Measurements as CSV text of the table contract."""
    names = [*BY_NAME, *extra]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for measurement in measurements:
        cells = (getattr(measurement, name) for name in names)
        writer.writerow(["" if cell is None else cell for cell in cells])
    return out.getvalue()


def nouns_of(measurement: Measurement, cluster: str | None = None, stack: str | None = None) -> Nouns:
    """Workload, cluster, stack and layout of a row; the row's own names win over the arguments.

    Raises TrimaranError with the reason when the row cannot be answered.
    """
    if measurement.cp != 1:
        raise TrimaranError(f"context parallelism {measurement.cp} is not supported yet: only cp 1 is")
    cluster_name = measurement.cluster or cluster
    stack_name = measurement.stack or stack
    if cluster_name is None or stack_name is None:
        missing = "cluster" if cluster_name is None else "stack"
        raise TrimaranError(f"the row names no {missing}: fill in the column or give --{missing}")
    try:
        model = _model_of(measurement)
        workload = Workload(
            model=model,
            seq_len=measurement.seq_len,
            global_batch=measurement.gbs,
            optimizer="sgd" if measurement.optimizer == "sgd" else "adam",
        )
        layout = _layout_of(measurement)
        shaped = _shaped(_load_cluster(cluster_name), measurement)
    except ValidationError as error:
        raise TrimaranError(first_error(error)) from None
    return Nouns(workload, shaped, _preloaded(_load_stack(stack_name), measurement), layout, measurement.variants)


_load_cluster = cache(load_cluster)
_load_stack = cache(load_stack)


@cache
def _catalogue_models() -> tuple[Model, ...]:
    return tuple(load_model(name) for name in catalogue_names("models"))


def _model_of(row: Measurement) -> Model:
    """The row's model; a shape that the catalogue knows brings what a row has no column for.

    Head, tied embedding, position and norm kinds are not columns. They are taken from the
    catalogue model of the same layers, hidden, heads, ffn and vocabulary (padded or not).
    """
    ffn = row.ffn_hidden or 4 * row.hidden
    for known in _catalogue_models():
        same = (known.layers, known.hidden, known.heads, known.ffn_hidden) == (row.layers, row.hidden, row.heads, ffn)
        if same and row.vocab in {known.vocab, padded_vocab(known.vocab, row.tp), padded_vocab(known.vocab, 1)}:
            return known.model_copy(update={"max_positions": max(known.max_positions, row.seq_len), "vocab": row.vocab})
    return Model(
        name=f"{row.layers}x{row.hidden}",
        layers=row.layers,
        hidden=row.hidden,
        heads=row.heads,
        kv_heads=row.kv_heads or 0,
        ffn_hidden=ffn,
        vocab=row.vocab,
        max_positions=row.seq_len,
    )


def _layout_of(row: Measurement) -> Layout:
    dp = row.dp
    if dp is None:
        devices = row.devices or (row.nodes or 0) * (row.devices_per_node or 0)
        if not devices or devices % (row.tp * row.pp):
            raise TrimaranError(
                f"dp is empty, and devices {devices} over TP {row.tp} x PP {row.pp} does not give it: fill in dp"
            )
        dp = devices // (row.tp * row.pp)
    elif row.devices is not None and row.devices != dp * row.tp * row.pp:
        raise TrimaranError(
            f"DP {dp} x TP {row.tp} x PP {row.pp} = {dp * row.tp * row.pp}, but devices is {row.devices}: "
            f"correct the one that is wrong"
        )
    return Layout.model_validate(
        {
            "dp": dp,
            "tp": row.tp,
            "pp": row.pp,
            "vpp": row.vpp,
            "mbs": row.mbs,
            "zero_stage": row.zero_stage,
            "dp_kind": row.dp_kind,
            "recompute": "none" if row.recompute == "unknown" else row.recompute,
            "precision": row.precision,
            "schedule": row.schedule if row.pp > 1 else "none",
        }
    )


def _shaped(cluster: Cluster, row: Measurement) -> Cluster:
    """The cluster as the row ran it: its network as shaped, its clock as set, its nodes as filled."""
    inter = cluster.inter
    if row.network_gbps is not None:
        inter = inter.model_copy(update={"bandwidth_gbps": row.network_gbps})
    if row.network_delay_ms is not None:
        inter = inter.model_copy(update={"latency_us": row.network_delay_ms * 1000.0})
    device = cluster.device
    clock = row.variants.get("clock")
    if clock and device.clock_ghz:
        try:
            factor = float(clock.removesuffix("GHz")) / device.clock_ghz
        except ValueError:
            raise TrimaranError(f"variant clock={clock} is not a frequency: write it as clock=2.2GHz") from None
        peaks = {precision: peak * factor for precision, peak in device.peak_tflops.items()}
        device = device.model_copy(update={"clock_ghz": device.clock_ghz * factor, "peak_tflops": peaks})
    per_node = min(row.devices_per_node or cluster.devices_per_node, cluster.devices_per_node)
    return cluster.model_copy(update={"inter": inter, "device": device, "devices_per_node": per_node})


def _preloaded(stack: Stack, row: Measurement) -> Stack:
    """The stack as the row ran it: an allocator of LD_PRELOAD keeps what is freed."""
    preload = row.variants.get("LD_PRELOAD", "")
    if any(name in preload for name in KEEPING_ALLOCATORS):
        return stack.model_copy(update={"keeps_freed_memory": True})
    return stack


def layout_cells(layout: Layout) -> Iterator[tuple[str, str | int]]:
    """The columns that a layout fills in a row."""
    yield from (("dp", layout.dp), ("tp", layout.tp), ("pp", layout.pp), ("vpp", layout.vpp), ("mbs", layout.mbs))
    yield from (("zero_stage", layout.zero_stage), ("dp_kind", layout.dp_kind), ("recompute", layout.recompute))
    yield from (("precision", layout.precision), ("schedule", layout.schedule))


def workload_cells(workload: Workload) -> Iterator[tuple[str, str | int]]:
    """The columns that a workload fills in a row."""
    model = workload.model
    yield from (("layers", model.layers), ("hidden", model.hidden), ("ffn_hidden", model.ffn_hidden))
    yield from (("heads", model.heads), ("kv_heads", model.kv_heads), ("vocab", model.vocab))
    yield from (("seq_len", workload.seq_len), ("gbs", workload.global_batch), ("optimizer", workload.optimizer))
