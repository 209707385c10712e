"""Arguments of the training command in a shell script, variables filled in as far as it sets them.

Nothing is run. Assignments, arrays, defaults (`${TP:-4}`) and whole-number arithmetic are followed from first to
the last. Of conditions the branch is taken that the script itself decides for, of others, and of loops, every one once.
What depends on the environment, on arguments of the script or on other commands stays open, and shows as `UNSET` around
the name that is not known.
"""

from __future__ import annotations

import re
import shlex
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import dropwhile

from trimaran.nouns.noun import TrimaranError
from trimaran.planner.configs.conditions import BEGINS, KEYWORDS, LINKS, TESTS, Branches, goes_on, holds
from trimaran.planner.configs.slurm_directives import nodes_of

UNSET = "\x01"
# What stands for a blank in the name of what is not known, so that no word is split there.
_BLANK = "\x02"
_LONGEST = 2**20
# How deep eval and bash -c may stand in each other, and how many characters they may be given in all.
_DEEPEST, _MOST_GIVEN = 20, 2**18
# Commands that show what another one is given.
_SHOWING = {"echo", "printf", "cat", "log"}
# What Slurm sets to the nodes of a job.
_NODES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_SHELLS = {"bash", "sh"}
_PREFIXES = {"export", "local", "readonly", "declare", "typeset"}
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_NAMED = re.compile(r"([A-Za-z_]\w*|[0-9@*#?])(?:\[([@*]|\d{1,6})\])?(?:(:?)([-=+?])(.*))?", re.DOTALL)
_BARE = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?])")
_IN_SUM = re.compile(r"[A-Za-z_]\w*(?:\[\d+\])?")
_SUM = re.compile(r"[0-9\s()+*/%-]+")
_UNKNOWN = re.compile(f"{UNSET}[^{UNSET}]*{UNSET}")
_REDIRECTED = re.compile(r"(?:\d*|&)(?:>>?|<|>\|)(.*)", re.DOTALL)
_HERE = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?[^\n]*\n")
_ALONE = re.compile(r"^[ \t]*(\w+)[ \t\r]*$", re.MULTILINE)
_OPENS = {"(": ")", "{": "}", "[": "]"}
# What stands between statements as a mark of its own.
_DOUBLE = (*LINKS, ";;")

Values = dict[str, list[str]]


