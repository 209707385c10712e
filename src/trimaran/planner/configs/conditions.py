"""Which branches of a script's conditions are taken, as far as what the script sets decides it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

BEGINS, ENDS = frozenset({"if", "for", "while", "until", "case"}), frozenset({"fi", "done", "esac"})
KEYWORDS = BEGINS | ENDS | {"then", "else", "elif", "do", "{", "}", "!"}
# What stands between commands of which the second is run or not by how the first one ended.
LINKS = ("&&", "||")
# Commands that answer and do nothing else.
TESTS = frozenset({"[", "[[", "test", "true", "false"})
_CLOSED_BY = {"[": "]", "[[": "]]"}
_OF_TEXT: dict[str, Callable[[str, str], bool]] = {"=": operator.eq, "==": operator.eq, "!=": operator.ne}
_OF_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt,
    "-ge": operator.ge, "-lt": operator.lt, "-le": operator.le,
}  # fmt: skip


@dataclass
class _Block:
    """A condition, a loop or commands in braces: whether what is at hand of it is run, None where that is not known.

    `before` are the answers of the branches so far. Of a `case` the `subject` is None where it is not known, and
    `patterns` are those of the branch that is about to begin, None within one.
    """

    begun_by: str
    taken: bool | None = None
    before: list[bool | None] = field(default_factory=list)
    asked: list[bool | None] | None = None
    subject: str | None = None
    patterns: list[str | None] | None = None

    def begin(self, answer: bool | None) -> None:
        """Begin the branch whose own condition has this answer."""
        self.taken = False if True in self.before else None if answer and None in self.before else answer
        self.before.append(answer)


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

    @property
    def choosing(self) -> bool:
        """Whether what stands here are patterns of a `case`."""
        return bool(self._blocks) and self._blocks[-1].patterns is not None

    def keyword(self, word: str, is_run: bool | None = True) -> None:
        """Go on behind a keyword of KEYWORDS; whether what it begins is run may be what stands before it to say."""
        if word in BEGINS:
            if is_run is not True:
                self.only(is_run)
            # of a case nothing stands here before its patterns do
            self._blocks.append(_Block(word, True if word == "case" else None, asked=[] if word == "if" else None))
        elif word == "{":
            self._blocks.append(_Block(word, is_run))
        elif self._blocks:
            self._within(word, self._blocks[-1])
        self._meet()

    def ask(self, answer: bool | None) -> None:
        """Take the answer to a condition; of one that several commands make none is known."""
        if (asked := self._blocks[-1].asked) is not None:
            asked.append(answer)

    def case(self, subject: str | None) -> None:
        """Begin to choose among the branches of the `case` just begun."""
        self._blocks[-1].subject, self._blocks[-1].patterns = subject, []

    def choose(self, patterns: Sequence[str | None]) -> None:
        """Take patterns of the branch of a `case` that is about to begin, None for one that is not known."""
        if (known := self._blocks[-1].patterns) is not None:
            known += patterns

    def chosen(self) -> None:
        """Begin the branch of a `case` before which its patterns stand, where they do."""
        if not self.choosing:
            return
        block = self._blocks[-1]
        fits = [_fits(block.subject, pattern) for pattern in block.patterns or ()]
        answer = True if True in fits else None if None in fits else False
        block.begin(answer)
        block.patterns = None
        self._meet()

    def next_choice(self) -> None:
        """End the branch of a `case`, where one is at hand."""
        if self._blocks and self._blocks[-1].begun_by == "case":
            self._blocks[-1].patterns = []

    def only(self, is_run: bool | None) -> None:
        """Begin what ends with `over`, which is run or not by how a command before it ended."""
        self._blocks.append(_Block("", is_run))
        self._meet()

    def over(self) -> None:
        """End what `only` began."""
        self._blocks.pop()

    def _meet(self) -> None:
        self.met |= self.taken and self.open and not self.asking and not self.choosing

    def _within(self, word: str, block: _Block) -> None:
        if word in ENDS or (word == "}" and block.begun_by == "{"):
            self._blocks.pop()
            if self._blocks and not self._blocks[-1].begun_by:
                self.over()
        elif word == "!" and block.asked is not None:
            block.asked.append(None)
        elif word == "then" and block.asked is not None:
            block.begin(block.asked[0] if len(block.asked) == 1 else None)
            block.asked = None
        elif word in ("elif", "else"):
            block.taken = False if True in block.before else None if None in block.before else True
            block.asked = [] if word == "elif" else None


def goes_on(link: str, answer: bool | None) -> bool | None:
    """Whether a command behind `&&` or `||` is run, by how the one before it ended; None where that is not known."""
    return answer if link == "&&" or answer is None else not answer


def _fits(subject: str | None, pattern: str | None) -> bool | None:
    return None if subject is None or pattern is None else fnmatchcase(subject, pattern)


def holds(words: list[str]) -> bool | None:
    """Whether a condition as `[ 4 -gt 1 ]` or `[[ a == b ]]` holds; None for what only a shell can tell.

    A value that is empty and not quoted is no word: `[[` reads it all the same, and `[` counts the words that are left.
    """
    if words in (["true"], ["false"]):
        return words == ["true"]
    words = ["[", *words[1:], "]"] if words[:1] == ["test"] else words
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
