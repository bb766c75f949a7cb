"""Patterns and the names that they match. Knows nothing of torch."""

import fnmatch
import itertools
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache, partial
from importlib import import_module
from operator import itemgetter
from typing import Any

from gradsurgeon.common._grouping import grouped
from gradsurgeon.errors import HintedError

MODEL = "the model"  # what a message calls a model without a name
_MAX_TEXT = 500
_MAX_LIKELY = 1000  # names that difflib compares
_MAX_LENGTH = 120  # characters of a name that difflib compares
_MAX_CHOICES = 256  # combinations of the items of lists: each is one expression
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
# One row, or a set of digits in a glob.
_ROW = re.compile(r"(.+)\[(-?[0-9]{1,18})\]")
_MASK = 'write "{}" with `action: mask, rows: "{}"` if these are the rows that train'
_RANGE = re.compile(r"([0-9]+)\.\.([0-9]+)")
_BRACES = re.compile(r"(\{[^{}]*\})")
_SET = re.compile(r"\[!?+[^]]+\]")
_BRACKET = re.compile(r"[][{}]")
# No rule file can hold this character.
_IN_PLACE_OF_RANGE = "\0"


class PatternError(HintedError):
    """A pattern that cannot be used."""


@dataclass(frozen=True)
class Pattern:
    text: str
    regex: re.Pattern[str] = field(repr=False, compare=False)

    def matches(self, name: str) -> bool:
        return bool(self.regex.fullmatch(name))

    @property
    def is_literal(self) -> bool:
        if self.text.startswith("re:"):
            return False
        return set("*?[{").isdisjoint(self.text)


@lru_cache(maxsize=1024)
def compile_pattern(text: str) -> Pattern:
    """Compile a glob, or an expression after ``re:``, or raise `PatternError`."""
    if len(text) > _MAX_TEXT:
        raise PatternError(f"the pattern has {len(text)} characters, at most {_MAX_TEXT} are read")
    if not text.removeprefix("re:"):
        raise PatternError("the pattern is empty", 'write "*" to match every name')
    if text.startswith("re:"):
        return Pattern(text, _checked(text.removeprefix("re:")))
    rows = _ROWS.fullmatch(text)
    if rows is not None:
        message = f"a pattern names whole tensors, and `[{rows[2]}]` is a part of one"
        raise PatternError(message, _MASK.format(*rows.groups()))
    for char in text:
        if char in "^$()|+\\":
            hint = 'regular expressions are written "re:..."'
            raise PatternError(f"`{char}` has no meaning in a glob pattern", hint)
    if ", " in text:
        raise PatternError("a comma in a pattern", 'write a list of patterns: ["a.*", "b.*"]')
    return Pattern(text, re.compile("|".join(_expressions(text))))


def _expressions(text: str) -> Iterator[str]:
    """Yield an expression for each combination of the items of the lists in a glob."""
    choices: list[list[str]] = []
    ranges = []
    for part in _BRACES.split(text):
        body = part[1:-1]
        if not part.startswith("{"):
            choices.append([part])
        elif ".." in body and "," not in body:
            ranges.append(_range(body))
            choices.append([_IN_PLACE_OF_RANGE])
        else:
            choices.append(_items(body))
    if math.prod(map(len, choices)) > _MAX_CHOICES:
        message = f"the lists in braces have more than {_MAX_CHOICES} combinations"
        raise PatternError(message, "write a list of patterns")
    for choice in itertools.product(*choices):
        glob = "".join(choice)
        stray = _BRACKET.search(_SET.sub("", glob))
        if stray is not None:
            hint = "write lists as {a,b}, ranges as {0..11}, sets as [0-9], none inside another"
            raise PatternError(f"`{stray[0]}` has no partner", hint)
        # A part between two stars is matched at its first place only, so it never backtracks.
        expression = fnmatch.translate(glob)
        for numbers in ranges:
            expression = expression.replace(_IN_PLACE_OF_RANGE, numbers, 1)
        yield expression


def select(patterns: Sequence[Pattern], names: Sequence[str]) -> list[int]:
    matched: set[int] = set()
    for pattern in patterns:
        # No bytecode runs per name: 10,000 names are searched in a few milliseconds.
        matched.update(itertools.compress(itertools.count(), map(pattern.regex.fullmatch, names)))
    return sorted(matched)


