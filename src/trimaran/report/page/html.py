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

# In the order in which they are read, behind what all pages share: what a row is, its table, its charts, its start.
SCRIPTS = ("rows.js", "table.js", "charts.js", "page.js")
# Of the levels of deflate, the first from which a page gets little smaller.
LEVEL = 6


def page(content: Content) -> str:
    """The whole page as HTML, readable from file:// without a network.

    Raises TrimaranError where Plotly is not installed.
    """
    here = files("trimaran.report.page")
    scripts = "".join((here / name).read_text(encoding="utf-8") for name in SCRIPTS)
    main = (here / "page.html").read_text(encoding="utf-8").replace("{{map}}", content.map)
    return filled(main, content.title, _by_column(content), scripts)


def filled(main: str, title: str, data: bytes, scripts: str) -> str:
    """The frame of all pages about one page's main part, its title, JSON for its scripts, and these behind the shared.

    Raises TrimaranError where Plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise TrimaranError("the page needs Plotly, which is not installed: pip install 'trimaran[report]'") from None
    here = files("trimaran.report.page")
    parts = {
        "main": main,
        "title": html.escape(title),
        "version": html.escape(__version__),
        "style": appearance.style() + (here / "page.css").read_text(encoding="utf-8"),
        # a table of many rows says the same over and over; in base64 no string of somebody's log can end the block
        "data": base64.b64encode(zlib.compress(data, LEVEL)).decode(),
        "plotly": get_plotlyjs(),
        "script": appearance.script() + (here / "shared.js").read_text(encoding="utf-8") + scripts,
    }
    # in one pass: what is filled in may itself hold braces
    return re.sub(r"{{(\w+)}}", lambda mark: parts[mark[1]], (here / "frame.html").read_text(encoding="utf-8"))


def _by_column(content: Content) -> bytes:
    """The content as JSON, its cases as one list a column: a third of the letters, and of the time to read them."""
    columns: dict[str, Any] = {key: [getattr(case, key) for case in content.cases] for key in ShownLayout.model_fields}
    names = content.cases[0].choices if content.cases else ()
    columns["choices"] = {name: [case.choices[name] for case in content.cases] for name in names}
    return to_json(content.model_dump(exclude={"cases", "map"}) | {"cases": columns}, inf_nan_mode="null")
