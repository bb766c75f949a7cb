"""From the norms of a group, oldest first, to a threshold that would have bitten in a share of the steps."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import lt
from typing import NamedTuple

from gradsurgeon.suggestion.spike_statistic import WARMUP, let_through

# Of ten bites expected, half as many or twice as many come by chance.
ENOUGH_BITES = 10
# Of fewer norms a statistic that starts with the first of them has seen nothing.
_LEAST_STEPS = 2 * WARMUP
# What `clip-norm` adds to a norm before it divides by it.
_EPSILON = 1e-6
# Norms that more digits would tell apart are alike: what has been clipped is so, but for rounding.
_DIGITS = range(2, 6)
_ALIKE = 1e-4
# The halves lie half a run apart, and this run and the next one a whole run: where the share changes by
# this factor between the halves, it can change by a factor of two until the next run.
_CHANGE = math.sqrt(2)
# Deviations that no norm is as few of above the mean, even where what the rule adds to them is far larger.
_LOWEST, _HIGHEST = 1e-9, 1e6
# A threshold that bites as often as one next to 0 does tells no spike from anything else.
_MOST = 0.9
# More norms lie above a lower quantile: it tells sooner whether they drift.
_MANY = 0.2


class Drift(NamedTuple):
    """How the halves of a run disagree.

    Attributes:
        share: of the norms of each half that are above its quantile.
        quantiles: of the first and of the second half.
        crossed: the share of the second half that is above the quantile of the first, and the other way round.
    """

    share: float
    quantiles: tuple[float, float]
    crossed: tuple[float, float]


class Threshold(NamedTuple):
    """A threshold, and what it would have done.

    Attributes:
        value: a fixed `max_norm`, or the standard deviations of a `spike-trap` where there is a drift;
            ``None`` where no such number bites about as often as was asked.
        bites: in how many steps it would have bitten; without a value, what comes closest would have.
        steps: of how many.
        quantile: the norm that the asked share of all steps was above.
        halves: the same of the first and of the second half.
        drift: why no fixed threshold would last; ``None`` where it would.
    """

    value: float | None
    bites: int
    steps: int
    quantile: float
    halves: tuple[float, float]
    drift: Drift | None

    @property
    def bitten(self) -> str:
        return f"{100 * self.bites / self.steps:.3g}%"


def least_steps(share: float) -> int:
    """Return the steps without which no norm lies above the quantile."""
    return max(_LEAST_STEPS, math.ceil(1 / share))


def threshold(norms: Sequence[float], share: float) -> Threshold:
    """Return a fixed threshold where the halves of the norms agree on it, and else one that follows."""
    middle = len(norms) // 2
    ordered, first, second = map(sorted, (norms, norms[:middle], norms[middle:]))
    whole, halves = quantile(ordered, share), (quantile(first, share), quantile(second, share))
    drifts = (_drift(first, second, part) for part in (share, max(share, _MANY)))
    drift = next(filter(None, drifts), None)
    if drift:
        steps = max(0, sum(norm > 0 for norm in norms) - WARMUP)
        value, bites = _sigmas(norms, share * steps)
    else:
        steps = len(norms)
        value, bites = _rounded(
            whole + _EPSILON, lambda bound: _above(ordered, bound - _EPSILON), share * steps
        )
    # Half as often or twice is near enough, and one bite more or less where few were asked for.
    near = share * steps / 2 - 0.5 <= bites <= 2 * share * steps + 0.5
    return Threshold(value if near else None, bites, steps, whole, halves, drift)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the norm that a share of ascending ones is above, at least one of them."""
    above = min(max(1, round(share * len(ordered))), len(ordered) - 1)
    return (ordered[-above - 1] + ordered[-above]) / 2


def _above(ordered: Sequence[float], bound: float) -> int:
    return len(ordered) - bisect_right(ordered, bound)


def _drift(first: Sequence[float], second: Sequence[float], share: float) -> Drift | None:
    """Return how the halves disagree, each in ascending order, where that is no chance."""
    start, end = quantile(first, share), quantile(second, share)
    asked = share * len(first)
    # The quantile and the count both err by chance, and twice as much as usual is no drift.
    error = math.sqrt(2 * (1 - share) / asked)
    most = max(_CHANGE, math.exp(min(2 * error, 50)))
    counts = _above(second, start), _above(first, end)
    # One more or less says nothing where few are asked for.
    agree = all(asked / most - 1 <= found <= asked * most + 1 for found in counts)
    if agree or math.isclose(start, end, rel_tol=_ALIKE):
        return None
    return Drift(share, (start, end), (counts[0] / len(second), counts[1] / len(first)))


def _sigmas(norms: Sequence[float], asked: float) -> tuple[float | None, int]:
    """Return the threshold of a `spike-trap` that would have bitten so often, and how often it would have."""

    def bites(sigmas: float) -> int:
        return sum(map(lt, let_through(norms, sigmas), norms))

    if asked >= _MOST * (most := bites(_LOWEST)):
        return None, most
    low, high = 0.0, 4.0
    while (found := bites(high)) > asked:
        if high > _HIGHEST:  # a deviation of next to nothing
            return None, found
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
