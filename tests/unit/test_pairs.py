"""The cases that `pairwise` chooses: every pair of values is in one, and there are few."""

from __future__ import annotations

import math
from itertools import combinations, product

import pytest
from pairs import covering, pairwise, rows, singly

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


def test_the_quick_suite_takes_every_value_and_the_slow_one_the_pairs() -> None:
    (_, cases), (_, pairs) = (
        kind(a=["x", "y", "z"], b=[1, 2]).mark.args for kind in (singly, pairwise)
    )
    assert [case.id for case in cases] == [case.id for case in pairs]
    assert not any(case.marks for case in pairs)
    quick = [case.values for case in cases if not case.marks]
    assert len(quick) == 3
    assert {value for values in quick for value in values} == {"x", "y", "z", 1, 2}
    assert {mark.name for case in cases for mark in case.marks} == {"slow"}
