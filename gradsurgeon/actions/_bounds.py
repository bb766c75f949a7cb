"""The bounds of `spike-trap`: ZClip, AdaGC, AutoClip, and a fixed norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from gradsurgeon.actions._effects import RunningBound

if TYPE_CHECKING:
    from torch import Tensor

# One number, or one for each norm.
_Number = TypeVar("_Number", float, "Tensor")
# ZClip adds this to a standard deviation, which may be 0.
_EPSILON = 1e-6
# A statistic of fewer updates does not know yet how far healthy norms scatter.
_YOUNG = 100
# The decay of a running mean that only reports use.
_BETA = 0.97


def zclip(sigmas: float, beta: float, warmup: int) -> RunningBound:
    advance = partial(_zclip, sigmas, beta, warmup)
    return RunningBound("sigmas", 3, advance, partial(_zclip_bound, sigmas, warmup))


def adagc(times: float, beta: float, warmup: int) -> RunningBound:
    advance = partial(_adagc, times, beta, warmup)
    bound = partial(_adagc_bound, times, warmup)
    # It starts as the smallest norm and learns clipped norms, so it stays below the mean for long.
    return RunningBound("times", 2, advance, bound, keeps_mean=False)


def fixed(norm: float) -> RunningBound:
    def bounds(_kept: Sequence[float], _passed: float) -> tuple[float, str]:
        return norm, "the fixed bound of the rule"

    return RunningBound("norm", 2, partial(_fixed, norm), bounds)


def autoclip(percentile: float, window: int) -> RunningBound:
    # Two windows of different lengths cannot go on from each other.
    name = f"percentile of {window}"
    advance = partial(_autoclip, percentile / 100, min(window, _YOUNG))
    bound = partial(_autoclip_bound, percentile, window)
    return RunningBound(name, 2 + window, advance, bound, reported=2, learns_all=True)


def _fixed(bound: float, kept: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
    """Compare with a number; kept are the number of updates and the mean."""
    number, mean = kept.unbind()
    passed = norms.where(~(norms.isfinite() & (norms > bound)), bound)
    return passed, _advanced(kept, passed, number + 1, _mean(number, mean, passed))


def _mean(number: Tensor, mean: Tensor, norms: Tensor) -> Tensor:
    running = _BETA * mean + (1 - _BETA) * norms
    return running.where(number > 0, norms)


def _autoclip(share: float, warmup: int, kept: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
    """Advance AutoClip, which keeps the number of norms, their running mean, and the last of them in a ring."""
    number = kept[0]
    window = kept[2:]
    enters = norms.isfinite()
    places = window.new_ones(len(window), 1).cumsum(0) - 1
    is_next = places == number % len(window)
    ring = norms.where(is_next & enters, window)
    after = number + enters
    mean = _mean(number, kept[1], norms)
    # As in the paper, a norm is compared with a window that it has entered.
    bound = _percentile(ring, places >= after, after, share)
    is_spike = enters & (after >= warmup) & (norms > bound)
    new = kept.new_empty(kept.shape)
    new[0] = after
    new[1] = mean.where(enters, kept[1])
    new[2:] = ring
    return norms.where(~is_spike, bound), new


def _percentile(values: Tensor, is_free: Tensor, number: Tensor, share: float) -> Tensor:
    """Return a quantile of each column as `torch.quantile` does, of the values, ``number`` of them, that are not free."""
    last = number.clamp(min=1, max=len(values)) - 1
    place = share * last
    low = place.floor()
    high = place.ceil()
    # Counted from the nearer end, only few values need an order.
    from_top = share > 0.5  # noqa: PLR2004 # the middle
    free = float("inf")
    if from_top:
        low = last - low
        high = last - high
        free = -free
    most = int(min(share, 1 - share) * (len(values) - 1)) + 3
    taken = values.masked_fill(is_free, free)
    ordered = taken.topk(min(most, len(values)), 0, largest=from_top).values
    below = ordered.gather(0, low.long().unsqueeze(0))
    above = ordered.gather(0, high.long().unsqueeze(0))
    return below.lerp(above, place.frac().unsqueeze(0)).squeeze(0)


def _zclip(
    sigmas: float, beta: float, warmup: int, kept: Tensor, norms: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance ZClip, which keeps the number of updates, the mean and the variance."""
    if norms.numel() == 1 and norms.is_cpu:
        return _zclip_of_one(sigmas, beta, warmup, kept, norms)
    number, mean, variance = kept.unbind()
    is_warm = number >= warmup
    std = variance.clamp(min=0).sqrt()
    z = (norms - mean) / (std + _EPSILON)
    is_spike = is_warm & (z > sigmas) & norms.isfinite()
    passed = norms.where(~is_spike, mean + sigmas**2 * std / z)
    after = number + 1
    so_far = _welford(after, mean, variance, passed)
    running = _decayed(beta, mean, variance, passed)
    new = [late.where(is_warm, early) for late, early in zip(running, so_far, strict=True)]
    return passed, _advanced(kept, passed, after, *new)


