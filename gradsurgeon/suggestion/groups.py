"""Groups of parameters that behave alike, and patterns that select a group and no others."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count, pairwise
from statistics import median

from gradsurgeon.errors import RecordError, printable
from gradsurgeon.match import PatternError, compile_pattern
from gradsurgeon.planning.table import fold_names
from gradsurgeon.suggestion.recorded import Behaviour

# Within a group the largest median is at most four times the smallest; the same for spread and drift.
_MOST = tuple(map(math.log, (4.0, 3.0, 1.3)))
_NUMBER = re.compile(r"[0-9]{1,18}")

# Names that stay together, with the medians of their measures.
_Part = tuple[Sequence[float], list[str]]


def _template_of(name: str) -> str:
    """Return a name with a star in place of each number."""
    return _NUMBER.sub("*", name)


def groups_of(behaviours: Mapping[str, Behaviour], most: int) -> list[list[str]]:
    """Return groups of names that behave alike, at most ``most``: first of those that differ in numbers only."""
    templates: dict[str, list[list[str]]] = {}
    for name in behaviours:
        templates.setdefault(_template_of(name), []).append([name])
    for widening in count(1):
        parts = [
            part for names in templates.values() for part in _alike(names, behaviours, widening)
        ]
        groups = _alike(parts, behaviours, widening)
        if len(groups) <= most:
            break
    place = {name: number for number, name in enumerate(behaviours)}
    ordered = (sorted(group, key=place.__getitem__) for group in groups)
    return sorted(ordered, key=lambda group: place[group[0]])


def _alike(
    parts: Sequence[list[str]], behaviours: Mapping[str, Behaviour], widening: int
) -> list[list[str]]:
    """Join parts, and cut at the widest gaps of one measure after the other, until none spans more than allowed."""
    groups: list[list[_Part]] = [
        [([*map(median, zip(*map(behaviours.get, part), strict=True))], part) for part in parts]
    ]
    for number, most in enumerate(_MOST):
        groups = [cut for group in groups for cut in _cut(group, number, widening * most)]
    return [[name for _, part in group for name in part] for group in groups]


def _cut(parts: Sequence[_Part], number: int, most: float) -> Iterator[list[_Part]]:
    waiting = [sorted(parts, key=lambda part: part[0][number])]
    while waiting:
        group = waiting.pop()
        values = [measures[number] for measures, _ in group]
        if values[-1] - values[0] <= most:
            yield group
            continue
        gaps = [after - before for before, after in pairwise(values)]
        cut = gaps.index(max(gaps)) + 1
        waiting += [group[cut:], group[:cut]]


def patterns_of(names: Collection[str], known: Mapping[str, str]) -> list[str]:
    """Return a few patterns that select these parameters and no others; ``known`` has canonical names by all names."""
    left, chosen = set(names), list[str]()
    for candidates in (_wide, fold_names, _single):
        matched = {text: _matched(text, known) for text in candidates(sorted(left))}
        exact = {text: found for text, found in matched.items() if found <= set(names)}
        # `max` takes the first of several that select equally many: the shortest of its sort.
        while more := max((found & left for found in exact.values()), key=len, default=None):
            chosen.append(next(text for text, found in exact.items() if found & left == more))
            left -= more
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


def _single(names: Collection[str]) -> Iterator[str]:
    for name in names:
        yield from (name, f"re:{re.escape(name)}")
