"""Groups of parameters that behave alike."""

import math
import re
from collections.abc import Callable, Sequence
from itertools import count, pairwise
from statistics import median
from typing import TypeAlias, TypeVar

from gradsurgeon.suggestion.recorded import Behaviour

_T = TypeVar("_T")
_Measured: TypeAlias = list[tuple[Sequence[float], _T]]

# Within a group the largest median is at most four times the smallest; the same for spread and drift.
_MOST = tuple(map(math.log, (4.0, 3.0, 1.3)))
NUMBER = re.compile(r"[0-9]{1,18}")


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
    templates: dict[str, list[Behaviour]] = {}
    for one in behaviours:
        templates.setdefault(template_of(one.name), []).append(one)
    place = {one.name: number for number, one in enumerate(behaviours)}
    for widening in count(1):
        parts = [part for alike in templates.values() for part in _alike(alike, _own, widening)]
        groups = _alike(parts, _middle, widening)
        if len(groups) <= most:
            break
    places = sorted(sorted(place[one.name] for part in group for one in part) for group in groups)
    return [[behaviours[number].name for number in numbers] for numbers in places]


def _own(one: Behaviour) -> Sequence[float]:
    return one.measures


def _middle(part: Sequence[Behaviour]) -> Sequence[float]:
    return [median(measures) for measures in zip(*map(_own, part), strict=True)]


def _alike(
    items: Sequence[_T], measures: Callable[[_T], Sequence[float]], widening: int
) -> list[list[_T]]:
    """Cut at the widest gaps, one measure after the other, until no part spans more than allowed."""
    parts = [[(measures(item), item) for item in items]]
    for number, most in enumerate(_MOST):
        parts = [cut for part in parts for cut in _cut(part, number, widening * most)]
    return [[item for _, item in part] for part in parts]


def _cut(items: _Measured[_T], number: int, most: float) -> list[_Measured[_T]]:
    ordered = sorted(items, key=lambda item: item[0][number])
    values = [measures[number] for measures, _ in ordered]
    if values[-1] - values[0] <= most:
        return [ordered]
    gaps = [after - before for before, after in pairwise(values)]
    cut = gaps.index(max(gaps)) + 1
    return [*_cut(ordered[:cut], number, most), *_cut(ordered[cut:], number, most)]
