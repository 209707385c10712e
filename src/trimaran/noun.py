"""What every noun of Trimaran shares: immutable, validated, strict about unknown fields."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError


class TrimaranError(Exception):
    """A mistake of the user's or of the world's, told in one line.

    The message names the field, both numbers and the way out. The command line prints it
    and leaves with `exit_status`; a library caller may catch it.
    """

    exit_status = 2


class Noun(BaseModel):
    """A frozen value object. Unknown fields are refused, NaN and infinity too."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def first_error(error: ValidationError) -> str:
    """The first complaint of a pydantic error, in one line with the field and its value."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    given = first.get("input")
    shown = "" if isinstance(given, dict | list | tuple) or not where else f" (it is {given!r})"
    return f"{where}: {message}{shown}" if where else message