def _zclip_of_one(
    sigmas: float, beta: float, warmup: int, kept: Tensor, norms: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance ZClip for one number on the host, where numbers of Python take a fraction of the time and come out alike."""
    (number,), (mean,), (variance,) = kept.tolist()
    passed = norms.item()
    is_warm = number >= warmup
    std = 0.0
    if variance > 0:
        # Python rounds a root otherwise.
        std = kept[2].sqrt().item()
    z = (passed - mean) / (std + _EPSILON)
    if is_warm and z > sigmas and math.isfinite(passed):
        passed = mean + sigmas**2 * std / z
        norms = norms.new_tensor([passed])
    new = kept
    if math.isfinite(passed) and passed:
        numbers = _welford(number + 1, mean, variance, passed)
        if is_warm:
            numbers = _decayed(beta, mean, variance, passed)
        new = kept.new_tensor([number + 1, *numbers]).unsqueeze(1)
    return norms, new


def _welford(
    after: _Number, mean: _Number, variance: _Number, passed: _Number
) -> tuple[_Number, _Number]:
    """Return the mean and the variance so far, by Welford's algorithm."""
    distance = passed - mean
    new = mean + distance / after
    return new, variance + (distance * (passed - new) - variance) / after


def _decayed(
    beta: float, mean: _Number, variance: _Number, passed: _Number
) -> tuple[_Number, _Number]:
    """Return the running mean and variance."""
    share = 1 - beta
    new = beta * mean + share * passed
    distance = passed - new
    return new, beta * variance + share * (distance * distance)


def _adagc(
    times: float, beta: float, warmup: int, kept: Tensor, norms: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance AdaGC, which keeps the number of updates and the mean, or in the warm-up the least norm."""
    number, mean = kept.unbind()
    is_warm = number >= warmup
    bound = times * mean
    is_spike = is_warm & (norms > bound) & norms.isfinite()
    passed = norms.where(~is_spike, bound)
    least = passed.where(number == 0, mean.minimum(passed))
    running_mean = beta * mean + (1 - beta) * passed
    new_mean = running_mean.where(is_warm, least)
    return passed, _advanced(kept, passed, number + 1, new_mean)


def _advanced(kept: Tensor, passed: Tensor, *rows: Tensor) -> Tensor:
    """Return new rows, and the kept ones if the norm is 0 or non-finite, which teaches nothing."""
    import torch  # noqa: PLC0415 # reading rules must not need torch

    new = torch.stack(rows)
    return new.where(passed.isfinite() & (passed != 0), kept)


def _zclip_bound(
    sigmas: float, warmup: int, kept: Sequence[float], _passed: float
) -> tuple[float, str] | None:
    number, mean, variance = kept
    if number < warmup:
        return None
    std = max(variance, 0.0) ** 0.5
    bound = mean + sigmas * (std + _EPSILON)
    text = (
        f"running mean {mean:.3g}, standard deviation {std:.3g}{_age(number)}; "
        f"bound: {sigmas:g} standard deviations above the mean"
    )
    return bound, text


def _adagc_bound(
    times: float, warmup: int, kept: Sequence[float], _passed: float
) -> tuple[float, str] | None:
    number, mean = kept
    if number < warmup:
        return None
    return times * mean, f"{times:g} times the running mean {mean:.3g}{_age(number)}"


def _autoclip_bound(
    percentile: float, window: int, kept: Sequence[float], passed: float
) -> tuple[float, str]:
    number = min(kept[0] + 1, window)
    return passed, f"percentile {percentile:g} of the last {number:.0f} values, this one included"


def _age(number: float) -> str:
    if number >= _YOUNG:
        return ""
    return f", known from {number:.0f} updates so far"
