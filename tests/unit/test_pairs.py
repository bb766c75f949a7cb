"""The cases that `pairwise` chooses: every pair of values is in one, and there are few."""

from __future__ import annotations

import math
from itertools import combinations, product

import pytest
from pairs import pairwise, rows

SIZES = [(9, 4, 2, 2), (12, 4, 2), (11, 4, 4), (3, 3, 3, 4), (1, 5, 2), (3, 4, 2, 2, 3, 5)]


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


@pytest.mark.parametrize("sizes", [(3,), (3, 4)], ids=str)
def test_one_or_two_parameters_get_every_case(sizes: tuple[int, ...]) -> None:
    columns = [list(range(size)) for size in sizes]
    assert rows(columns) == list(product(*columns))


def test_cases_have_names() -> None:
    mark = pairwise(dtype=[float, "half"], late=[True, False], per=["rule"]).mark
    names, cases = mark.args
    assert names == ("dtype", "late", "per")
    assert cases[0] == [float, True, "rule"]
    assert mark.kwargs["ids"] == [
        "float-late-rule",
        "float-no late-rule",
        "half-late-rule",
        "half-no late-rule",
    ]
