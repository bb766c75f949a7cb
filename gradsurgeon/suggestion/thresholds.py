"""From the norms of a group to a threshold that would have bitten in a share of the steps."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import lt
from statistics import fmean, pvariance
from typing import NamedTuple

import numpy as np

from gradsurgeon.suggestion.recorded import Floats

BETA, WARMUP = 0.97, 25
# `clip-norm` adds this to a norm before it divides by it, and ZClip adds it to a standard deviation.
_EPSILON = 1e-6
# A threshold has so many digits. Norms that only further digits tell apart were clipped already.
_DIGITS = 4
_ALIKE = 1e-4
# The halves lie half a run apart, and this run and the next one a whole run: if the share changes by
# this factor between the halves, it can change by a factor of two until the next run.
_CHANGE = math.sqrt(2)
# No norm is less than the lowest number of deviations above the mean, or more than the highest.
_LOWEST, _HIGHEST = 1e-9, 1e6
_CLOSE = 1 + 1 / 256
# A threshold that bites as often as a threshold next to 0 tells no spike from other norms.
_MOST = 0.9
# More norms lie above a lower quantile, which therefore shows a drift sooner.
_MANY = 0.2


def percent(share: float, digits: int = 6) -> str:
    return f"{float(f'{100 * share:.{digits}g}'):g}%"


class Drift(NamedTuple):
    """How the halves of a run disagree."""

    share: float  # of the norms of each half that are above its quantile
    first: float  # the quantile of the first half
    second: float


class Threshold(NamedTuple):
    """A threshold, and what it would have done: ``bites`` of the ``steps`` in which it could have bitten.

    ``value`` is a fixed `max_norm`, with a drift the standard deviations of a `spike-trap`, or ``None``: no number
    bites about as often as was asked, and ``bites`` is that of the closest.
    """

    value: float | None
    bites: int
    steps: int
    quantile: float
    drift: Drift | None

    @property
    def bitten(self) -> str:
        return percent(self.bites / self.steps, digits=2)


def threshold(recorded: Floats | Sequence[float], share: float) -> Threshold:
    """Return a fixed threshold if both halves of the norms agree on it, else a threshold that follows the norm."""
    norms = np.asarray(recorded, float)
    middle = len(norms) // 2
    ordered, first, second = map(np.sort, (norms, norms[:middle], norms[middle:]))
    whole = _quantile(ordered, share)
    drifts = (_drift(first, second, part) for part in (share, max(share, _MANY)))
    drift = next(filter(None, drifts), None)
    value: float | None
    if drift:
        steps = max(0, int((norms > 0).sum()) - WARMUP)
        value, bites = _sigmas(norms.tolist(), share * steps)
    else:
        steps = len(norms)
        value, bites = _rounded(whole + _EPSILON, lambda bound: _above(ordered, bound - _EPSILON))
    # Half as often or twice is near enough, and one bite more or less if few were asked for.
    near = share * steps / 2 - 0.5 <= bites <= 2 * share * steps + 0.5
    return Threshold(value if near else None, bites, steps, whole, drift)


def _quantile(ordered: Floats, share: float) -> float:
    """Return the norm that a share of ascending norms is above, at least one of them."""
    above = min(max(1, round(share * len(ordered))), len(ordered) - 1)
    return float(ordered[-above - 1] + ordered[-above]) / 2


def _above(ordered: Floats, bound: float) -> int:
    return len(ordered) - int(np.searchsorted(ordered, bound, "right"))


def _drift(first: Floats, second: Floats, share: float) -> Drift | None:
    """Return how the halves disagree, each in ascending order, ``None`` if that may be chance."""
    start, end = _quantile(first, share), _quantile(second, share)
    asked = share * len(first)
    # The quantile and the count both err by chance, and twice as much as usual is no drift.
    error = math.sqrt(2 * (1 - share) / asked)
    most = max(_CHANGE, math.exp(min(2 * error, 50)))
    counts = _above(second, start), _above(first, end)
    # One more or less says nothing if few are asked for.
    agree = all(asked / most - 1 <= found <= asked * most + 1 for found in counts)
    if agree or math.isclose(start, end, rel_tol=_ALIKE):
        return None
    return Drift(share, start, end)


def _sigmas(norms: Sequence[float], asked: float) -> tuple[float | None, int]:
    """Return the `sigmas` of a `spike-trap` that would have bitten so often, and how often it would have."""

    def bites(sigmas: float) -> int:
        return sum(map(lt, let_through(norms, sigmas), norms))

    if asked >= _MOST * (most := bites(_LOWEST)):
        return None, most
    low, high = _LOWEST, _HIGHEST
    if (found := bites(high)) > asked:  # a deviation of next to nothing
        return None, found
    while high > low * _CLOSE:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if bites(middle) > asked else (low, middle)
    return _rounded(high, bites)


def _rounded(value: float, bites: Callable[[float], int]) -> tuple[float, int]:
    """Return a value with few digits, and how often it bites."""
    shorter = float(f"{value:.{_DIGITS}g}")
    return shorter, bites(shorter)


def let_through(
    norms: Iterable[float], sigmas: float, *, beta: float = BETA, warmup: int = WARMUP
) -> Iterator[float]:
    """Yield how much of each norm ZClip (arXiv 2504.02507) lets through: all of it, or less of a spike."""
    first: list[float] = []
    mean = variance = 0.0
    for norm in norms:
        allowed = norm
        if 0 < norm < math.inf:
            if len(first) < warmup:
                first.append(norm)
                mean = fmean(first)
                variance = pvariance(first, mean)
            else:
                deviation = math.sqrt(variance)
                z = (norm - mean) / (deviation + _EPSILON)
                if z > sigmas:
                    allowed = mean + sigmas * sigmas * deviation / z
                mean = beta * mean + (1 - beta) * allowed
                variance = beta * variance + (1 - beta) * (allowed - mean) ** 2
        yield allowed
