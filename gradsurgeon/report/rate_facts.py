"""What stands out in the learning rates of a run. Needs numpy."""

from collections.abc import Iterable, Iterator

import numpy as np

from gradsurgeon.errors import printable
from gradsurgeon.records.store import Part
from gradsurgeon.report.band import Callout
from gradsurgeon.report.losses import LossSeries, rate_changes

# Fewer updates show no schedule.
_LEAST = 20
_TINY = 1e-6
# A warm-up and a decay have neighbours of the peak that are close to it.
_NEAR = 0.5

_VANISHED = (
    "the learning rate of {name} was below a millionth of its peak of {peak:.3g} in {tiny:,} of {total:,} updates, first at "
    "step {step}: weights hardly moved then. Look how often the script calls `scheduler.step()`, and whether the schedule "
    "counts epochs or updates"
)
_ONCE = (
    "the learning rate of {name} had its peak of {peak:.3g} in one of {total:,} updates, at step {step}, and less than half "
    "before and after. Look how often the script calls `scheduler.step()`, and at the length of the warm-up"
)


def rate_facts(series: Iterable[Part], last: int) -> Iterator[Callout]:
    """Yield what stands out up to the last step, of the first group of an optimizer of which there is something to say."""
    for rate in rate_changes(series):
        text = _fact(rate, last)
        if text:
            yield Callout("learning rate", text)
            return


def _fact(rate: LossSeries, last: int) -> str:
    # The rate is recorded when it changes.
    updates = np.diff(rate.steps, append=last + 1)
    total = int(updates.sum())
    peak = float(rate.values.max())
    if total < _LEAST or not 0 < peak < np.inf:
        return ""
    top = int(rate.values.argmax())
    is_tiny = rate.values < _TINY * peak
    # A rate may rise from 0.
    is_tiny[:top] = False
    tiny = int(updates[is_tiny].sum())
    numbers = {"name": printable(rate.name), "peak": peak, "total": total}
    if 2 * tiny > total:
        return _VANISHED.format(tiny=tiny, step=rate.steps[is_tiny][0], **numbers)
    is_last = top + 1 == len(rate.values)
    is_of_one_update = updates[rate.values == peak].sum() == 1
    # The peak itself is the last of these.
    around = np.sort(rate.values[max(0, top - 1) : top + 2])
    if is_of_one_update and not is_last and around[-2] < _NEAR * peak:
        return _ONCE.format(step=rate.steps[top], **numbers)
    return ""
