"""The table of statistics: measuring a gradient, and merging the numbers of shards. Needs torch only to measure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Statistic:
    """A number that can be measured on a gradient.

    Attributes:
        measure: maps the elements of one gradient to a 0-dim tensor on their device, without waiting
            for the device. Its second argument is the number of zeros that a sparse gradient leaves out.
            Half-precision elements come as float32.
        merge: merges the numbers of the shards of a gradient into the number of the whole: ``"sum"``, ``"max"``,
            ``"min"``, or a function that maps the numbers in ``part`` of all ranks, float64 of shape
            ``[ranks, gradients, numbers]``, to shape ``[gradients]``.
        empty: the number of a gradient without elements.
        part: maps the elements of a shard, possibly none, to the numbers that ``merge`` needs, as 0-dim tensors
            or plain numbers; without it the one number of ``measure``.
        columns: the names of its numbers in records, for a statistic of several numbers.
        whole: maps a gradient of any layout, or this rank's part of a `DTensor`, to its numbers, in place of
            ``measure`` and ``part``.
        real: whether the statistic exists for real gradients only, not for complex ones.
        of_update: whether it describes what an update changes. Then ``measure`` and ``part`` get the elements before
            and after the update, of shape ``[2, n]``.
    """

    measure: Callable[[Tensor, int], Tensor]
    merge: Literal["sum", "max", "min"] | Callable[[Tensor], Tensor]
    empty: float = math.nan
    part: Callable[[Tensor], tuple[Tensor | float, ...]] | None = None
    real: bool = False
    of_update: bool = False
    columns: tuple[str, ...] = ()
    whole: Callable[[Tensor], Tensor] | None = None


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
    return (how and how.columns) or (stat,)


def of_column(column: str) -> Statistic:
    """Return the statistic that has a number of this name in records."""
    found = (how for how in STATISTICS.values() if column in how.columns)
    return STATISTICS[column] if column in STATISTICS else next(found)


def _late(room: str) -> Any:
    return import_module(f"gradsurgeon.tensors.{room}")


def _std(elements: Tensor, missing: int) -> Tensor:
    count = elements.numel() + missing
    mean = elements.sum() / count
    # Two passes, because the mean square minus the squared mean cancels.
    deviations = elements - mean
    if deviations.is_complex():
        deviations = deviations.abs()
    return ((deviations.square_().sum() + missing * mean.abs().square()) / count).sqrt()


def _nonfinite(elements: Tensor, _missing: int) -> Tensor:
    count = _late("_numbers").nonfinite(elements)
    return elements.real.new_full((), count) if isinstance(count, int) else count


def _mean_and_count(elements: Tensor) -> tuple[Tensor, int]:
    return elements.double().sum() / max(1, elements.numel()), elements.numel()


def _mean_of_parts(parts: Tensor) -> Tensor:
    means, counts = parts.unbind(-1)
    return (means * counts).sum(0) / counts.sum(0)


def _deviation(elements: Tensor) -> tuple[Tensor, Tensor, int]:
    mean, count = _mean_and_count(elements)
    squares = (elements.double() - mean).square().sum()
    return mean, (squares / max(1, count)).sqrt(), count


def _std_of_parts(parts: Tensor) -> Tensor:
    # Chan, Golub and LeVeque (1979): squared deviations of groups add up around the common mean.
    means, deviations, counts = parts.unbind(-1)
    squares = deviations.square() + (means - _mean_of_parts(parts[..., ::2])).square()
    return ((counts * squares).sum(0) / counts.sum(0)).sqrt()


def _change_and_weight(pair: Tensor) -> tuple[Tensor, Tensor]:
    before, after = pair
    change, weight = _late("_numbers").norms([after - before, after])
    return change, weight


def _over_weight(change: Tensor, weight: Tensor) -> Tensor:
    # What did not change is 0 even of a weight that is 0.
    return (change / weight).where(change != 0, 0.0)


def _ratio_of_parts(parts: Tensor) -> Tensor:
    return _over_weight(*parts.square().sum(0).sqrt().unbind(-1))


def _moved(pair: Tensor) -> Tensor:
    share: Tensor = _late("_numbers").differs(*pair).float().mean()
    return share


def _moved_and_count(pair: Tensor) -> tuple[Tensor | float, int]:
    count = pair.shape[1]
    return _moved(pair) if count else 0.0, count


STATISTICS: dict[str, Statistic] = {
    "l1": Statistic(lambda elements, _: elements.abs().sum(), merge="sum", empty=0.0),
    # One reduction of all gradients serves the trap and clipping also, if no gradient is sharded.
    "l2": Statistic(
        lambda elements, _: _late("_numbers").norm(elements),
        merge=lambda parts: parts[..., 0].square().sum(0).sqrt(),
        empty=0.0,
    ),
    "linf": Statistic(lambda elements, _: elements.abs().amax(), merge="max", empty=0.0),
    "mean": Statistic(
        lambda elements, missing: elements.sum() / (elements.numel() + missing),
        merge=_mean_of_parts,
        part=_mean_and_count,
        real=True,
    ),
    "std": Statistic(_std, merge=_std_of_parts, part=_deviation),
    "min": Statistic(
        lambda elements, missing: elements.amin().clamp(max=0) if missing else elements.amin(),
        merge="min",
        real=True,
    ),
    "max": Statistic(
        lambda elements, missing: elements.amax().clamp(min=0) if missing else elements.amax(),
        merge="max",
        real=True,
    ),
    "zeros": Statistic(
        lambda elements, missing: elements.numel() + missing - elements.count_nonzero(),
        merge="sum",
        empty=0.0,
    ),
    "nonfinite": Statistic(_nonfinite, merge="sum", empty=0.0),
    "numel": Statistic(
        lambda elements, missing: elements.real.new_full((), elements.numel() + missing),
        merge="sum",
        empty=0.0,
    ),
    "projection": Statistic(
        lambda elements, _: _late("_projection").projections(elements),
        merge="sum",
        empty=0.0,
        columns=("projection_1", "projection_2"),
        whole=lambda tensor: _late("_projection").projections(tensor),
    ),
    "ratio": Statistic(
        lambda pair, _: _over_weight(*_change_and_weight(pair)),
        merge=_ratio_of_parts,
        part=_change_and_weight,
        of_update=True,
    ),
    "moved": Statistic(
        lambda pair, _: _moved(pair), merge=_mean_of_parts, part=_moved_and_count, of_update=True
    ),
}
