"""What every noun of Trimaran shares: immutable, validated, strict about unknown fields."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from trimaran.nouns.text import one_line, quoted

# No count, size, time or rate that anybody means is larger.
LARGEST = 2.0**63
_SLIP = "slip"
_PLAIN_NUMBERS = (int, float)
# Types by the names that pydantic puts behind a field that takes one of several.
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "tuple": "a list"}


class TrimaranError(Exception):
    """A mistake of the user's or of the world's, told in one line.

    The message names the field, both numbers and the way out. The command line prints it
    and leaves with `exit_status`; a library caller may catch it. What it quotes of others is cut and cannot steer a
    terminal.
    """

    exit_status = 2

    def __init__(self, message: object) -> None:
        super().__init__(one_line(str(message)))


class Noun(BaseModel):
    """A frozen value object. Unknown fields are refused; so are NaN, infinity, and true or false for a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_slips(cls, data: object) -> object:
        """What pydantic would word badly (a misspelt name) or take (true for 1, 1e30 for a size)."""
        if not isinstance(data, dict):
            return data
        fields = _fields(cls)
        for name, given in data.items():
            takes = fields.get(name)
            if takes is None:
                raise ValueError(unknown(str(name), fields))
            if type(given) is str or (type(given) in _PLAIN_NUMBERS and -LARGEST < given < LARGEST):
                continue  # as nearly all cells of a hundred thousand rows
            if given is not None and not isinstance(given, str) and (int in takes or float in takes):
                for where, value in _numbers(name, given):
                    if isinstance(value, bool) and bool not in takes:
                        raise _slip(f"{where} is {str(value).lower()}, and a number is expected")
                    if abs(value) >= LARGEST:
                        raise _slip(f"{where} is {_size(value)}, which is beyond any such number: correct it")
        return data


def unknown(name: str, known: Collection[str]) -> str:
    """The sentence on a name that is not among those known: the nearest one, or all of them."""
    return f"{quoted(name)} is not known: {meant(name, known)}"


def meant(name: str, known: Collection[str]) -> str:
    """What a name that is not among those known may have been meant to be: the nearest one, or one of all of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"it is one of {', '.join(known)}"


def _size(value: float) -> str:
    try:
        return f"{value:.4g}"
    except OverflowError:
        return "a number of more than 300 digits"


def _slip(sentence: str) -> PydanticCustomError:
    """An error whose sentence begins with the field; first_error puts the way to it before."""
    return PydanticCustomError(_SLIP, "{sentence}", {"sentence": sentence})


def _numbers(name: str, given: object) -> Iterator[tuple[str, int | float]]:
    """The number itself, or those in a list or a plain table, truths among them; and where each is."""
    if isinstance(given, int | float):
        yield name, given
        return
    inside = given.items() if isinstance(given, dict) else enumerate(given) if isinstance(given, list | tuple) else ()
    yield from ((f"{name}.{key}", value) for key, value in inside if isinstance(value, int | float))


@cache
def _fields(noun: type[Noun]) -> dict[str, frozenset[Any]]:
    """What each field takes, looked up once a class: a store has rows by the hundred thousand."""
    return {name: _takes(noun, name) for name in noun.model_fields}


def _takes(noun: type[Noun], name: str) -> frozenset[Any]:
    """The plain types in a field's annotation; none where a noun is among them, which sees to itself."""
    types = frozenset(_types(noun.model_fields[name].annotation))
    return frozenset() if any(isinstance(kind, type) and issubclass(kind, Noun) for kind in types) else types


def _types(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in get_args(annotation):
        yield from _types(inner)


def first_error(error: ValidationError) -> str:
    """The first complaint of a pydantic error, in one line with the field and its value."""
    errors = error.errors()
    first = errors[0]
    where = ".".join(map(str, _field(first["loc"])))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == _SLIP:
        return f"{where}.{message}" if where else message
    given = first.get("input")
    alternatives = [alternative for other in errors if (alternative := _alternative(first["loc"], other["loc"]))]
    if len(alternatives) > 1:
        return f"{where}: {', '.join(dict.fromkeys(alternatives))} is expected (it is {quoted(given)})"
    if first["type"] in ("tuple_type", "list_type"):
        message = f"a list is expected, as [{quoted(given)}]"
    shown = "" if isinstance(given, dict | list | tuple) or not where else f" (it is {quoted(given)})"
    return f"{where}: {message}{shown}" if where else message


def _field(way: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The way to a field without the type, of several that it takes, that pydantic puts behind it."""
    return way[:-1] if way and _kind(way[-1]) else way


def _alternative(first: tuple[int | str, ...], way: tuple[int | str, ...]) -> str:
    """What the field of the first complaint takes besides, by the way to another complaint; empty where of another."""
    field = _field(first)
    return _kind(way[len(field)]) if first != field and len(way) > len(field) and way[: len(field)] == field else ""


def _kind(tag: int | str) -> str:
    """A type, of several that a field takes, in words; empty for what is none."""
    return _KINDS.get(str(tag).partition("[")[0], "")


def assignments(words: Iterable[str], what: str, form: str, example: str) -> dict[str, str]:
    """What `NAME=VALUE` words of a command line give; raises TrimaranError naming the word that is not one."""
    given: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise TrimaranError(f"{what} {word!r} is not {form}: write for example {example}")
        given[name.strip().replace("-", "_")] = value.strip()
    return given
