"""The random states that are kept for a replay are those of the moment, however often they are asked for."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from gradsurgeon.forensics.undisturbed import RandomState

DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "a number": random.random,
    "one of two normal numbers": lambda: random.gauss(0.0, 1.0),
    "more than all words": lambda: [random.random() for _ in range(700)],
    "a seed": lambda: random.seed(3),
}


@pytest.mark.parametrize("after", DRAWS)
@pytest.mark.parametrize("before", DRAWS)
def test_the_state_of_python_is_that_of_now(before: str, after: str) -> None:
    kept = random.getstate()
    try:
        for draw in (DRAWS[before], DRAWS[after], DRAWS[after]):
            draw()
            assert RandomState.now().python == random.getstate()
            assert RandomState.now().python == random.getstate()
    finally:
        random.setstate(kept)
