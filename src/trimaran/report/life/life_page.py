"""The page of a training's life: one HTML file, as the pages of plans and stores are."""

from __future__ import annotations

from importlib.resources import files

from trimaran.report.life.record import Life
from trimaran.report.page.html import filled


def life_page(life: Life) -> str:
    """The whole page as HTML, readable from file:// without a network.

    Raises TrimaranError where Plotly is not installed.
    """
    here = files("trimaran.report.life")
    main, script = ((here / name).read_text(encoding="utf-8") for name in ("life.html", "life.js"))
    return filled(main, life.title, life.model_dump_json().encode(), script)
