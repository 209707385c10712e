"""Settings of nested files by their kind; what is wrong raises TrimaranError naming setting and value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import quoted


def table(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section, empty where it is not there."""
    found = settings.get(name) or {}
    if not isinstance(found, dict):
        raise TrimaranError(f"{name} is {quoted(str(found))}, expected a section")
    return found


def count(settings: Mapping[str, Any], name: str, least: int = 1) -> int | None:
    """A whole number, None where it is not stated."""
    value = settings.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise TrimaranError(f"{name} is {quoted(str(value))}, expected a whole number from {least} on")
    return value


def word(settings: Mapping[str, Any], name: str, usual: str, known: Iterable[str]) -> str:
    """One of the `known` words, `usual` where it is not stated."""
    value = settings.get(name)
    found = usual if value is None else str(value)
    if found not in known:
        raise TrimaranError(f"{name} is {quoted(found)}: of it only {', '.join(known)} can be said here")
    return found
