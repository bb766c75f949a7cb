"""Patterns and the names that they match. Knows nothing of torch."""

import itertools
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property, lru_cache
from heapq import nlargest
from importlib import import_module
from operator import itemgetter
from typing import Any, TypeAlias

from gradsurgeon.errors import HintedError

_MAX_TEXT = 500
_MAX_LIKELY, _MAX_LENGTH = 50, 120  # names that difflib compares, and their characters
_MAX_CHOICES = 64  # combinations of lists whose items differ in length: each is one expression
_MAX_RANGE_DIGITS = 18
# Most ways through a short name: three `.*` and a choice of eight. On the longest possible name of a file three
# `.*` take some 0.1 s.
_SHORT = 32
_MAX_WAYS = 1 << 18
_MAX_COUNT = 16  # repeats

# The parser of `re` itself, so the judged expression is the one that runs. It has no public name.
_sre: Any = import_module("re._parser")
_REPEATS = {"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"}
# The parts of an expression that hold another.
_PARTS: dict[str, Any] = {
    "SUBPATTERN": itemgetter(3),
    "ASSERT": itemgetter(1),
    "ASSERT_NOT": itemgetter(1),
    "ATOMIC_GROUP": itemgetter(slice(None)),
}
_GLOB = 'write a glob, such as "*.layers.{0..5}.*"'

_RANGE = re.compile(r"([0-9]+)\.\.([0-9]+)")

_Options: TypeAlias = "list[list[str | None]]"  # each a sequence of expressions, None being a star


class PatternError(HintedError):
    """A pattern that cannot be used."""


@dataclass(frozen=True)
class Pattern:
    text: str
    expression: str = field(repr=False, compare=False)

    @cached_property
    def regex(self) -> re.Pattern[str]:
        with _quiet():
            return re.compile(self.expression)

    def matches(self, name: str) -> bool:
        return bool(self.regex.fullmatch(name))

    @property
    def is_literal(self) -> bool:
        return not self.text.startswith("re:") and not set("*?[{") & set(self.text)


def _quiet() -> "warnings.catch_warnings[None]":
    return warnings.catch_warnings(action="ignore")


@lru_cache(maxsize=1024)
def compile_pattern(text: str) -> Pattern:
    """Compile a glob, or an expression after ``re:``, or raise `PatternError`."""
    if len(text) > _MAX_TEXT:
        raise PatternError(f"the pattern has {len(text)} characters, at most {_MAX_TEXT} are read")
    if not text.removeprefix("re:"):
        raise PatternError("the pattern is empty", 'write "*" to match every name')
    if text.startswith("re:"):
        expression = text.removeprefix("re:")
        _check_expression(expression)
        return Pattern(text, expression)
    if wrong := next((char for char in text if char in "^$()|+\\"), None):
        hint = 'regular expressions are written "re:..."'
        raise PatternError(f"`{wrong}` has no meaning in a glob pattern", hint)
    parts = list(_glob_parts(text))
    if math.prod(map(len, parts)) > _MAX_CHOICES:
        message = f"the lists in braces have more than {_MAX_CHOICES} combinations"
        raise PatternError(message, "write a list of patterns")
    # Each combination is an expression: a list in the middle would backtrack, or match wrongly.
    choices = (_join(itertools.chain(*choice)) for choice in itertools.product(*parts))
    return Pattern(text, f"(?s:{'|'.join(choices)})")


def select(patterns: Sequence[Pattern], names: Sequence[str]) -> list[int]:
    matched: set[int] = set()
    for pattern in patterns:
        # No bytecode runs per name: 10,000 names are searched in a few milliseconds.
        matched.update(itertools.compress(itertools.count(), map(pattern.regex.fullmatch, names)))
    return sorted(matched)


_LITERAL = re.compile(r"[\w.]+")
# The text between two dots of a glob. Braces and brackets may contain further dots.
_SEGMENT = re.compile(r"(?:\{[^}]*\}|\[[^]]*\]|[^.])+")


def segments(text: str, most: int) -> Iterator[Sequence[str]]:
    """Yield what a segment of each matching name is, for segments of a glob with at most so many possibilities."""
    for segment in () if text.startswith("re:") else _SEGMENT.findall(text):
        if segment[0] == "{" and (numbers := _RANGE.fullmatch(segment[1:-1])):
            low = int(numbers[1])
            high = int(numbers[2])
            if high - low < most:
                yield [str(number) for number in range(low, high + 1)]
        elif not set("*?[]{}") & set(segment):
            yield [without_zeros(segment)]


