"""The values that a test runs with: pairs instead of whole products, and values that only the slow suite has.

A fault that depends on one or two parameters shows in the pairs as it does in the whole product. A test that leaves
out a combination loses the pairs that only that case has: give such values a test of their own. Where the values do
not concern one another, or the test is long, `singly` gives the quick suite every value, and the slow one the pairs.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(**values: Collection[Any]) -> pytest.MarkDecorator:
    """Return a parametrization, instead of one `parametrize` for each parameter with its values."""
    return _parametrized(values, every=True)


def singly(**values: Collection[Any]) -> pytest.MarkDecorator:
    """Return the cases of `pairwise`; the quick suite takes some in which every single value is in one."""
    return _parametrized(values, every=False)


def _parametrized(values: dict[str, Collection[Any]], *, every: bool) -> pytest.MarkDecorator:
    columns = [list(column) for column in values.values()]
    chosen = rows(columns)
    quick = chosen if every else covering(chosen)
    cases = []
    for row in chosen:
        case = [column[i] for column, i in zip(columns, row, strict=True)]
        name = "-".join(map(_id, values, case))
        marks: Any = () if row in quick else pytest.mark.slow
        cases.append(pytest.param(*case, id=name, marks=marks))
    return pytest.mark.parametrize(tuple(values), cases)


def covering(cases: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return few of these cases in which every value is that is in any of them."""
    missing = {cell for case in cases for cell in enumerate(case)}
    found = []
    while missing:
        found.append(max(cases, key=lambda case: len(missing & set(enumerate(case)))))
        missing -= set(enumerate(found[-1]))
    return found


def _id(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return value.__name__ if callable(value) else str(value)


def slow(*values: Any) -> list[Any]:
    """Return values of one parameter that the quick suite leaves out."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def rows(columns: list[list[Any]]) -> list[tuple[int, ...]]:
    """Return cases as indices of values; the same columns give the same cases in every process."""
    sizes = [range(len(column)) for column in columns]
    missing = {
        ((a, i), (b, j))
        for a, b in combinations(range(len(columns)), 2)
        for i, j in product(sizes[a], sizes[b])
    }
    found = [] if len(columns) > 1 else list(product(*sizes))
    while missing:
        row = dict(min(missing))
        for column in sorted(set(range(len(columns))) - set(row), key=lambda c: -len(columns[c])):
            row[column] = max(sizes[column], key=lambda i: _covered(row, (column, i), missing))
        found.append(tuple(row[column] for column in range(len(columns))))
        missing -= set(combinations(enumerate(found[-1]), 2))
    return sorted(found)


def _covered(row: dict[int, int], cell: tuple[int, int], missing: set[Any]) -> int:
    """Return how many missing pairs a value adds to the part of a row that is there."""
    return sum((min(cell, other), max(cell, other)) in missing for other in row.items())
