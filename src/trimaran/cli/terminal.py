"""What verbs say on the terminal: text of others among it, which must not steer it."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from trimaran.nouns.text import one_line, printable

# A table of a hundred thousand bad rows is told by its first ones.
MOST_TOLD = 20


def tell(text: str, *, err: bool = False) -> None:
    """Print the text and a line end on standard output, or standard error; a space for each control character."""
    typer.echo(printable(text), err=err)


def tell_each(sentences: Sequence[str]) -> None:
    """A line for each on standard error, each cut to what a person reads; how many more there are behind the first."""
    for sentence in sentences[:MOST_TOLD]:
        typer.echo(one_line(sentence), err=True)
    if len(sentences) > MOST_TOLD:
        typer.echo(f"and {len(sentences) - MOST_TOLD} more", err=True)
