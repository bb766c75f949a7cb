"""The values that a test runs with: pairs instead of whole products, and values that only the slow storey has.

A fault that depends on one or two parameters shows in the pairs as it does in the whole product. A test that leaves
out a combination loses the pairs that only that case has: give such values a test of their own.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(**values: Collection[Any]) -> pytest.MarkDecorator:
    """Return a parametrization, instead of one `parametrize` for each parameter with its values."""
    columns = [list(column) for column in values.values()]
    cases = [[column[i] for column, i in zip(columns, row, strict=True)] for row in rows(columns)]
    ids = ["-".join(map(_id, values, case)) for case in cases]
    return pytest.mark.parametrize(tuple(values), cases, ids=ids)


def _id(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return value.__name__ if callable(value) else str(value)


def slow(*values: Any) -> list[Any]:
    """Return values of one parameter that the quick storey leaves out."""
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
