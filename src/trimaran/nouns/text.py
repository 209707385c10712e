"""Text of others made fit to be shown: nothing that steers a terminal or runs, and no more than tells what it is."""

from __future__ import annotations

import re

# So much of a word, of a quoted value and of a whole line tells what they are.
WORD, QUOTED, LINE = 240, 80, 1500
_CUT = " ... "
# Characters that open a formula in a spreadsheet, where a cell begins with them.
_OPENS_A_FORMULA = ("=", "+", "-", "@", "\t", "\r", "'=", "'+", "'-", "'@")
_SHIELD = "'"
# What a Markdown renderer would take for HTML, an entity or a link; in a table, for the end of a cell.
_MARKDOWN = str.maketrans({"<": "&lt;", "&": "&amp;", "|": "\\|"})
# Terminal colours whole, so that no rest of them stays where what is not to be printed is taken out.
COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def printable(text: str) -> str:
    """The text with its lines and tabs, and a space for every other character that would steer a terminal."""
    if text.isprintable():
        return text
    # a line at a time, since the lines of a long table are printable and its line ends are not
    return "\n".join(line if line.isprintable() else _printable_line(line) for line in text.split("\n"))


def _printable_line(line: str) -> str:
    return "".join(c if c.isprintable() or c == "\t" else " " for c in COLOURS.sub("", line))


def one_line(text: str) -> str:
    """The text as one line of a length that a person reads, its middle cut out where it is longer."""
    words = (word if len(word) <= WORD else shortened(word, WORD) for word in printable(text).split())
    return shortened(" ".join(words), LINE)


def shortened(text: str, most: int) -> str:
    """At most so many characters of the text: its beginning, which tells what it is, and its end, the way out."""
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end - len(_CUT)]}{_CUT}{text[-end:]}"


def quoted(value: object) -> str:
    """A value as Python writes it, cut; also one that Python would not write: a number of 5,000 digits."""
    try:
        return shortened(repr(value), QUOTED)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to be shown"


def figure(value: float, spec: str = ".3g") -> str:
    """A number by its format; a large one is written out, 5096 where `.3g` makes 5.1e+03 of it."""
    text = f"{value:{spec}}"
    return f"{value:.0f}" if "e+" in text else text


def counted(count: int, what: str) -> str:
    """So many of something: one step, two steps."""
    return f"{count} {what}{'s' * (count != 1)}"


def spreadsheet_cell(value: object) -> object:
    """A cell of a CSV that no spreadsheet runs: text that would open a formula gets an apostrophe before it.

    Dashes alone are none, and stand for a blank in tables of others.
    """
    if not isinstance(value, str) or not value.startswith(_OPENS_A_FORMULA) or not value.strip("-"):
        return value
    try:
        float(value)
    except ValueError:
        return _SHIELD + value
    return value


def without_shield(text: str) -> str:
    """A cell as it was before `spreadsheet_cell`."""
    return text[1:] if text.startswith(_SHIELD) and text[1:].startswith(_OPENS_A_FORMULA) else text


def markdown_text(text: str) -> str:
    """Text that a Markdown renderer shows as it stands: no HTML, no entity, no link, no further cell of a table."""
    return text.translate(_MARKDOWN).replace("](", "]\\(")
