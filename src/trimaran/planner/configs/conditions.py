"""Which branches of a script's conditions are taken, as far as what the script sets decides it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

BEGINS, ENDS = frozenset({"if", "for", "while", "until", "case"}), frozenset({"fi", "done", "esac"})
KEYWORDS = BEGINS | ENDS | {"then", "else", "elif", "do", "{", "}", "!"}
_CLOSED_BY = {"[": "]", "[[": "]]"}
_OF_TEXT: dict[str, Callable[[str, str], bool]] = {"=": operator.eq, "==": operator.eq, "!=": operator.ne}
_OF_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt,
    "-ge": operator.ge, "-lt": operator.lt, "-le": operator.le,
}  # fmt: skip


@dataclass
class _Block:
    """A condition or a loop: whether its branch at hand is taken, None where that is not known."""

    taken: bool | None = None
    before: list[bool | None] = field(default_factory=list)
    asked: list[bool | None] | None = None


@dataclass
class Branches:
    """Where in a script's conditions and loops a statement stands, told each keyword and each condition in turn.

    `met`: whether anything was that the script itself does not decide.
    """

    met: bool = False
    _blocks: list[_Block] = field(default_factory=list)

    @property
    def taken(self) -> bool:
        """Whether what stands here may be run."""
        return all(block.taken is not False for block in self._blocks)

    @property
    def open(self) -> bool:
        """Whether what stands here may be passed over too."""
        return any(block.taken is None for block in self._blocks)

    @property
    def asking(self) -> bool:
        """Whether what stands here is a condition."""
        return bool(self._blocks) and self._blocks[-1].asked is not None

    def keyword(self, word: str) -> None:
        """Go on behind a keyword of KEYWORDS."""
        if word in BEGINS:
            self._blocks.append(_Block(asked=[] if word == "if" else None))
        elif self._blocks:
            self._within(word, self._blocks[-1])
        self.met |= self.taken and self.open and not self.asking

    def ask(self, answer: bool | None) -> None:
        """Take the answer to a condition; of one that several commands make none is known."""
        if (asked := self._blocks[-1].asked) is not None:
            asked.append(answer)

    def _within(self, word: str, block: _Block) -> None:
        if word in ENDS:
            self._blocks.pop()
        elif word == "!" and block.asked is not None:
            block.asked.append(None)
        elif word == "then" and block.asked is not None:
            answer = block.asked[0] if len(block.asked) == 1 else None
            block.taken = False if True in block.before else answer
            block.asked = None
        elif word in ("elif", "else"):
            block.before.append(block.taken)
            block.taken = False if True in block.before else None if None in block.before else True
            block.asked = [] if word == "elif" else None


def holds(words: list[str]) -> bool | None:
    """Whether a condition as `[ 4 -gt 1 ]` or `[[ a == b ]]` holds; None for what only a shell can tell.

    A value that is empty and not quoted is no word: `[[` reads it all the same, and `[` counts the words that are left.
    """
    if words in (["true"], ["false"]):
        return words == ["true"]
    if len(words) < 2 or _CLOSED_BY.get(words[0]) != words[-1]:
        return None
    first, last = 1, len(words) - 1
    while first + 1 < last and words[first] == "!" and words[first + 1] not in _OF_TEXT:
        first += 1
    found = _tested(words[first:last], splits=words[0] == "[")
    return found if found is None or first % 2 else not found


def _tested(words: list[str], *, splits: bool) -> bool | None:
    """Whether what stands between the brackets holds; `splits`: values are split into words there."""
    match words:
        case []:
            return False
        case ["-n" | "-z" as kind, value]:
            return bool(value) == (kind == "-n")
        case ["-n" | "-z" as kind] if not splits:
            return kind == "-z"
        case [value]:
            return bool(value)
        case [sign, _] if sign in _OF_TEXT and splits:
            return False  # bash misses an operand, which is no success
        case [sign, right] if sign in _OF_TEXT:
            return _tested(["", sign, right], splits=splits)
        case [left, sign] if sign in _OF_TEXT and not splits:
            return _tested([left, sign, ""], splits=splits)
        case [left, sign, right] if sign in _OF_TEXT and not any(char in right for char in "*?["):
            return _OF_TEXT[sign](left, right)
        case [left, sign, right] if sign in _OF_NUMBERS:
            try:
                return _OF_NUMBERS[sign](int(left), int(right))
            except ValueError:
                return None
        case _:
            return None