def without_zeros(segment: str) -> str:
    """Return a segment without leading zeros: a range matches both ``007`` and ``7``."""
    return segment.lstrip("0") or "0"


def _check_expression(text: str) -> None:
    """Raise `PatternError` unless a text is a regular expression that is quick on every name."""
    try:
        with _quiet():
            ways = _ways(_sre.parse(text))
            re.compile(text)
    except PatternError:
        raise
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise PatternError(f"not a regular expression: {error}") from None
    if ways > _MAX_WAYS:
        raise PatternError("the expression could take very long on some names", _GLOB)


def _ways(tree: Any, repeated: int = 0) -> int:
    total = 1
    for op, value in tree:
        name = str(op)
        if name in _REPEATS:
            low, high, body = value
            if repeated and low != high:
                raise PatternError("a repeat inside a repeat is not allowed, as in (a*)*", _GLOB)
            count = max(1, repeated) * max(1, low)
            if count > _MAX_COUNT:
                raise PatternError(f"something is repeated more than {_MAX_COUNT} times", _GLOB)
            # What is optional is no repeat.
            total *= _ways(body, count if high > 1 else repeated) * min(_SHORT, int(high) - low + 1)
        elif name.startswith("GROUPREF"):
            raise PatternError("back-references are not allowed", _GLOB)
        elif name == "BRANCH":
            if repeated:
                raise PatternError("alternatives inside a repeat are not allowed", _GLOB)
            total *= sum(map(_ways, value[1]))
        elif name in _PARTS:
            total *= _ways(_PARTS[name](value), repeated)
    return total


def contains(wide: str, narrow: str) -> bool:
    """Tell whether it is certain that ``wide`` matches every name that ``narrow`` matches."""
    if wide == narrow:
        return True
    if narrow == ".":  # the root, which no other pattern matches
        return False
    return wide == "*" or (
        compile_pattern(narrow).is_literal and compile_pattern(wide).matches(narrow)
    )


def _glob_parts(text: str) -> Iterator[_Options]:
    at = 0
    while at < len(text):
        if text[at] == "{":
            end = text.find("}", at)
            if end < 0 or "{" in text[at + 1 : end]:
                problem = "nested" if end > 0 else "not closed"
                raise PatternError(
                    f"`{{` at character {at + 1} is {problem}", "write one list {a,b}"
                )
            yield _braces(text[at + 1 : end])
            at = end + 1
        elif literal := _LITERAL.match(text, at):
            yield [[re.escape(literal[0])]]
            at = literal.end()
        else:
            piece, at = _glob_piece(text, at)
            yield [[piece]]


def _glob_piece(text: str, at: int) -> tuple[str | None, int]:
    """Return the expression for the piece at ``at`` (``None`` for a star), and the start of the next piece."""
    char = text[at]
    if char == "*":
        return None, at + 1
    if char == "?":
        return ".", at + 1
    if char == "[":
        negated = text[at + 1 : at + 2] == "!"
        start = at + 1 + negated
        end = text.find("]", start)
        if end <= start:
            problem = "is not closed" if end < 0 else "holds nothing"
            raise PatternError(f"`[` at character {at + 1} {problem}", "write a set as [0-9]")
        escaped = re.sub(r"[\\\[^&~|]", r"\\\g<0>", text[start:end])
        piece = f"[{'^' * negated}{escaped}]"
        try:
            with _quiet():
                re.compile(piece)
        except re.error as error:
            raise PatternError(f"[{text[start:end]}]: {error}", "write a set as [0-9]") from None
        return piece, end + 1
    if char in "]}":
        raise PatternError(f"`{char}` at character {at + 1} closes nothing")
    if text[at : at + 2] == ", ":
        raise PatternError("a comma in a pattern", 'write a list of patterns: ["a.*", "b.*"]')
    return re.escape(char), at + 1