class Script:
    """Commands of a script as words; `branches` are its conditions and loops, as far as it has got."""

    def __init__(self, text: str) -> None:
        nodes, _ = nodes_of(text)
        self.values: Values = {name: [str(nodes)] for name in _NODES if nodes is not None}
        self.branches = Branches()
        # what stands before the statement at hand, and how the one before that ended, where && and || ask
        self.link, self.answered = "", tuple[bool | None, ...]()
        self.depth, self.given = 0, 0
        self.commands: list[list[str]] = []
        self._follow_text(_without_here_documents(text))

    def _follow(self, words: list[str]) -> None:
        """Follow a statement, or what stands between two of them."""
        if words[0] in LINKS:
            self.link = words[0]
        elif words[0] == ";;":
            self.branches.next_choice()
        elif words[0] == ")":
            self.branches.chosen()
        elif self.branches.choosing and words[0] not in KEYWORDS:
            self.branches.choose([self._known(word) for word in words])
        else:
            self._linked(words)

    def _linked(self, words: list[str]) -> None:
        """Follow a statement that is run or not by how the one before it ended, where `&&` or `||` stands between."""
        link, self.link = self.link, ""
        is_run = goes_on(link, *self.answered) if link and self.answered and not self.branches.asking else True
        if is_run is True or words[0] == "{" or words[0] in BEGINS:
            self.answered = self._run(words, is_run)
            return
        self.branches.only(is_run)
        self._run(words)
        self.branches.over()
        self.answered = self.answered if is_run is False else (None,)

    def _run(self, words: list[str], is_run: bool | None = True) -> tuple[bool | None, ...]:
        """Follow a statement; how it ends, where that is known or a test's: of other commands `&&` and `||` ask not."""
        denied = False
        while words and (words[0] in KEYWORDS or words[0] in _PREFIXES):
            if words[0] in KEYWORDS:
                self.branches.keyword(words[0], is_run)
                denied |= words[0] == "!"
            options = words[0] in _PREFIXES
            begun, words = words[0], words[1:]
            words = [*dropwhile(lambda word: word.startswith("-"), words)] if options else words
            if begun == "case" and "in" in words:
                self.branches.case(self._known(words[0]))
                self.branches.choose([self._known(word) for word in words[words.index("in") + 1 :]])
                return ()
        if not (words and self.branches.taken):
            return ()
        answer = self._holds(words) if words[0] in TESTS else None
        if self.branches.asking:
            self.branches.ask(answer)
        is_test = words[0] in TESTS
        while words and (match := _ASSIGNED.fullmatch(words[0])):
            self._assign(*match.groups())
            words = words[1:]
        if words:
            self._command([field for word in _without_redirections(words) for field in self._fields(word)])
            return ((None if denied else answer),) if is_test else ()
        return (True,)

    def _follow_text(self, text: str) -> None:
        self.given += len(text) if self.depth else 0
        if self.depth > _DEEPEST or self.given > _MOST_GIVEN:
            raise TrimaranError(
                f"eval and bash -c of the script stand more than {_DEEPEST} deep in each other, or are given more than "
                f"{_MOST_GIVEN} characters: give the arguments themselves"
            )
        self.depth += 1
        for words in _statements(text):
            self._follow(words)
        self.depth -= 1

    def _assign(self, name: str, more: str, value: str) -> None:
        array = value.startswith("(") and value.endswith(")")
        inner = [word for line in _statements(value[1:-1]) for word in line] if array else [value]
        new = [field for word in inner for field in self._fields(word)] if array else [self._text(value)]
        before = self.values.get(name, [])
        if self.branches.open and before and not more and _unknown(new) - _unknown(before):
            return  # a branch that may not be taken leaves what is known
        old = before if more else []
        self.values[name] = [*old, *new] if array or not old else [*old[:-1], old[-1] + new[0]]
        _check(sum(map(len, self.values[name])))

    def _command(self, command: list[str]) -> None:
        if command[:1] == ["eval"]:
            self._follow_text(" ".join(command[1:]))
            return
        self.commands.append(command)
        for program, option, given in zip(command, command[1:], command[2:], strict=False):
            if program.rpartition("/")[2] in _SHELLS and option == "-c":
                self._follow_text(given)

    def _holds(self, words: list[str]) -> bool | None:
        fields = [field for word in words for field in self._fields(word)]
        return None if _unknown(fields) else holds(fields)

    def _known(self, word: str) -> str | None:
        text = self._text(word)
        return None if UNSET in text else text

    def _text(self, word: str) -> str:
        return " ".join(self._fields(word, split=False))

    def _fields(self, word: str, split: bool = True) -> list[str]:
        """A word with its quotes taken off and its variables filled in; where not quoted these fall into fields."""
        fields, quote, place = [""], "", 0
        while place < len(word):
            char = word[place]
            if char == UNSET:
                end = _known_again(word, place)
                fields[-1] += word[place:end]
                place = end - 1
            elif char == quote:
                quote = ""
            elif char in "'\"" and not quote:
                quote = char
            elif char == "\\" and quote != "'" and place + 1 < len(word):
                place += 1
                fields[-1] += word[place].strip("\n")  # a line that goes on in the next
            elif char in "$`" and quote != "'":
                end, values = self._value(word, place)
                whole = "@" in word[place:end] and len(values) > 1
                parts = values if quote and whole else [" ".join(values)] if quote or not split else _split(values)
                fields[-1] += parts[0] if parts else ""
                fields += parts[1:]
                _check(sum(map(len, fields)))
                place = end - 1
            else:
                fields[-1] += char
            place += 1
        return [field for field in fields if field or '"' in word or "'" in word]

    def _value(self, word: str, start: int) -> tuple[int, list[str]]:
        """Where the expansion that starts there ends, and its value."""
        if word[start] == "`":
            end = word.find("`", start + 1)
            return (end if end >= 0 else len(word) - 1) + 1, [_unset("the output of a command")]
        if word.startswith("$((", start):
            end = _closing(word, start + 1)
            return end, [self._sum(word[start + 3 : end - 2])]
        if word.startswith("$(", start):
            return _closing(word, start + 1), [_unset("the output of a command")]
        if word.startswith("${", start):
            end = _closing(word, start + 1)
            return end, self._braced(word[start + 2 : end - 1])
        if match := _BARE.match(word, start):
            name = match[1]
            return match.end(), self.values.get(name) or [_unset(name)]
        return start + 1, ["$"]

    def _braced(self, inside: str) -> list[str]:
        match = _NAMED.fullmatch(inside)
        if match is None:
            return [_unset(inside)]
        name, place, colon, kind, other = match.groups()
        values = self.values.get(name)
        if values is not None and place and place.isdecimal():
            values = values[int(place) : int(place) + 1] or [""]
        is_empty = bool(colon) and values is not None and not any(values)
        if kind == "+":
            known = values is not None and not _unknown(values)
            return [_unset(name)] if not known else [""] if is_empty else [self._text(other)]
        if kind in ("-", "=") and (values is None or is_empty):
            values = [self._text(other)]
            if kind == "=":
                self.values[name] = values
        return [_unset(name)] if values is None else values

    def _sum(self, expression: str) -> str:
        filled = self._text(expression)  # as of `${A[2]}` and `${N:-8}`; a name needs no mark there
        named = _IN_SUM.sub(lambda match: (self._braced(match[0]) or [""])[0], filled)
        if not _SUM.fullmatch(named) or len(named) > 200 or "**" in named:
            return _unset(f"(({expression.strip()}))")
        return _unset(f"(({expression.strip()}))") if (value := _whole(named)) is None else str(value)


