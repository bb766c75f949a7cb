"""The cases that `pairwise` chooses: every pair of values is in one, and there are few."""

from __future__ import annotations

import math
from itertools import combinations, product

import pytest
from pairs import covering, rows

SIZES = [(3, 4), (9, 4, 2, 2), (11, 4, 4), (1, 5, 2), (3, 4, 2, 2, 3, 5)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_pair_of_values_is_in_a_case(sizes: tuple[int, ...]) -> None:
    cases = rows([list(range(size)) for size in sizes])
    for a, b in combinations(range(len(sizes)), 2):
        assert {(case[a], case[b]) for case in cases} == set(
            product(range(sizes[a]), range(sizes[b]))
        )
    assert len(cases) == len(set(cases))
    # No fewer are possible than the two longest need; a good choice takes not many more.
    assert len(cases) <= 1.5 * math.prod(sorted(sizes)[-2:])
    few = covering(cases)
    values = [set(range(size)) for size in sizes]
    assert [set(column) for column in zip(*few, strict=True)] == values
    assert set(few) <= set(cases)
    assert len(few) <= 1.5 * max(sizes)
