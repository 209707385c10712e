"""One HTML file that holds all it needs: data, script, style and the plotting library."""

from __future__ import annotations

import html
import re
from importlib.resources import files

from trimaran.nouns.noun import TrimaranError
from trimaran.report.page.content import Content
from trimaran.version import __version__


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
        "style": (here / "page.css").read_text(encoding="utf-8"),
        # "</script>" or "<!--" in a string of somebody's log must not end the block that holds it
        "data": content.model_dump_json().replace("<", "\\u003c"),
        "plotly": get_plotlyjs(),
        "script": (here / "page.js").read_text(encoding="utf-8"),
    }
    frame = (here / "page.html").read_text(encoding="utf-8")
    # in one pass: what is filled in may itself hold braces
    return re.sub(r"{{(\w+)}}", lambda mark: parts[mark[1]], frame)
