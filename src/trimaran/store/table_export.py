"""Measurements as a CSV table in the contract's columns, or as Parquet with everything that a run left."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from trimaran.files.row_table import write_table
from trimaran.nouns.columns import BY_NAME
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError

_GROUP = 5000
_FLOATS = frozenset({"sec_per_it_spread", "predicted_sec_per_it", "predicted_mem_gib", "wall_s", "others_share"})
_LISTS = frozenset({"step_times_s", "losses", "mem_gib_per_rank"})
_MAPPINGS = frozenset({"libraries", "environment"})


def export_table(measurements: Iterable[Measurement], path: Path) -> int:
    """Write the rows as what the path ends in, `.csv` or `.parquet`, and return their number.

    They may be gone through twice: a list, or the rows that a store has chosen. Raises TrimaranError where the path
    ends in anything else, or cannot be written.
    """
    writers = {".csv": export_csv, ".parquet": export_parquet}
    if path.suffix.lower() not in writers:
        raise TrimaranError(f"{path} ends in {path.suffix or 'nothing'!r}: the table is written as .csv or .parquet")
    return writers[path.suffix.lower()](measurements, path)


def export_csv(measurements: Iterable[Measurement], path: str | Path) -> int:
    """Write the rows to `path`, whole or not at all, and return their number.

    What was not measured is an empty cell.
    """
    return write_table(path, list(measurements) if isinstance(measurements, Iterator) else measurements)


def export_parquet(measurements: Iterable[Measurement], path: str | Path) -> int:
    """Write the rows with every field: lists stay lists, mappings are JSON; whole or not at all.

    Raises TrimaranError where pyarrow is not installed, or the path cannot be written.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise TrimaranError("Parquet needs pyarrow: pip install 'trimaran[train]', or write .csv") from None
    schema = pa.schema([pa.field(name, _arrow_type(pa, name)) for name in Measurement.model_fields])
    target = Path(path)
    temporary = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        number, rows = 0, iter(measurements)
        with pq.ParquetWriter(temporary, schema) as writer:
            # in groups, since the cells of a hundred thousand rows with every field would fill the memory
            while (group := list(islice(rows, _GROUP))) or not number:
                writer.write_table(pa.Table.from_pylist([_arrow_row(row) for row in group], schema=schema))
                number += len(group)
                if not group:
                    break
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        reason = error.strerror or str(error)
        raise TrimaranError(f"{target} cannot be written: {reason}; free space or choose another path") from None
    return number


def _arrow_row(row: Measurement) -> dict[str, Any]:
    return {name: _arrow_cell(name, getattr(row, name)) for name in Measurement.model_fields}


def _arrow_type(pa: Any, name: str) -> Any:
    if name in _LISTS:
        return pa.list_(pa.float64())
    if name in _FLOATS:
        return pa.float64()
    kind = "int" if name == "seed" else BY_NAME[name].kind if name in BY_NAME else "text"
    return {"int": pa.int64(), "float": pa.float64(), "text": pa.string()}[kind]


def _arrow_cell(name: str, value: Any) -> Any:
    if name in _LISTS:
        return list(value)
    return json.dumps(value, sort_keys=True) if name in _MAPPINGS else value