def _braces(body: str) -> _Options:
    if ".." in body and "," not in body:
        return [[_range(body)]]
    items = list(dict.fromkeys(body.split(",")))
    if re.fullmatch("[0-9]+-[0-9]+", body):
        raise PatternError(f"{{{body}}} is no range", f"write {{{body.replace('-', '..')}}}")
    if items == [""]:
        raise PatternError("braces {} with nothing in them", "write {a,b} or {0..11}")
    if wrong := next(filter(_RANGE.fullmatch, items), None):
        hint = "write a list of patterns"
        raise PatternError(
            f"the range {wrong} is in a list; a range needs its own braces, {{{wrong}}}", hint
        )
    options: _Options = []
    for item in items:
        pieces = []
        at = 0
        while at < len(item):
            piece, at = _glob_piece(item, at)
            pieces.append(piece)
        options.append(pieces)
    if None not in itertools.chain(*options) and len({len(pieces) for pieces in options}) == 1:
        # Items of one length end at one place, so the group need not be tried again.
        one_of = "|".join("".join(filter(None, pieces)) for pieces in options)
        return [[f"(?>{one_of})"]]
    return options


def _range(body: str) -> str:
    numbers = _RANGE.fullmatch(body)
    if not numbers:
        raise PatternError(f"{{{body}}} is not a range of whole numbers", "write it as {0..11}")
    low = int(numbers[1])
    high = int(numbers[2])
    if low > high:
        raise PatternError(f"the range {{{body}}} is reversed", f"write {{{high}..{low}}}")
    if high >= 10**_MAX_RANGE_DIGITS:
        raise PatternError(f"numbers in a range have at most {_MAX_RANGE_DIGITS} digits")
    # The number is a whole run of digits: {1..2} does not match the beginning of 12.
    return f"(?<![0-9])0*(?:{'|'.join(_range_regexes(low, high))})(?![0-9])"


def _range_regexes(low: int, high: int) -> Iterator[str]:
    while low <= high:
        # The largest block of numbers that differ in their last digits only: 130 to 199 is 1[3-9]\d.
        digits = 0
        while low % 10 ** (digits + 1) == 0 and low and low + 10 ** (digits + 1) - 1 <= high:
            digits += 1
        size = 10**digits
        first = low // size % 10
        last = min(9, first + (high - low + 1) // size - 1)
        yield f"{low // size // 10 or ''}[{first}-{last}]" + "[0-9]" * digits
        low += (last - first + 1) * size


def _join(pieces: Iterable[str | None]) -> str:
    chunks = [""]
    for piece in pieces:
        if piece is not None:
            chunks[-1] += piece
        elif chunks[-1] or len(chunks) == 1:
            chunks.append("")
    first, *middle = chunks
    if not middle:
        return first
    *middle, last = middle
    return "".join([first, *(f"(?>.*?{chunk})" for chunk in middle), ".*", last])


def nearest(text: str, names: Sequence[str], limit: int = 3) -> list[str]:
    """Return the names most like ``text``. Names that differ in numbers only count as one.

    >>> nearest("model.layer.*.up", ["model.layers.0.up", "model.layers.1.up", "head"], 1)
    ['model.layers.*.up']
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", name), []).append(name)
    near = _closest(text.removeprefix("re:"), groups, limit)
    return [group if len(groups[group]) > 1 else groups[group][0] for group in near]


def _closest(text: str, known: Iterable[str], limit: int) -> list[str]:
    wanted = text[:_MAX_LENGTH].casefold()
    # difflib is slow, so it gets only the names with the most common two-letter pieces.
    pieces = {wanted[at : at + 2] for at in range(max(1, len(wanted) - 1))}
    folded = {name[:_MAX_LENGTH].casefold(): name for name in known}
    likely = nlargest(_MAX_LIKELY, folded, key=lambda name: sum(map(name.__contains__, pieces)))
    return [folded[name] for name in get_close_matches(wanted, likely, n=limit, cutoff=0.6)]


def suggest(text: str, names: Sequence[str]) -> str:
    """Return a hint for a pattern that matches none of the names."""
    if not names:
        return "the model has no names to match"
    parts = sorted({part for name in names for part in name.split(".")})
    spelt = ".".join((*nearest(part, parts), part)[0] for part in text.split("."))
    for attempt in (f"*.{text}", f"{text}.*", f"*.{text}.*", f"*{text}*", spelt):
        with suppress(PatternError):
            if count := len(select([compile_pattern(attempt)], names)):
                return f'did you mean "{attempt}" (it matches {count})?'
    if near := nearest(text, names):
        return f"closest names: {', '.join(near)}"
    return f"the model has {len(names)} names, such as {', '.join(names[:3])}"