def _checked(text: str) -> re.Pattern[str]:
    """Return a regular expression that is quick on every name, or raise `PatternError`."""
    try:
        with warnings.catch_warnings(action="ignore"):
            ways = _ways(_sre.parse(text))
            regex = re.compile(text)
    except PatternError:
        raise
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise PatternError(f"not a regular expression: {error}") from None
    if ways > _MAX_WAYS:
        raise PatternError("the expression could take very long on some names", _GLOB)
    return regex


def _ways(tree: Any, *, is_repeated: bool = False) -> int:
    total = 1
    for op, value in tree:
        name = str(op)
        if name in _REPEATS:
            low, high, body = value
            if is_repeated:
                raise PatternError("a repeat inside a repeat is not allowed, as in (a*)*", _GLOB)
            if low > _MAX_COUNT:
                raise PatternError(f"something is repeated more than {_MAX_COUNT} times", _GLOB)
            # An optional part is no repeat.
            inner = _ways(body, is_repeated=high > 1)
            total *= min(_SHORT, int(high) - low + 1) * inner
        elif name.startswith("GROUPREF"):
            raise PatternError("back-references are not allowed", _GLOB)
        elif name == "BRANCH":
            if is_repeated:
                raise PatternError("alternatives inside a repeat are not allowed", _GLOB)
            _, branches = value
            total *= sum(_ways(branch) for branch in branches)
        elif name in _PARTS:
            total *= _ways(_PARTS[name](value), is_repeated=is_repeated)
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


def _items(body: str) -> list[str]:
    items = list(dict.fromkeys(body.split(",")))
    if re.fullmatch("[0-9]+-[0-9]+", body):
        raise PatternError(f"{{{body}}} is no range", f"write {{{body.replace('-', '..')}}}")
    if items == [""]:
        raise PatternError("braces {} with nothing in them", "write {a,b} or {0..11}")
    for item in items:
        if _RANGE.fullmatch(item):
            message = f"the range {item} is in a list; a range needs its own braces, {{{item}}}"
            raise PatternError(message, "write a list of patterns")
    return items


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


def nearest(text: str, names: Sequence[str], limit: int = 3) -> list[str]:
    """Return the names most like ``text``. Names that differ in numbers only count as one.

    >>> nearest("model.layer.*.up", ["model.layers.0.up", "model.layers.1.up", "head"], 1)
    ['model.layers.*.up']
    """
    groups = grouped(names, partial(_NUMBER.sub, "*"))
    # difflib is slow, and needs no more to find what is meant.
    folded = {
        group[:_MAX_LENGTH].casefold(): group for group in itertools.islice(groups, _MAX_LIKELY)
    }
    wanted = text.removeprefix("re:")[:_MAX_LENGTH].casefold()
    near = []
    for closest in get_close_matches(wanted, folded, n=limit):
        group = folded[closest]
        if len(groups[group]) == 1:
            group = groups[group][0]
        near.append(group)
    return near


def suggest(text: str, names: Sequence[str], model: str = MODEL) -> str:
    """Return a hint for a pattern that matches none of the names."""
    if not names:
        return f"{model} has no names to match"
    row = _ROW.fullmatch(text)
    if row and row[1] in names:
        return _MASK.format(row[1], f"{row[2]}:{int(row[2]) + 1 or ''}")
    # The nearest known part in place of each part.
    known = sorted(set(".".join(names).split(".")))
    parts = []
    for part in text.split("."):
        candidates = [*nearest(part, known, 1), part]
        parts.append(candidates[0])
    respelt = ".".join(parts)
    for attempt in (f"*.{text}", f"{text}.*", f"*.{text}.*", f"*{text}*", respelt):
        with suppress(PatternError):
            matched = select([compile_pattern(attempt)], names)
            if matched:
                return f'did you mean "{attempt}" (it matches {len(matched)})?'
    near = nearest(text, names)
    if near:
        return f"closest names: {', '.join(near)}"
    return f"{model} has {len(names)} names, such as {', '.join(names[:3])}"
