"""The running statistic of ZClip (arXiv 2504.02507), in plain Python: what `spike-trap` lets through."""

import math
from collections.abc import Iterable, Iterator
from statistics import fmean, pvariance

BETA, WARMUP = 0.97, 25
_EPSILON = 1e-6


def let_through(
    norms: Iterable[float], sigmas: float, *, beta: float = BETA, warmup: int = WARMUP
) -> Iterator[float]:
    """Yield for each norm how much of it is let through: all of it, or less where it is a spike.

    A norm that is 0 or not finite is let through and never enters the statistic, which the first
    ``warmup`` of the others start. From then on what is let through of a norm enters, not the norm.
    """
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
