"""Flags of a command line, by name, as a parser of arguments would take them: of one stated twice the last counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import quoted
from trimaran.planner.configs.shell import UNSET, unset_in
from trimaran.planner.configs.stated import Stated

# Python itself refuses to read thousands of them.
_MOST_DIGITS = 18


def flags_of(words: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Every flag with its values, and the flags that are stated twice with other values."""
    found: dict[str, list[str]] = {}
    twice: list[str] = []
    before: dict[str, list[str]] = {}
    values: list[str] | None = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            name = name.replace("_", "-") if name.startswith("--n") else name  # torchrun takes both
            if name in found:
                before[name] = found[name]
            values = found[name] = [value] if equals else []
            if equals:
                values = None
        elif values is not None:
            values.append(word)
    twice = [name for name, values in before.items() if values != found[name]]
    return found, twice


def whole(text: str) -> int | None:
    """A number of digits alone, and underscores between them, as a file may mean it; None for what is none."""
    plain = text.strip().replace("_", "")
    return int(plain) if plain.isdecimal() and len(plain) <= _MOST_DIGITS else None


class Flags:
    """Reads flags by kind, and knows which were read; what is wrong raises TrimaranError naming flag and value."""

    def __init__(self, given: Mapping[str, Sequence[str]], stated: Stated) -> None:
        self.given, self.stated = given, stated
        self.read: set[str] = set()

    def has(self, flag: str) -> bool:
        """Whether a switch is there."""
        self.read.add(flag)
        return flag in self.given

    def words(self, flag: str, most: int | None = None) -> list[str]:
        """The first `most` values or all, none where the flag is not there or is something that the file does not set.

        What follows the value of a flag that takes one may be flags that are not known, as `$MORE_ARGS`.
        """
        self.read.add(flag)
        values = list(self.given.get(flag, ()))[:most]
        unset = [value for value in values if UNSET in value]
        if unset:
            self.stated.open.append(f"{flag} is {unset_in(unset[0])}, which the file does not set")
            return []
        return values

    def word(self, flag: str, known: Iterable[str] | None = None) -> str | None:
        """The value, one of `known` where that is given; None where it is not stated."""
        values = self.words(flag, 1)
        if not values:
            if flag in self.given and not any(UNSET in value for value in self.given[flag]):
                raise TrimaranError(f"{flag} has no value: write one")
            return None
        value = values[0].strip()
        if known is not None and value not in (listed := list(known)):
            raise TrimaranError(f"{flag} is {quoted(value)}: of it only {', '.join(listed)} can be said here")
        return value

    def count(self, flag: str) -> int | None:
        """A whole number."""
        value = self.word(flag)
        if value is None:
            return None
        try:
            return int(value)
        except ValueError:
            pass
        try:
            if float(value).is_integer():  # as 1e6
                return int(float(value))
        except ValueError:
            pass
        raise TrimaranError(f"{flag} is {quoted(value)}, expected a whole number")

    def degree(self, flag: str) -> int:
        """A whole number that is 1 where it is not stated."""
        value = self.count(flag)
        return 1 if value is None else value

    def number(self, flag: str) -> float | None:
        """A number."""
        value = self.word(flag)
        if value is None:
            return None
        try:
            return float(value)
        except ValueError:
            raise TrimaranError(f"{flag} is {quoted(value)}, expected a number") from None

    def unread(self) -> list[str]:
        """Flags that nothing has asked for."""
        return [flag for flag in self.given if flag not in self.read]
