"""JSON of others: an object where the text is one, and its numbers where they are."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def json_object(text: str) -> dict[str, Any]:
    """The object that the text is; an empty one where it is none."""
    if not text.lstrip().startswith("{"):
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def is_json(text: str) -> bool:
    """Whether the text is one object or one list."""
    if text.lstrip()[:1] not in ("{", "["):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def number_in(fields: Mapping[str, object], name: str) -> float | None:
    """A finite number under that name, or None."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
