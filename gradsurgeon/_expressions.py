"""Regular expressions from strangers: what they mean is what `re` says, but no name makes them slow.

Python's `re` tries one way through an expression after another, and there are more ways the longer the
name is. An expression is taken only if the ways are few on a short name. On a name on which they are
too many all ways are followed at once, which takes time that grows with the name and no faster.
"""

from __future__ import annotations

import re
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from importlib import import_module
from math import factorial
from typing import Any, TypeAlias

from gradsurgeon.errors import HintedError

_MAX_REPEATS = 6
_MAX_COUNT = 64
# Ways to match a short name that may have to be tried: three `.*` and some alternatives.
_SHORT, _MAX_WAYS = 32, 1 << 18
# Steps that `re` may take on one name, some milliseconds, and how many characters are scanned in one.
_MAX_STEPS, _SCANNED = 1 << 22, 16
_MAX_NAME = 1 << 20

# The parser of `re` itself, so that what is judged is what will run. There is no public one.
_sre: Any = import_module("re._parser")
_sre_compiler: Any = import_module("re._compiler")

_REPEATS = {"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"}
_CHARS = {"LITERAL", "NOT_LITERAL", "ANY", "IN"}
_GLOB = 'write a glob, such as "*.layers.{0..5}.*"'

# From the places in a name where a part of an expression can begin to those where it can end.
_Follow: TypeAlias = Callable[[str, set[int]], set[int]]


class PatternError(HintedError):
    """A pattern that cannot be used."""


class Expression:
    """A regular expression that must match the whole name, in time that no name makes long.

    Raises:
        PatternError: it is none, or could take very long.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        # Some expressions make `re` warn about its own future; that is nothing a rule file can mend.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self._tree = _sre.parse(text)
                _WaysBound(text).ways(self._tree, last=True)
                self._regex = re.compile(text)
            except PatternError:
                raise
            except re.error as error:
                where = "" if error.pos is None else f" at character {error.pos + len('re:') + 1}"
                raise PatternError(f"not a regular expression: {error.msg}{where}") from None
            except (OverflowError, RecursionError, ValueError) as error:
                raise PatternError(f"not a regular expression: {error}") from None

    def __reduce__(self) -> tuple[type[Expression], tuple[str]]:
        return type(self), (self._text,)

    def fullmatch(self, name: str) -> bool:
        if len(name) <= self._longest:
            return self._regex.fullmatch(name) is not None
        return len(name) in self._follow(name, {0})

    @cached_property
    def _longest(self) -> int:
        """The longest name on which trying one way after another is quick."""
        return bisect_right(range(1, _MAX_NAME), _MAX_STEPS, key=self._steps)

    def _steps(self, length: int) -> int:
        bound = _WaysBound(self._text, length)
        return bound.ways(self._tree, last=True) * (1 + bound.scanned // _SCANNED)

    @cached_property
    def _follow(self) -> _Follow:
        return _following(self._tree, 0, 0)


class _WaysBound:
    """Bounds the number of ways in which `re` may have to try an expression on a name.

    Args:
        text: the expression.
        length: of the name. The bound for the shortest is a limit, and exceeding it an error.

    Attributes:
        repeats: the unbounded ones.
        scanned: how many characters are looked at in one go, to find where a part has to end.
    """

    def __init__(self, text: str, length: int = _SHORT) -> None:
        self.repeats = 0
        self.scanned = 0
        self._length = length
        self._limit = _MAX_WAYS if length == _SHORT else None
        # Flags for a part of the expression are not known where that part is looked at.
        self.exact = not re.search(r"\(\?[a-zA-Z]*i", text)

    def ways(self, tree: Any, *, last: bool = False, counted: int = 0) -> int:
        """Return the bound. ``last``: the name must end here. ``counted``: how often repeats around this run."""
        items = list(_flat(tree))
        total, loose = 1, False  # loose: a repeat ended, and nothing since then must be there
        open_ends = 0
        for index, (op, value) in enumerate(items):
            unbounded = op in _REPEATS and value[1] == _sre.MAXREPEAT
            if unbounded and loose:
                raise PatternError("two repeats follow each other, as in .*.*", _GLOB)
            sure = False
            if op in _REPEATS:
                rest = items[index + 1 :]
                sure = self.ends_before(value[2], *rest[0]) if rest else last
                total *= self.repeat(value, counted, sure=sure)
            else:
                total *= self.other(op, value, counted)
            if self._limit is not None and total > self._limit:
                raise PatternError("the expression could take very long on some names", _GLOB)
            open_ends += unbounded and not sure
            loose = (unbounded and not sure) or (loose and not _width(op, value))
        # Their ends come one behind the other: on longer names the bound has to be a near one.
        return total if self._limit is not None else max(1, total // factorial(open_ends))

    def other(self, op: str, value: Any, counted: int) -> int:
        if op.startswith("GROUPREF"):
            raise PatternError("back-references are not allowed", _GLOB)
        before = self.repeats
        if op.startswith("ASSERT"):
            ways = self.ways(value[1], counted=counted)
            if self.repeats > before:
                raise PatternError("unbounded repeats inside look-around are not allowed", _GLOB)
            self.scanned = max(self.scanned, value[1].getwidth()[1])
            return ways
        if op == "ATOMIC_GROUP":  # tried as a whole, at every place where it may begin
            ways = self.ways(value, counted=counted)
            if self.repeats > before + 1:
                message = "several unbounded repeats inside an atomic group are not allowed"
                raise PatternError(message, _GLOB)
            return ways
        return self.branch(value[1], counted) if op == "BRANCH" else 1

    def branch(self, options: list[Any], counted: int) -> int:
        if counted:
            raise PatternError("alternatives inside a repeat are not allowed", _GLOB)
        ways = [self.ways(option) for option in options]
        firsts = [next(_flat(option), ("", None)) for option in options]
        literals = {value for op, value in firsts if op == "LITERAL"}
        return max(ways) if self.exact and len(literals) == len(options) else sum(ways)

    def repeat(self, value: Any, counted: int, *, sure: bool) -> int:
        low, high, body = value
        unbounded = high == _sre.MAXREPEAT
        if counted and low != high:
            raise PatternError("a repeat inside a repeat is not allowed, as in (a*)*", _GLOB)
        if (low if unbounded else high * max(1, counted)) > _MAX_COUNT:
            raise PatternError(f"something is repeated more than {_MAX_COUNT} times", _GLOB)
        self.repeats += unbounded
        if self.repeats > _MAX_REPEATS:
            raise PatternError(f"more than {_MAX_REPEATS} unbounded repeats", _GLOB)
        inside = counted if high == 1 else max(1, counted) * (1 if unbounded else max(1, high))
        ways = self.ways(body, counted=inside)
        if sure:
            self.scanned = max(self.scanned, self._length if unbounded else high)
            return ways
        return ways * (self._length if unbounded else high - low + 1)

    def ends_before(self, body: Any, op: str, value: Any) -> bool:
        """Tell whether a repeat can end in one place only: before the first ``value``."""
        if not self.exact or op != "LITERAL" or body.getwidth() != (1, 1):
            return False
        return not _sre_compiler.compile(body).fullmatch(chr(value))


def _flat(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an expression with groups dissolved and without anchors, which only restrict."""
    for op, value in tree:
        if str(op) == "SUBPATTERN":
            yield from _flat(value[3])
        elif str(op) != "AT":
            yield str(op), value


