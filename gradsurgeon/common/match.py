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
_MAX_LIKELY = 50  # names that difflib compares
_MAX_LENGTH = 120  # characters of a name that difflib compares
_MAX_CHOICES = 64  # combinations of lists whose items differ in length: each is one expression
_MAX_RANGE_DIGITS = 18
# A part of a name that is a number.
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
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

# Rows of a tensor, as Python writes them.
_ROWS = re.compile(r"(.+)\[(-?[0-9]*:-?[0-9]*)\]")
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
        if self.text.startswith("re:"):
            return False
        return set("*?[{").isdisjoint(self.text)


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
    rows = _ROWS.fullmatch(text)
    if rows is not None:
        message = f"a pattern names whole tensors, and `[{rows[2]}]` is a part of one"
        raise PatternError(message, f'write "{rows[1]}" with `action: mask, rows: "{rows[2]}"`')
    for char in text:
        if char in "^$()|+\\":
            hint = 'regular expressions are written "re:..."'
            raise PatternError(f"`{char}` has no meaning in a glob pattern", hint)
    parts = list(_glob_parts(text))
    if math.prod(map(len, parts)) > _MAX_CHOICES:
        message = f"the lists in braces have more than {_MAX_CHOICES} combinations"
        raise PatternError(message, "write a list of patterns")
    # Each combination is an expression: a list in the middle would backtrack, or match wrongly.
    expressions = []
    for choice in itertools.product(*parts):
        pieces = itertools.chain(*choice)
        expressions.append(_join(pieces))
    return Pattern(text, f"(?s:{'|'.join(expressions)})")


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
    """Yield what a segment of a matching name can be, for each segment of a glob that has at most ``most`` possibilities."""
    if text.startswith("re:"):
        return
    for segment in _SEGMENT.findall(text):
        numbers = None
        if segment[0] == "{":
            numbers = _RANGE.fullmatch(segment[1:-1])
        if numbers:
            low = int(numbers[1])
            high = int(numbers[2])
            if high - low < most:
                yield [str(number) for number in range(low, high + 1)]
        elif set("*?[]{}").isdisjoint(segment):
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
            # An optional part is no repeat.
            inner = count if high > 1 else repeated
            lengths = min(_SHORT, int(high) - low + 1)
            total *= lengths * _ways(body, inner)
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
    if wide == "*":
        return True
    if not compile_pattern(narrow).is_literal:
        return False
    return compile_pattern(wide).matches(narrow)


def _glob_parts(text: str) -> Iterator[_Options]:
    at = 0
    while at < len(text):
        literal = _LITERAL.match(text, at)
        if literal:
            yield [[re.escape(literal[0])]]
            at = literal.end()
        elif text[at] == "{":
            end = text.find("}", at)
            if end < 0 or "{" in text[at + 1 : end]:
                problem = "not closed" if end < 0 else "nested"
                message = f"`{{` at character {at + 1} is {problem}"
                raise PatternError(message, "write one list {a,b}")
            yield _braces(text[at + 1 : end])
            at = end + 1
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
        return _set_piece(text, at)
    if char in "]}":
        raise PatternError(f"`{char}` at character {at + 1} closes nothing")
    if text[at : at + 2] == ", ":
        raise PatternError("a comma in a pattern", 'write a list of patterns: ["a.*", "b.*"]')
    return re.escape(char), at + 1


def _set_piece(text: str, at: int) -> tuple[str, int]:
    """Return the expression for the set of characters at ``at``, and the start of the next piece."""
    hint = "write a set as [0-9]"
    start = at + 1
    negation = ""
    if text.startswith("!", start):
        negation = "^"
        start += 1
    end = text.find("]", start)
    if end <= start:
        problem = "is not closed" if end < 0 else "holds nothing"
        raise PatternError(f"`[` at character {at + 1} {problem}", hint)
    members = text[start:end]
    escaped = re.sub(r"[\\\[^&~|]", r"\\\g<0>", members)
    piece = f"[{negation}{escaped}]"
    try:
        with _quiet():
            re.compile(piece)
    except re.error as error:
        raise PatternError(f"[{members}]: {error}", hint) from None
    return piece, end + 1


