"""One HTML file that holds all it needs: data, script, style and the plotting library."""

from __future__ import annotations

import base64
import html
import re
import zlib
from importlib.resources import files

from trimaran.nouns.noun import TrimaranError
from trimaran.report import appearance
from trimaran.report.page.content import Content
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
        "data": base64.b64encode(zlib.compress(content.model_dump_json().encode(), LEVEL)).decode(),
        "plotly": get_plotlyjs(),
        "script": appearance.script() + "".join((here / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    frame = (here / "page.html").read_text(encoding="utf-8")
    # in one pass: what is filled in may itself hold braces
    return re.sub(r"{{(\w+)}}", lambda mark: parts[mark[1]], frame)
