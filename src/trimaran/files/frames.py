"""Results as a notebook shows them: a data frame of pandas or polars, a table in HTML."""

from __future__ import annotations

import html
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from trimaran.nouns.noun import TrimaranError

FrameLibrary = Literal["pandas", "polars"]
# The one that is installed is taken, of both the first; and how each is told to look at all rows for a column's type.
_LIBRARIES: Mapping[FrameLibrary, Mapping[str, Any]] = {"pandas": {}, "polars": {"infer_schema_length": None}}


def frame_of(records: Sequence[Mapping[str, Any]], library: FrameLibrary | None = None) -> Any:
    """A DataFrame of pandas or polars with one row a record: of `library`, else of the one that is installed.

    Raises TrimaranError, naming what to install, where there is none.
    """
    if library is not None and library not in _LIBRARIES:
        raise TrimaranError(f"to_frame library {library!r} is not known: it is one of {', '.join(_LIBRARIES)}")
    asked = tuple(_LIBRARIES) if library is None else (library,)
    for name in asked:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        return module.DataFrame([dict(record) for record in records], **_LIBRARIES[name])
    missing = f"{asked[0]}, which is" if len(asked) == 1 else f"{' or '.join(asked)}, which are"
    raise TrimaranError(f"to_frame needs {missing} not installed: pip install {asked[0]}")


def html_table(records: Sequence[Mapping[str, Any]], caption: str = "") -> str:
    """The records as a table in HTML; numbers have four digits, and text of others is text."""
    columns = list(dict.fromkeys(key for record in records for key in record))
    shown = [key for key in columns if any(record.get(key) is not None for record in records)]
    lines = ["<table>", f"<caption>{html.escape(caption)}</caption>"] if caption else ["<table>"]
    lines.append(f"<tr>{''.join(f'<th>{html.escape(key)}</th>' for key in shown)}</tr>")
    lines += [f"<tr>{''.join(_cell(record.get(key)) for key in shown)}</tr>" for record in records]
    return "\n".join([*lines, "</table>"])


def _cell(value: Any) -> str:
    if value is None:
        return "<td></td>"
    if isinstance(value, float):
        return f'<td style="text-align: right">{value:.4g}</td>'
    side = ' style="text-align: right"' if isinstance(value, int) and not isinstance(value, bool) else ""
    return f"<td{side}>{html.escape(str(value))}</td>"