def training_words(text: str, telling: Mapping[str, object]) -> tuple[list[str], bool]:
    """The words of the command with most of the flags `telling`, and whether branches were taken that might not be.

    Where no command has any, all values that the script sets count as one, as of a file that another one sources.
    """
    try:
        script = Script(text)
    except RecursionError:
        raise TrimaranError(
            "values of the script stand too deep in each other, as ${A:-${B:-...}}: give the arguments themselves"
        ) from None
    commands = [_unpacked(words) for words in script.commands if words]
    training = [words for words in commands if words[0] not in _SHOWING]
    best = max(reversed(training), key=lambda words: _told(words, telling), default=[])
    if not _told(best, telling):
        best = _unpacked([word for values in script.values.values() for word in values])
    return best, script.branches.met


def _told(words: list[str], telling: Mapping[str, object]) -> int:
    return sum(word.partition("=")[0] in telling for word in words)


def _unpacked(words: list[str]) -> list[str]:
    """Words that hold flags of their own, as those given to `bash -c`, taken apart."""
    unpacked: list[str] = []
    for word in words:
        if not (re.search(r"\s", word.strip()) and "--" in word):
            unpacked.append(word)
            continue
        try:
            unpacked += shlex.split(word.replace("\\\n", ""), comments=True)
        except ValueError:
            unpacked += word.split()
    return unpacked


def _without_here_documents(text: str) -> str:
    """The text without what stands between `<<END` and the next line that is END, in one pass over it."""
    ends: dict[str, list[tuple[int, int]]] = {}
    for found in _ALONE.finditer(text):
        ends.setdefault(found[1], []).append(found.span())
    kept, place = [], 0
    for begun in _HERE.finditer(text):
        of_word = ends.get(begun[1], [])
        at = bisect_left(of_word, (begun.end(), 0))
        if begun.start() >= place and at < len(of_word):
            kept += [text[place : begun.start()], "\n"]
            place = of_word[at][1]
    return "".join([*kept, text[place:]])


