"""What all pages look like: one palette, and one style and script for tables that fit their window."""

from __future__ import annotations

import json
from importlib.resources import files

from trimaran.cost.effects.time_effects import TIME_PARTS

# As many colours as a chart has curves, told apart on white and on a dark page.
PALETTE = (
    "#0b74b8", "#d1621b", "#3f9b46", "#b63e70", "#7b61c4", "#a78a0b", "#12938f", "#8a5a44", "#6c7a89", "#5fa8e8",
    "#e08fb4", "#8fbf3f", "#c24fd0",
)  # fmt: skip


def color_of_part(part: str) -> str:
    """The colour of a part of time, the same in every chart whatever other parts it shows."""
    return PALETTE[TIME_PARTS.index(part) % len(PALETTE)]


def style() -> str:
    """The style that every page begins with: colours, light and dark, and tables."""
    return files("trimaran.report").joinpath("appearance.css").read_text(encoding="utf-8")


def script() -> str:
    """The palette and `fitTable`, for every page's own script."""
    source = files("trimaran.report").joinpath("appearance.js").read_text(encoding="utf-8")
    return f"const PALETTE = {json.dumps(PALETTE)};\n{source}"
