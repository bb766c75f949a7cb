"""Groups of parameters that behave alike, and patterns that select a group and no others."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, count, pairwise
from statistics import median

from gradsurgeon._expressions import PatternError
from gradsurgeon.errors import RecordError, printable
from gradsurgeon.match import compile_pattern
from gradsurgeon.planning.table import fold_names
from gradsurgeon.suggestion.recorded import Behaviour

# Within a group the largest median is at most four times the smallest; the same for spread and drift.
_MOST = tuple(map(math.log, (4.0, 3.0, 1.3)))
_NUMBER = re.compile(r"[0-9]{1,18}")

_Part = list[Behaviour]
_Measured = list[tuple[Sequence[float], _Part]]


def _template_of(name: str) -> str:
    """Return a name with a star in place of each number."""
    return _NUMBER.sub("*", name)


def groups_of(behaviours: Sequence[Behaviour], most: int) -> list[list[str]]:
    """Return groups of names, in the order of the first of each.

    Names that differ in numbers only belong together, unless some of them behave differently. Parts that
    behave alike are joined. If more than ``most`` groups remain, a group may span more.
    """
    if not behaviours:
        return []
    templates: dict[str, list[_Part]] = {}
    for one in behaviours:
        templates.setdefault(_template_of(one.name), []).append([one])
    place = {one.name: number for number, one in enumerate(behaviours)}
    for widening in count(1):
        parts = [part for alike in templates.values() for part in _alike(alike, widening)]
        groups = _alike(parts, widening)
        if len(groups) <= most:
            break
    places = sorted(sorted(place[one.name] for one in group) for group in groups)
    return [[behaviours[number].name for number in numbers] for numbers in places]


def _alike(parts: Sequence[_Part], widening: int) -> list[_Part]:
    """Join parts, and cut at the widest gaps of one measure after the other, until none spans more than allowed."""
    measured: _Measured = [
        ([median(values) for values in zip(*(one.measures for one in part), strict=True)], part)
        for part in parts
    ]
    joined = [measured]
    for number, most in enumerate(_MOST):
        joined = [cut for group in joined for cut in _cut(group, number, widening * most)]
    return [list(chain.from_iterable(part for _, part in group)) for group in joined]


def _cut(items: _Measured, number: int, most: float) -> list[_Measured]:
    ordered = sorted(items, key=lambda item: item[0][number])
    values = [measures[number] for measures, _ in ordered]
    if values[-1] - values[0] <= most:
        return [ordered]
    gaps = [after - before for before, after in pairwise(values)]
    cut = gaps.index(max(gaps)) + 1
    return [*_cut(ordered[:cut], number, most), *_cut(ordered[cut:], number, most)]


def patterns_of(names: Collection[str], known: Mapping[str, str]) -> list[str]:
    """Return a few patterns that select these parameters and no others.

    Args:
        names: names of the parameters.
        known: the canonical name of each parameter of the model, by each of its names.
    """
    left, chosen = set(names), list[str]()
    for candidates in (_wide, _ranges, _single):
        matched = {text: _matched(text, known) for text in candidates(sorted(left))}
        exact = {text: found for text, found in matched.items() if found <= set(names)}
        while exact and left:
            # `max` takes the first of several that select equally many: the shortest of its sort.
            text = max(exact, key=lambda text: len(exact[text] & left))
            if not exact[text] & left:
                break
            chosen.append(text)
            left -= exact[text]
    if left:
        raise RecordError(f"{printable(min(left)[:80])}...: no pattern can hold this name")
    return chosen


def _matched(text: str, known: Mapping[str, str]) -> set[str]:
    try:
        pattern = compile_pattern(text)
    except PatternError:
        return set()
    return {known[name] for name in filter(pattern.regex.fullmatch, known)}


def _wide(names: Collection[str]) -> Iterator[str]:
    """Yield a star, the names with stars for numbers, and their ends and beginnings."""
    many = Counter(map(_template_of, names))
    # A single name keeps its numbers.
    texts = dict.fromkeys(text if many[text := _template_of(name)] > 1 else name for name in names)
    yield from ("*", *texts)
    for parts in (text.split(".") for text in texts):
        yield from (f"*.{'.'.join(parts[start:])}" for start in range(len(parts) - 1, 0, -1))
        yield from (f"{'.'.join(parts[:end])}.*" for end in range(1, len(parts)))


def _ranges(names: Collection[str]) -> Iterator[str]:
    """Yield the names with ranges of numbers: first the largest ranges, then ranges without a gap."""
    yield from fold_names(names)
    runs: list[list[str]] = []
    numbered = sorted(
        (_template_of(name), [*map(int, _NUMBER.findall(name))], name) for name in names
    )
    for before, (template, numbers, name) in pairwise([("", [0], ""), *numbered]):
        steps = template == before[0] and [
            b - a for a, b in zip(before[1], numbers, strict=True) if a != b
        ]
        if steps != [1]:
            runs.append([])
        runs[-1].append(name)
    for run in runs:
        yield from fold_names(run)


def _single(names: Collection[str]) -> Iterator[str]:
    for name in names:
        yield from (name, f"re:{re.escape(name)}")
