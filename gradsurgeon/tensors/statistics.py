"""The table of statistics: measuring a gradient, and merging the numbers of shards. Needs torch only to measure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor


# A histogram has so many bins for each sign, each over so many powers of 2. The first begins at this power, and also takes
# what is smaller, the last what is larger. The columns are in the order of values; zeros and non-finite elements come last.
HISTOGRAM_BINS = 32
HISTOGRAM_OCTAVES = 2
HISTOGRAM_LOWEST = -48
_BIN_COLUMNS = tuple([f"histogram_{place:02}" for place in range(2 * HISTOGRAM_BINS)])
HISTOGRAM = (*_BIN_COLUMNS, "histogram_zeros", "histogram_nonfinite")


@dataclass(frozen=True, slots=True)
class Statistic:
    """A number that can be measured on a gradient.

    Attributes:
        measure: maps the elements of one gradient to a 0-dim tensor on their device, without waiting
            for the device. Its second argument is the number of zeros that a sparse gradient leaves out.
            Half-precision elements come as float32. Without it, ``whole`` takes its place.
        merge: merges the numbers of the shards of a gradient into the number of the whole: ``"sum"``, ``"max"``,
            ``"min"``, or a function that maps the numbers in ``part`` of all ranks, float64 of shape
            ``[ranks, gradients, numbers]``, to shape ``[gradients]``.
        empty: the number of a gradient without elements.
        part: maps the elements of a shard, possibly none, to the numbers that ``merge`` needs, as 0-dim tensors
            or plain numbers; without it the one number of ``measure``.
        columns: the names of its numbers in records, for a statistic of several numbers.
        whole: maps gradients of any layout on one device, or this rank's parts of `DTensor`s, to their numbers,
            shape ``[gradients, columns]``, in place of ``measure`` and ``part``.
        real: whether the statistic exists for real gradients only, not for complex ones.
        of_update: whether it describes what an update changes. Then ``measure`` and ``part`` get the elements before
            and after the update, of shape ``[2, n]``.
    """

    measure: Callable[[Tensor, int], Tensor] | None
    merge: Literal["sum", "max", "min"] | Callable[[Tensor], Tensor]
    empty: float = math.nan
    part: Callable[[Tensor], tuple[Tensor | float, ...]] | None = None
    real: bool = False
    of_update: bool = False
    columns: tuple[str, ...] = ()
    whole: Callable[[Sequence[Tensor]], Tensor] | None = None

    @property
    def joins(self) -> bool:
        """Whether the number of several gradients together follows from the number of each."""
        return self.part is None and self.whole is None


def add_statistic(name: str, statistic: Statistic) -> None:
    """Add your own statistic, for use in `stats` of a rule.

    Args:
        name: letters, digits and ``_``.
        statistic: how to measure it.

    Raises:
        ValueError: the name is taken, or is not a valid name.
    """
    if not name.isidentifier():
        raise ValueError(f"{name!r} is not a name for a statistic: use letters, digits and `_`")
    if STATISTICS.get(name, statistic) != statistic:
        raise ValueError(f"there is a statistic {name!r} already")
    STATISTICS[name] = statistic


def columns_of(stat: str) -> tuple[str, ...]:
    how = STATISTICS.get(stat)
    if how is None or not how.columns:
        return (stat,)
    return how.columns


def statistic_of(column: str) -> str:
    """Return the name of the statistic that has a number of this name in records; other names stay as they are."""
    for stat, how in STATISTICS.items():
        if column in how.columns:
            return stat
    return column


def of_column(column: str) -> Statistic:
    return STATISTICS[statistic_of(column)]


def _late(room: str) -> Any:
    """Return a module that needs torch."""
    return import_module(f"gradsurgeon.tensors.{room}")


def _l1(elements: Tensor, _missing: int) -> Tensor:
    return elements.abs().sum()


def _l2(elements: Tensor, _missing: int) -> Tensor:
    norm: Tensor = _late("_numbers").norm(elements)
    return norm


def _l2_of_parts(parts: Tensor) -> Tensor:
    return parts[..., 0].square().sum(0).sqrt()


def _linf(elements: Tensor, _missing: int) -> Tensor:
    return elements.abs().amax()


def _mean(elements: Tensor, missing: int) -> Tensor:
    return elements.sum() / (elements.numel() + missing)


def _min(elements: Tensor, missing: int) -> Tensor:
    smallest = elements.amin()
    if missing:
        return smallest.clamp(max=0)
    return smallest


def _max(elements: Tensor, missing: int) -> Tensor:
    largest = elements.amax()
    if missing:
        return largest.clamp(min=0)
    return largest


def _zeros(elements: Tensor, missing: int) -> Tensor:
    return elements.numel() + missing - elements.count_nonzero()


def _numel(elements: Tensor, missing: int) -> Tensor:
    return _number(elements.numel() + missing, elements.device)


@lru_cache(maxsize=4096)
def _number(number: int, device: torch.device) -> Tensor:
    # A device need not be asked for what the host knows.
    on_device: Tensor = _late("_torch").integers((number,), device)
    return on_device[0].float()


def _std(elements: Tensor, missing: int) -> Tensor:
    count = elements.numel() + missing
    mean = elements.sum() / count
    # Two passes, because the mean square minus the squared mean cancels.
    deviations = elements - mean
    if deviations.is_complex():
        deviations = deviations.abs()
    squares = deviations.square_().sum()
    squares_of_missing = missing * mean.abs().square()
    return ((squares + squares_of_missing) / count).sqrt()


def _nonfinite(elements: Tensor, _missing: int) -> Tensor:
    count: Tensor | int = _late("_nonfinite").nonfinite(elements)
    if isinstance(count, int):
        return elements.real.new_full((), count)
    return count


def _mean_and_count(elements: Tensor) -> tuple[Tensor, int]:
    count = elements.numel()
    mean = elements.double().sum() / max(1, count)
    return mean, count


def _mean_of_parts(parts: Tensor) -> Tensor:
    means, counts = parts.unbind(-1)
    return (means * counts).sum(0) / counts.sum(0)


def _deviation(elements: Tensor) -> tuple[Tensor, Tensor, int]:
    mean, count = _mean_and_count(elements)
    squares = (elements.double() - mean).square().sum()
    deviation = (squares / max(1, count)).sqrt()
    return mean, deviation, count


def _std_of_parts(parts: Tensor) -> Tensor:
    # Chan, Golub and LeVeque (1979): squared deviations of groups add up around the common mean.
    means, deviations, counts = parts.unbind(-1)
    mean = _mean_of_parts(parts[..., ::2])
    squares = deviations.square() + (means - mean).square()
    return ((counts * squares).sum(0) / counts.sum(0)).sqrt()


def _change_and_weight(before_and_after: Tensor) -> tuple[Tensor, Tensor]:
    before, after = before_and_after
    change, weight = _late("_numbers").norms([after - before, after])
    return change, weight


def _over_weight(change: Tensor, weight: Tensor) -> Tensor:
    # A weight of 0 that did not change has the ratio 0, not NaN.
    return (change / weight).where(change != 0, 0.0)


def _ratio(before_and_after: Tensor, _missing: int) -> Tensor:
    change, weight = _change_and_weight(before_and_after)
    return _over_weight(change, weight)


def _ratio_of_parts(parts: Tensor) -> Tensor:
    norms = parts.square().sum(0).sqrt()
    change, weight = norms.unbind(-1)
    return _over_weight(change, weight)


def _moved(before_and_after: Tensor, _missing: int = 0) -> Tensor:
    before, after = before_and_after
    share: Tensor = _late("_numbers").differs(before, after).float().mean()
    return share


def _moved_and_count(before_and_after: Tensor) -> tuple[Tensor | float, int]:
    count = before_and_after.shape[1]
    if not count:
        return 0.0, 0
    return _moved(before_and_after), count


def _projections(tensors: Sequence[Tensor]) -> Tensor:
    projections: Tensor = _late("_projection").projections_of(tensors)
    return projections


def _histograms(tensors: Sequence[Tensor]) -> Tensor:
    counts: Tensor = _late("_histogram").histograms(tensors)
    return counts


STATISTICS: dict[str, Statistic] = {
    "l1": Statistic(_l1, merge="sum", empty=0.0),
    # One reduction of all gradients serves the trap and clipping also, if no gradient is sharded.
    "l2": Statistic(_l2, merge=_l2_of_parts, empty=0.0),
    "linf": Statistic(_linf, merge="max", empty=0.0),
    "mean": Statistic(_mean, merge=_mean_of_parts, part=_mean_and_count, real=True),
    "std": Statistic(_std, merge=_std_of_parts, part=_deviation),
    "min": Statistic(_min, merge="min", real=True),
    "max": Statistic(_max, merge="max", real=True),
    "zeros": Statistic(_zeros, merge="sum", empty=0.0),
    "nonfinite": Statistic(_nonfinite, merge="sum", empty=0.0),
    "numel": Statistic(_numel, merge="sum", empty=0.0),
    "projection": Statistic(
        None,
        merge="sum",
        empty=0.0,
        columns=("projection_1", "projection_2"),
        whole=_projections,
    ),
    "histogram": Statistic(
        None, merge="sum", empty=0.0, columns=HISTOGRAM, whole=_histograms, real=True
    ),
    "ratio": Statistic(_ratio, merge=_ratio_of_parts, part=_change_and_weight, of_update=True),
    "moved": Statistic(_moved, merge=_mean_of_parts, part=_moved_and_count, of_update=True),
}
