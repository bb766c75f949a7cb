"""Groups of parameters that behave alike."""

import math
import re
from collections.abc import Sequence
from itertools import chain, count, pairwise
from statistics import median

from gradsurgeon.suggestion.recorded import Behaviour

# Within a group the largest median is at most four times the smallest; the same for spread and drift.
_MOST = tuple(map(math.log, (4.0, 3.0, 1.3)))
NUMBER = re.compile(r"[0-9]{1,18}")

_Part = list[Behaviour]
_Measured = list[tuple[Sequence[float], _Part]]


def template_of(name: str) -> str:
    """Return a name with a star in place of each number."""
    return NUMBER.sub("*", name)


def groups_of(behaviours: Sequence[Behaviour], most: int) -> list[list[str]]:
    """Return groups of names, in the order of the first of each.

    Names that differ in numbers only belong together, unless some of them behave differently. Parts that
    behave alike are joined. If more than ``most`` groups remain, a group may span more.
    """
    if not behaviours:
        return []
    templates: dict[str, list[_Part]] = {}
    for one in behaviours:
        templates.setdefault(template_of(one.name), []).append([one])
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