def _width(op: str, value: Any) -> int:
    """Return the least number of characters that a part takes."""
    if op in _REPEATS:
        return int(value[0] * value[2].getwidth()[0])
    if op == "BRANCH":
        return int(min(option.getwidth()[0] for option in value[1]))
    return int(value.getwidth()[0] if op == "ATOMIC_GROUP" else op in _CHARS)


def _following(tree: Any, on: int, off: int) -> _Follow:
    """Return a function that follows all ways at once; ``on`` and ``off`` are the flags around."""
    steps: list[_Follow] = []
    plain: list[Any] = []  # parts that can end in one place only, for each place to begin
    for op, value in tree:
        choice = _choice(str(op), value, on, off)
        if choice is None:
            plain.append((op, value))
            continue
        steps += [_only_end(tree.state, plain, on, off), choice] if plain else [choice]
        plain = []
    steps += [_only_end(tree.state, plain, on, off)] if plain else []
    return lambda name, places: _in_turn(steps, name, places)


def _in_turn(steps: Sequence[_Follow], name: str, places: set[int]) -> set[int]:
    for step in steps:
        places = step(name, places)
    return places


def _choice(op: str, value: Any, on: int, off: int) -> _Follow | None:
    """Return what follows a part that can end in several places; ``None`` if it can end in one only."""
    if op in ("MAX_REPEAT", "MIN_REPEAT"):
        low, high, body = value
        most = None if high == _sre.MAXREPEAT else high - low
        inner = _following(body, on, off)
        return lambda name, places: _repeated(inner, low, most, name, places)
    if op == "BRANCH":
        options = [_following(option, on, off) for option in value[1]]
        return lambda name, places: set().union(*(option(name, places) for option in options))
    if op == "SUBPATTERN":
        _, added, dropped, body = value
        return _following(body, (on | added) & ~dropped, (off | dropped) & ~added)
    return None


def _repeated(body: _Follow, low: int, most: int | None, name: str, places: set[int]) -> set[int]:
    for _ in range(low):
        places = body(name, places)
    ends, left = set(places), most
    while places and left != 0:
        # From a place that was reached before nothing new is reached.
        places = body(name, places) - ends
        ends |= places
        left = None if left is None else left - 1
    return ends


def _only_end(state: Any, parts: Iterable[Any], on: int, off: int) -> _Follow:
    body = _sre.SubPattern(state, list(parts))
    group = _sre.SubPattern(state, [(_sre.SUBPATTERN, (None, on, off, body))])
    match = _sre_compiler.compile(group).match

    def follow(name: str, places: set[int]) -> set[int]:
        return {matched.end() for at in places if (matched := match(name, at))}

    return follow