def _braces(body: str) -> _Options:
    if ".." in body and "," not in body:
        return [[_range(body)]]
    items = list(dict.fromkeys(body.split(",")))
    if re.fullmatch("[0-9]+-[0-9]+", body):
        raise PatternError(f"{{{body}}} is no range", f"write {{{body.replace('-', '..')}}}")
    if items == [""]:
        raise PatternError("braces {} with nothing in them", "write {a,b} or {0..11}")
    for item in items:
        if _RANGE.fullmatch(item):
            message = f"the range {item} is in a list; a range needs its own braces, {{{item}}}"
            raise PatternError(message, "write a list of patterns")
    options: _Options = []
    for item in items:
        pieces = []
        at = 0
        while at < len(item):
            piece, at = _glob_piece(item, at)
            pieces.append(piece)
        options.append(pieces)
    lengths = {len(pieces) for pieces in options}
    if len(lengths) > 1 or None in itertools.chain(*options):
        return options
    # Items of one length end at one place, so the group need not be tried again.
    alternatives = "|".join(map(_join, options))
    return [[f"(?>{alternatives})"]]


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
        while low and low % 10 ** (digits + 1) == 0 and low + 10 ** (digits + 1) - 1 <= high:
            digits += 1
        size = 10**digits
        leading, first = divmod(low // size, 10)
        last = min(9, first + (high - low + 1) // size - 1)
        yield f"{leading or ''}[{first}-{last}]" + "[0-9]" * digits
        low += (last - first + 1) * size


def _join(pieces: Iterable[str | None]) -> str:
    chunks = [""]
    for piece in pieces:
        if piece is not None:
            chunks[-1] += piece
        elif chunks[-1] or len(chunks) == 1:
            chunks.append("")
    if len(chunks) == 1:
        return chunks[0]
    first, *middle, last = chunks
    # A chunk between two stars is matched at its first place only, so it never backtracks.
    between = "".join(f"(?>.*?{chunk})" for chunk in middle)
    return f"{first}{between}.*{last}"


def nearest(text: str, names: Sequence[str], limit: int = 3) -> list[str]:
    """Return the names most like ``text``. Names that differ in numbers only count as one.

    >>> nearest("model.layer.*.up", ["model.layers.0.up", "model.layers.1.up", "head"], 1)
    ['model.layers.*.up']
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("*", name), []).append(name)
    near: list[str] = []
    for group in _closest(text.removeprefix("re:"), groups, limit):
        members = groups[group]
        if len(members) == 1:
            near += members
        else:
            near.append(group)
    return near


def _closest(text: str, known: Iterable[str], limit: int) -> list[str]:
    wanted = text[:_MAX_LENGTH].casefold()
    # difflib is slow, so it gets only the names with the most common two-letter pieces.
    pieces = {wanted[at : at + 2] for at in range(max(1, len(wanted) - 1))}
    folded = {name[:_MAX_LENGTH].casefold(): name for name in known}

    def common_pieces(name: str) -> int:
        return sum(map(name.__contains__, pieces))

    likely = nlargest(_MAX_LIKELY, folded, key=common_pieces)
    return [folded[name] for name in get_close_matches(wanted, likely, n=limit, cutoff=0.6)]


def suggest(text: str, names: Sequence[str]) -> str:
    """Return a hint for a pattern that matches none of the names."""
    if not names:
        return "the model has no names to match"
    for attempt in (f"*.{text}", f"{text}.*", f"*.{text}.*", f"*{text}*", _respelt(text, names)):
        with suppress(PatternError):
            matched = select([compile_pattern(attempt)], names)
            if matched:
                return f'did you mean "{attempt}" (it matches {len(matched)})?'
    near = nearest(text, names)
    if near:
        return f"closest names: {', '.join(near)}"
    return f"the model has {len(names)} names, such as {', '.join(names[:3])}"


def _respelt(text: str, names: Iterable[str]) -> str:
    """Return a pattern with the nearest known part in place of each part."""
    known: set[str] = set()
    for name in names:
        known.update(name.split("."))
    parts = sorted(known)
    return ".".join([*nearest(part, parts, 1), part][0] for part in text.split("."))
