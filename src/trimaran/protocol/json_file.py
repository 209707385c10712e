"""JSON files that are there whole or not at all."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` beside `path` and rename it into place."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1, allow_nan=False))
    partial.replace(path)


def finite(number: float) -> float | None:
    """The number, or None for what JSON cannot say."""
    return number if math.isfinite(number) else None
