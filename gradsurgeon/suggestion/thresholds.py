"""From the norms of a group, oldest first, to a threshold that would have bitten in a share of the steps."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from operator import lt
from typing import NamedTuple

from gradsurgeon.suggestion.spike_statistic import WARMUP, let_through

# Of ten bites expected, six to fourteen come by chance: of fewer nobody can say what the share is.
ENOUGH_BITES = 10
# Of fewer norms a statistic that starts with 25 of them has seen nothing.
_LEAST_STEPS = 2 * WARMUP
# `clip-norm` divides by the norm and this.
_EPSILON = 1e-6
# Norms that more would tell apart are alike: what has been clipped is so, but for rounding.
_DIGITS = range(2, 6)
_ALIKE = 1e-4


class Threshold(NamedTuple):
    """A threshold, and what it would have done.

    Attributes:
        follows: whether it is that of a `spike-trap`, in standard deviations; or else a fixed `max_norm`.
        value: the threshold.
        bites: in how many steps it would have bitten.
        steps: of how many.
        quantile: the norm that the asked share of all steps was above.
        halves: the same of the first and of the second half.
        crossed: in which share of the other half that of each half would have bitten.
    """

    follows: bool
    value: float
    bites: int
    steps: int
    quantile: float
    halves: tuple[float, float]
    crossed: tuple[float, float]


def least_steps(share: float) -> int:
    """Return the steps without which no norm lies above the quantile."""
    return max(_LEAST_STEPS, math.ceil(1 / share))


def threshold(norms: Sequence[float], share: float) -> Threshold:
    """Return a fixed threshold where the halves of the norms agree on it, and else one that follows."""
    middle = len(norms) // 2
    ordered, *halves = (sorted(part) for part in (norms, norms[:middle], norms[middle:]))
    whole, first, second = (quantile(part, share) for part in (ordered, *halves))
    others = ((first, halves[1]), (second, halves[0]))
    shares = [_above(other, bound) / len(other) for bound, other in others]
    alike = math.isclose(first, second, rel_tol=_ALIKE)
    if follows := not alike and _drifts(shares, share, middle):
        steps = max(1, sum(norm > 0 for norm in norms) - WARMUP)
        value, bites = _sigmas(norms, share * steps)
    else:
        steps = len(norms)
        value, bites = _rounded(
            whole + _EPSILON, lambda bound: _above(ordered, bound - _EPSILON), share * steps
        )
    return Threshold(follows, value, bites, steps, whole, (first, second), (shares[0], shares[1]))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the norm that a share of ascending ones is above, at least one of them."""
    above = min(max(1, round(share * len(ordered))), len(ordered) - 1)
    return (ordered[-above - 1] + ordered[-above]) / 2


def _above(ordered: Sequence[float], bound: float) -> int:
    return len(ordered) - bisect_right(ordered, bound)


def _drifts(crossed: Iterable[float], share: float, steps: int) -> bool:
    """Tell whether the quantile of one half bites far too often, or too seldom, in the other one."""
    # The quantile and the count are each taken from about so many norms. Twice their error by chance is
    # allowed where that is more than a factor of two.
    asked = share * steps
    factor = max(2.0, math.exp(min(2 * math.sqrt(2 / asked), 50)))
    # One more or less says nothing where few are asked for.
    return not all(asked / factor - 1 <= found * steps <= asked * factor for found in crossed)


def _sigmas(norms: Sequence[float], asked: float) -> tuple[float, int]:
    """Return the threshold of a `spike-trap` that would have bitten so often, and how often it would have."""

    def bites(sigmas: float) -> int:
        return sum(map(lt, let_through(norms, sigmas), norms))

    low, high = 0.0, 4.0
    while bites(high) > asked and high < 1e6:  # noqa: PLR2004 # a deviation of next to nothing
        low, high = high, 2 * high
    while high - low > high / 256:
        middle = (low + high) / 2
        low, high = (middle, high) if bites(middle) > asked else (low, middle)
    return _rounded(high, bites, asked)


def _rounded(value: float, bites: Callable[[float], int], asked: float) -> tuple[float, int]:
    """Return a value with as few digits as bite as often as was asked, to a tenth, and how often it bites."""
    for digits in _DIGITS:
        shorter = float(f"{value:.{digits}g}")
        found = bites(shorter)
        if abs(found - asked) <= max(asked / 10, 0.5):
            break
    return shorter, found
