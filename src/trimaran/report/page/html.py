"""One HTML file that holds all it needs: data, script, style and the plotting library."""

from __future__ import annotations

import base64
import html
import re
import zlib
from importlib.resources import files
from typing import Any

from pydantic_core import to_json

from trimaran.nouns.noun import TrimaranError
from trimaran.report import appearance
from trimaran.report.page.content import Content, ShownLayout
from trimaran.version import __version__

# In the order in which they are read: what a row is, its table, its charts, and the page's start.
SCRIPTS = ("rows.js", "table.js", "charts.js", "page.js")
# Of the levels of deflate, the first from which a page gets little smaller.
LEVEL = 6


def page(content: Content) -> str:
    """The whole page as HTML, readable from file:// without a network.

    Raises TrimaranError where Plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise TrimaranError("the page needs Plotly, which is not installed: pip install 'trimaran[report]'") from None
    here = files("trimaran.report.page")
    parts = {
        "title": html.escape(content.title),
        "version": html.escape(__version__),
        "style": appearance.style() + (here / "page.css").read_text(encoding="utf-8"),
        # a table of many rows says the same over and over; in base 64 no string of somebody's log can end the block
        "data": base64.b64encode(zlib.compress(_by_column(content), LEVEL)).decode(),
        "plotly": get_plotlyjs(),
        "script": appearance.script() + "".join((here / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    frame = (here / "page.html").read_text(encoding="utf-8")
    # in one pass: what is filled in may itself hold braces
    return re.sub(r"{{(\w+)}}", lambda mark: parts[mark[1]], frame)


def _by_column(content: Content) -> bytes:
    """The content as JSON, its cases as one list a column: a third of the letters, and of the time to read them."""
    columns: dict[str, Any] = {key: [getattr(case, key) for case in content.cases] for key in ShownLayout.model_fields}
    names = content.cases[0].choices if content.cases else ()
    columns["choices"] = {name: [case.choices[name] for case in content.cases] for name in names}
    return to_json(content.model_dump(exclude={"cases"}) | {"cases": columns}, inf_nan_mode="null")
