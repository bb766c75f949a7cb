"""How the steps of two rules lie to each other."""

from __future__ import annotations

from math import gcd

from gradsurgeon.actions import Steps


def last_step(steps: Steps) -> int | None:
    """Return the last step in which a rule acts; ``None`` if it never stops."""
    return None if steps.to is None else steps.to - 1 - (steps.to - 1 - steps.from_) % steps.every


def includes(outer: Steps, inner: Steps) -> bool:
    """Tell whether all steps of ``inner`` are steps of ``outer``."""
    last = last_step(inner)
    if last == inner.from_:
        return outer.due(last)
    if not outer.due(inner.from_) or inner.every % outer.every:
        return False
    return outer.to is None if last is None else outer.due(last)


def meet(first: Steps, second: Steps) -> bool:
    """Tell whether two schedules share a step."""
    first, second = sorted((first, second), key=lambda steps: steps.from_)
    common = gcd(first.every, second.every)
    gap = second.from_ - first.from_
    if gap % common:
        return False
    # The smallest number of periods of the later one after which the earlier one is due, too.
    period = first.every // common
    turns = (-gap // common) * pow(second.every // common, -1, period) % period
    step = second.from_ + turns * second.every
    return first.due(step) and second.due(step)
