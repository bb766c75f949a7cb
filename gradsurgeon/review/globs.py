"""What can be proved about two patterns without any names: one contains the other, or none can match both.

A glob becomes a nondeterministic automaton over classes of characters. Two of them are walked
together over a handful of characters that stand for all others. Regular expressions are not looked
into: of them nothing is proved.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from gradsurgeon.match import compile_pattern

# A set of characters as ranges, turned into its complement by the flag.
_Chars: TypeAlias = "tuple[bool, tuple[tuple[str, str], ...]]"
# A state; with a number where the digits read so far stand for it.
_State: TypeAlias = "int | tuple[int, int]"
_States: TypeAlias = "frozenset[_State]"

_ANY: _Chars = (True, ())
_DIGITS = "0123456789"
_MAX_STEPS = 4_000  # of one walk


class Prover:
    """Answers questions about patterns; gives up on all after ``budget`` steps."""

    def __init__(self, budget: int = 200_000) -> None:
        self._left = budget
        self._known: dict[tuple[str, str, bool], bool] = {}

    def contains(self, wide: str, narrow: str) -> bool:
        """Tell whether it is certain that ``wide`` matches every name that ``narrow`` matches."""
        if wide in (narrow, "*"):
            return True
        if narrow.startswith("re:"):
            return False
        pattern = compile_pattern(narrow)
        if pattern.is_literal:
            return compile_pattern(wide).matches(narrow)
        if wide.startswith("re:") or not all(map(compile_pattern(wide).matches, _samples(narrow))):
            return False
        return self._ask(wide, narrow, contains=True)

    def disjoint(self, one: str, other: str) -> bool:
        """Tell whether it is certain that no name matches both patterns."""
        if one == other:
            return False
        for literal, pattern in ((one, other), (other, one)):
            if compile_pattern(literal).is_literal:
                return not compile_pattern(pattern).matches(literal)
        if one.startswith("re:") or other.startswith("re:"):
            return False
        return self._ask(one, other, contains=False)

    def _ask(self, one: str, other: str, *, contains: bool) -> bool:
        key = (one, other, contains)
        if key not in self._known:
            walk = _Walk(_automaton(one), _automaton(other), min(_MAX_STEPS, self._left))
            self._known[key] = walk.contains() if contains else walk.disjoint()
            self._left -= walk.steps
        return self._known[key]


@lru_cache(maxsize=1024)
def _samples(text: str) -> tuple[str, ...]:
    """Return names that a glob matches, to refute most claims at once."""
    automaton = _automaton(text)
    return tuple(filter(compile_pattern(text).matches, (automaton.sample(c) for c in ("", "q"))))


class _Walk:
    """Both automata at once, over names from the shortest on."""

    def __init__(self, first: _Automaton, second: _Automaton, limit: int) -> None:
        self.first, self.second, self.limit, self.steps = first, second, limit, 0
        sets = sorted(first.sets | second.sets)
        self._counts = bool(first.numbers or second.numbers)
        # One character of each kind: those of a kind are in the same sets.
        kinds = {self._kind(sets, char): char for char in _representatives(sets)}
        self._alphabet = list(kinds.values())

    def _kind(self, sets: list[_Chars], char: str) -> tuple[tuple[bool, ...], str]:
        number = char if self._counts and char in _DIGITS else ""
        return tuple(_has(chars, char) for chars in sets), number

    def contains(self) -> bool:
        """Tell whether it is certain that every name of the second is one of the first."""
        pairs = self._pairs(both=False)
        refuted = any(
            self.second.accepts(two) and not self.first.accepts(one) for one, two in pairs
        )
        return not refuted and not self._gave_up

    def disjoint(self) -> bool:
        """Tell whether it is certain that no name is one of both."""
        pairs = self._pairs(both=True)
        refuted = any(self.first.accepts(one) and self.second.accepts(two) for one, two in pairs)
        return not refuted and not self._gave_up

    @property
    def _gave_up(self) -> bool:
        return self.steps >= self.limit

    def _pairs(self, *, both: bool) -> Iterator[tuple[_States, _States]]:
        """Yield the states after each name that the second, or both, may go on from."""
        start = (self.first.start, self.second.start, False)
        seen, queue = {start}, [start]
        for one, two, digit in queue:
            yield one, two
            for char in self._alphabet:
                self.steps += 1
                if self._gave_up:
                    return
                first = self.first.step(one, char, after_digit=digit)
                second = self.second.step(two, char, after_digit=digit)
                after = (first, second, self._counts and char in _DIGITS)
                if second and (first or not both) and after not in seen:
                    seen.add(after)
                    queue.append(after)


def _has(chars: _Chars, char: str) -> bool:
    complement, ranges = chars
    return any(low <= char <= high for low, high in ranges) is not complement


def _representatives(sets: list[_Chars]) -> Iterator[str]:
    """Yield characters that together stand for all: sets change at these only."""
    yield from _DIGITS
    yield from "/:"  # around the digits
    for _, ranges in sets:
        for low, high in ranges:
            yield low
            yield from (
                chr(code) for code in (ord(low) - 1, ord(high) + 1) if 0 <= code <= sys.maxunicode
            )


@dataclass(frozen=True, slots=True)
class _Number:
    low: int
    high: int
    to: int


class _Automaton:
    """A glob as states with edges; ``numbers`` are the states from which a range is read."""

    def __init__(self, text: str) -> None:
        self.free: list[list[int]] = [[]]
        self.edges: list[list[tuple[_Chars, int]]] = [[]]
        self.numbers: dict[int, _Number] = {}
        self.sets: set[_Chars] = set()
        self.end = self._sequence(text, 0)
        self.start: _States = self._closure({0})

    def _state(self) -> int:
        self.free.append([])
        self.edges.append([])
        return len(self.free) - 1

    def _edge(self, at: int, chars: _Chars) -> int:
        to = self._state()
        self.edges[at].append((chars, to))
        self.sets.add(chars)
        return to

    def _sequence(self, text: str, at: int) -> int:
        """Add what a valid pattern matches, from the state ``at``; return the state behind it."""
        position = 0
        while position < len(text):
            char = text[position]
            if char in "{[":
                close = text.index("}" if char == "{" else "]", position)
                inside = text[position + 1 : close]
                at = self._braces(inside, at) if char == "{" else self._edge(at, _set(inside))
                position = close + 1
                continue
            if char == "*":
                loop = self._state()
                self.free[at].append(loop)
                self.edges[loop].append((_ANY, loop))
                self.sets.add(_ANY)
                at = self._state()
                self.free[loop].append(at)
            else:
                at = self._edge(at, _ANY if char == "?" else (False, ((char, char),)))
            position += 1
        return at

    def _braces(self, inside: str, at: int) -> int:
        end = self._state()
        if ".." in inside and "," not in inside:
            low, high = inside.split("..")
            begin = self._state()
            self.free[at].append(begin)
            self.numbers[begin] = _Number(int(low), int(high), end)
            return end
        for item in inside.split(","):
            begin = self._state()
            self.free[at].append(begin)
            self.free[self._sequence(item, begin)].append(end)
        return end

    def _closure(self, states: set[_State]) -> _States:
        found, queue = set(states), list(states)
        for state in queue:
            if isinstance(state, int):
                new = [one for one in self.free[state] if one not in found]
                found.update(new)
                queue += new
        return frozenset(found)

    def accepts(self, states: _States) -> bool:
        """Tell whether a name may end here."""
        return self.end in self._passed(states)

    def _passed(self, states: _States) -> _States:
        """Return the states with those behind the numbers that may end here."""
        behind: set[_State] = set()
        for state in states:
            if isinstance(state, tuple) and self.numbers[state[0]].low <= state[1]:
                behind.add(self.numbers[state[0]].to)
        return self._closure({*states, *behind}) if behind else states

    def step(self, states: _States, char: str, *, after_digit: bool) -> _States:
        """Return the states after one more character."""
        found: set[_State] = set()
        digit = int(char) if char in _DIGITS else None
        # A number is the whole run of digits: none may stand before or behind it.
        for state in states if digit is not None else self._passed(states):
            if isinstance(state, int):
                found.update(to for chars, to in self.edges[state] if _has(chars, char))
            if digit is None:
                continue
            if isinstance(state, tuple):
                begin, value = state[0], state[1] * 10 + digit
            elif state in self.numbers and not after_digit:
                begin, value = state, digit
            else:
                continue
            if value <= self.numbers[begin].high:
                found.add((begin, value))
        return self._closure(found)

    def sample(self, star: str) -> str:
        """Return a name that the glob probably matches, with ``star`` for each `*`."""
        name, at, seen = "", 0, set()
        while at not in seen:
            seen.add(at)
            if at in self.numbers:
                name, at = name + str(self.numbers[at].low), self.numbers[at].to
            elif self.edges[at] and self.edges[at][0][1] == at:
                name, at = name + star, self.free[at][0]
            elif self.edges[at]:
                chars, at = self.edges[at][0]
                options = "q" if chars == _ANY else (*(low for low, _ in chars[1]), *"q.0-/")
                name += next((one for one in options if _has(chars, one)), "")
            elif self.free[at]:
                at = self.free[at][0]
        return name


def _set(inside: str) -> _Chars:
    complement = inside.startswith("!")
    body = inside[complement:]
    ranges: list[tuple[str, str]] = []
    at = 0
    while at < len(body):
        wide = body[at + 1 : at + 2] == "-" and at + 2 < len(body)
        ranges.append((body[at], body[at + 2] if wide else body[at]))
        at += 3 if wide else 1
    return complement, tuple(ranges)


@lru_cache(maxsize=1024)
def _automaton(text: str) -> _Automaton:
    return _Automaton(text)
