"""Timing: lanes that take turns in one process, and what is made of their differences.

A machine slows down and speeds up while a benchmark runs. Whatever is to be compared is therefore timed
in turn, round by round, and only numbers of the same round are subtracted or divided.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with its quartiles, of ``count`` values."""

    median: float
    low: float
    high: float
    count: int

    def to_dict(self) -> dict[str, float]:
        """Return the numbers as JSON has them: four digits are more than any of them is good for."""
        numbers = {"median": self.median, "low": self.low, "high": self.high}
        return {key: rounded(value) for key, value in numbers.items()} | {"count": self.count}


def rounded(value: float) -> float:
    """Return a number with four significant digits."""
    return float(f"{value:.4g}")


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles.

    Args:
        values: at least one number, in any order.
    """
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, len(values))


@dataclass(frozen=True, slots=True)
class Budget:
    """How long a series may take: ``rounds``, or ``seconds`` of them, but ``least`` in any case."""

    rounds: int
    seconds: float
    least: int = 5


class CpuClock:
    """Time that this process has computed, in microseconds: others on the machine do not count."""

    def time(self, call: Call) -> float:
        """Return how long a call takes."""
        begin = time.process_time_ns()
        call()
        return (time.process_time_ns() - begin) / 1e3


class CudaClock:
    """Time on the device between two events, in microseconds, waiting for what is under way before."""

    def time(self, call: Call) -> float:
        """Return how long a call keeps the device, or the host keeps the device waiting."""
        event: Any = torch.cuda.Event  # torch has no types there
        begin, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1e3


Clock = CpuClock | CudaClock


def clock(device: str) -> Clock:
    """Return the clock of a kind of device."""
    return CudaClock() if device == "cuda" else CpuClock()


def interleave(lanes: Sequence[Call], ticks: Clock, budget: Budget) -> list[list[float]]:
    """Time calls in turn.

    Each round calls every lane once, beginning one lane later than the round before, so that no lane
    always comes after the same neighbour or first after a pause.

    Args:
        lanes: the calls.
        ticks: what measures them.
        budget: when to stop.

    Returns:
        One list of times per lane, a time per round.
    """
    times: list[list[float]] = [[] for _ in lanes]
    stop = time.monotonic() + budget.seconds
    for number in range(budget.rounds):
        if number >= budget.least and time.monotonic() > stop:
            break
        for place in range(len(lanes)):
            lane = (number + place) % len(lanes)
            times[lane].append(ticks.time(lanes[lane]))
    return times


def warm_up(lanes: Sequence[Call], seconds: float, *, least: int = 2, most: int = 70) -> None:
    """Call lanes until caches, allocators and lazily made state are as they stay."""
    stop = time.monotonic() + seconds
    for number in range(most):
        if number >= least and time.monotonic() > stop:
            break
        for lane in lanes:
            lane()


def compared(base: Sequence[float], case: Sequence[float]) -> dict[str, Any]:
    """Return what a case costs beyond its baseline, by rounds.

    Args:
        base: times of the baseline, one per round.
        case: times of the case, from the same rounds.
    """
    pairs = list(zip(base, case, strict=True))
    extra = [later - sooner for sooner, later in pairs]
    return {
        "base_us": spread(base).to_dict(),
        "extra_us": spread(extra).to_dict(),
        # What happens in some steps only, such as a flush, shows here and not in the median.
        "mean_extra_us": rounded(statistics.fmean(extra)),
        "step_ratio": spread([later / sooner for sooner, later in pairs]).to_dict(),
    }


def over(base: Sequence[float], case: Sequence[float], yardstick: Sequence[float]) -> Spread:
    """Return the extra cost of a case in units of the median of a yardstick from the same rounds."""
    unit = statistics.median(yardstick)
    return spread([(later - sooner) / unit for sooner, later in zip(base, case, strict=True)])


# Below, what a call takes in any case would hide how it grows.
_DECADES = 100


def exponent(points: Iterable[tuple[float, float]]) -> float | None:
    """Return the power of the size with which a cost grows: 1 is in proportion, 2 is a square.

    It is fitted by least squares in logarithms, over the two upper decades of the sizes.

    Args:
        points: sizes, each with its cost; costs of 0 and below are noise, and left out.

    Returns:
        The power; ``None`` where fewer than two points tell it.
    """
    known = [(size, cost) for size, cost in points if cost > 0]
    most = max((size for size, _ in known), default=0)
    upper = [(math.log(size), math.log(cost)) for size, cost in known if _DECADES * size >= most]
    if len({size for size, _ in upper}) < 2:
        return None
    sizes, costs = zip(*upper, strict=True)
    return statistics.linear_regression(sizes, costs).slope