def _statements(text: str) -> Iterator[list[str]]:
    """Statements as words that keep their quotes; comments are left out, an array is one word."""
    words: list[str] = []
    word, quote, place = "", "", 0
    while place < len(text):
        char = text[place]
        if char == UNSET:
            end = _known_again(text, place)
            word += text[place:end]
            place = end - 1
        elif quote or char in "'\"":
            quote = "" if char == quote else quote or char
            word += char
            if char == "\\" and quote == '"' and place + 1 < len(text):
                place += 1
                word = word[:-1] if text[place] == "\n" else word + text[place]
        elif char == "\\":
            word += "" if text[place : place + 2] == "\\\n" else text[place : place + 2]
            place += 1
        elif char == "#" and not word:
            place = text.find("\n", place) - 1 if "\n" in text[place:] else len(text)
        elif (char == "$" and text[place + 1 : place + 2] in ("(", "{")) or (char == "(" and word.endswith("=")):
            end = _closing(text, place + (char == "$"))
            word += text[place:end]
            place = end - 1
        elif char in " \t\n;&|()":
            words += [word] if word else []
            done, words = _broken(words, text[place : place + 2])
            yield from done
            word = ""
            place += text[place : place + 2] in _DOUBLE
        else:
            word += char
        place += 1
    words += [word] if word else []
    if words:
        yield words


def _broken(words: list[str], at: str) -> tuple[list[list[str]], list[str]]:
    """What ends where two characters stand behind a word, marks by themselves; and the words that go on."""
    # `[[ a && b ]]` is one statement, before which a keyword may stand
    if at[0] in " \t" or (at[0] not in "\n;" and "[[" in words[:4] and words[-1] != "]]"):
        return [], ([*words, at] if at in LINKS else words)
    mark = at if at in _DOUBLE else at[0] if at[0] == ")" else ""
    return [each for each in (words, [mark] if mark else []) if each], []


def _known_again(text: str, start: int) -> int:
    """The place behind the name of what is not known that starts there."""
    return text.find(UNSET, start + 1) + 1 or len(text)


def _closing(text: str, start: int) -> int:
    """The place behind the bracket that closes the one at `start`, quotes and comments between them apart."""
    stack, quote, place = [_OPENS[text[start]]], "", start + 1
    while place < len(text) and stack:
        char = text[place]
        if char == "\\":
            place += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and text[place - 1] in " \t\n":
            line = text.find("\n", place)
            place = line if line >= 0 else len(text)
        elif char == stack[-1]:
            stack.pop()
        elif char in _OPENS:
            stack.append(_OPENS[char])
        place += 1
    return place


def _without_redirections(words: list[str]) -> list[str]:
    """Words of a command, with their quotes, without where its output goes and its input comes from."""
    left: list[str] = []
    rest = iter(words)
    for word in rest:
        match = _REDIRECTED.fullmatch(word)
        if match is None:
            left.append(word)
        elif not match[1]:
            next(rest, None)
    return left


def _unknown(fields: list[str]) -> set[str]:
    return {name for field in fields for name in _UNKNOWN.findall(field)}


def _split(values: list[str]) -> list[str]:
    """Fields of values that are not quoted; one that is not known stays whole."""
    return [part for value in values for part in ([value] if UNSET in value and "--" not in value else value.split())]


def _unset(name: str) -> str:
    name = f"${name}" if name.isdigit() else name  # an argument of the script
    return f"{UNSET}{name.replace(' ', _BLANK)}{UNSET}"


def unset_in(value: str) -> str:
    """How a sentence calls a value of which something is not known."""
    return value.replace(UNSET, "").replace(_BLANK, " ")


def _whole(expression: str) -> int | None:
    """The value of whole numbers with + - * / % and brackets; None where it has none."""
    tokens = re.findall(r"\d{1,12}|[-+*/%()]", expression)

    def atom() -> int:
        token = tokens.pop(0)
        if token == "-":
            return -atom()
        if token == "(":
            value = terms()
            tokens.pop(0)
            return value
        return int(token)

    def factors() -> int:
        value = atom()
        while tokens and tokens[0] in "*/%":
            sign, right = tokens.pop(0), atom()
            value = value * right if sign == "*" else value // right if sign == "/" else value % right
        return value

    def terms() -> int:
        value = factors()
        while tokens and tokens[0] in "+-":
            value += factors() if tokens.pop(0) == "+" else -factors()
        return value

    try:
        value = terms()
    except (IndexError, ValueError, ZeroDivisionError, RecursionError):
        return None
    return value if not tokens else None


def _check(length: int) -> None:
    if length > _LONGEST:
        raise TrimaranError(
            f"a variable of the script grows beyond {_LONGEST} characters: give the arguments themselves"
        )
