"""The loss of each update and the learning rates of optimizers, as curves. Needs numpy."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradsurgeon.errors import printable
from gradsurgeon.records.store import Part
from gradsurgeon.records.store.layout import json_number
from gradsurgeon.records.store.memory import LOSS, RATE
from gradsurgeon.records.store.recorded import of_lowest_ranks
from gradsurgeon.report.losses import LossSeries, joined, series_of
from gradsurgeon.report.spikes import Floats, Ints
from gradsurgeon.report.tables import Table

# Points of a curve in `report --format json`.
MOST_POINTS = 2000
_ROWS = 12
_CELLS = 64
_HEAD = ("each update", "history", "first", "least", "largest", "last", "non-finite")


class RateSeries(NamedTuple):
    """The learning rate of one group of parameters of an optimizer: its corners, oldest first. Between them it is a line."""

    optimizer: str
    group: int
    steps: Ints
    values: Floats


def rates_of(series: Sequence[Part], last: int) -> list[RateSeries]:
    """Return the learning rates of a run up to its last step, those of the lowest rank that has them."""
    recorded: list[LossSeries] = []
    for part, repeated in of_lowest_ranks(series):
        if part.key.stat == RATE:
            names = [name for name, column in part.columns.items() if column not in repeated]
            recorded += series_of(part, names)
    rates = []
    for rate in joined(recorded):
        optimizer, _, group = rate.name.rpartition("/")
        rates.append(RateSeries(optimizer, int(group), *_corners(rate.steps, rate.values, last)))
    return rates


def _corners(steps: Ints, values: Floats, last: int) -> tuple[Ints, Floats]:
    """Return the corners of a curve: a value was recorded when it changed, and holds until the next one."""
    ends = np.append(steps[1:] - 1, max(last, steps[-1]))
    # Each value has two corners, which are one where it holds for one step.
    corners = np.column_stack([steps, ends]).ravel()
    is_new = np.append(True, np.diff(corners) > 0)
    corners = corners[is_new]
    levels = np.repeat(values, 2)[is_new]
    goes_on = levels[1:] == levels[:-1]
    is_corner = np.ones(len(levels), bool)
    is_corner[1:-1] = ~(goes_on[1:] & goes_on[:-1])
    return corners[is_corner], levels[is_corner]


def training_table(losses: Sequence[LossSeries], rates: Sequence[RateSeries]) -> Table | None:
    """Return the table of losses and learning rates, ``None`` if none were recorded."""
    labels = []
    curves = []
    for loss in losses:
        if loss.stat == LOSS:
            labels.append(loss.name)
            curves.append(loss.values)
    for label, rate in labelled(rates):
        labels.append(label)
        # The history has a cell for so many steps, not for so many corners.
        at = np.linspace(rate.steps[0], rate.steps[-1], _CELLS).astype(np.int64)
        curves.append(rate.values[np.searchsorted(rate.steps, at, side="right") - 1])
    if not curves:
        return None
    notes = []
    if len(curves) > _ROWS:
        notes.append(f"and {len(curves) - _ROWS:,} more")
    rows = list(map(_row, labels[:_ROWS], curves[:_ROWS]))
    histories = [curve.tolist() for curve in curves[:_ROWS]]
    right = frozenset(range(2, len(_HEAD)))
    return Table("loss and learning rate", _HEAD, rows, right, histories, notes)


def labelled(rates: Sequence[RateSeries]) -> Iterator[tuple[str, RateSeries]]:
    """Yield each learning rate with words for it; groups of an optimizer with the same one are told together."""
    optimizers = {rate.optimizer for rate in rates}
    alike: dict[tuple[str, bytes, bytes], list[RateSeries]] = {}
    for rate in rates:
        key = (rate.optimizer, rate.steps.tobytes(), rate.values.tobytes())
        alike.setdefault(key, []).append(rate)
    for groups in alike.values():
        first = groups[0]
        label = "learning rate"
        if len(optimizers) > 1:
            label += f" of {first.optimizer}"
        if len(alike) > len(optimizers):
            numbers = [str(rate.group) for rate in groups]
            label += f", group {', '.join(numbers)}"
        yield label, first


def _row(label: str, values: Floats) -> list[str]:
    finite = values[np.isfinite(values)]
    row = [printable(label), "", f"{values[0]:.3g}"]
    if len(finite):
        row += [f"{finite.min():.3g}", f"{finite.max():.3g}"]
    else:
        row += ["-", "-"]
    row.append(f"{values[-1]:.3g}")
    nonfinite = len(values) - len(finite)
    row.append(f"{nonfinite:,}" if nonfinite else "-")
    return row


def newest(losses: Sequence[LossSeries], rates: Sequence[RateSeries]) -> str:
    """Return the last loss and learning rate in words, such as ``loss 2.31, learning rate 0.001``."""
    words = [f"{loss.name} {loss.values[-1]:.4g}" for loss in losses if loss.stat == LOSS]
    words += [f"{label} {rate.values[-1]:.3g}" for label, rate in labelled(rates)]
    return printable(", ".join(words[:4]))


def thinned(steps: Ints, values: Floats, most: int) -> tuple[list[int], list[float | str]]:
    """Return at most so many points of a curve, each the worst of a few: the first non-finite, or else the largest."""
    badness = np.where(np.isfinite(values), values, np.inf)
    # Several records of one step make one point.
    _, starts = np.unique(steps, return_index=True)
    stride = -(-len(starts) // most)
    starts = starts[:: max(1, stride)]
    ends = np.append(starts[1:], len(steps))
    worst = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        worst.append(start + int(np.argmax(badness[start:end])))
    # Records are float32, of which seven digits are right.
    shown = [json_number(float(f"{value:.7g}")) for value in values[worst]]
    return steps[worst].tolist(), shown


def rate_to_dict(rate: RateSeries) -> dict[str, Any]:
    steps, values = thinned(rate.steps, rate.values, MOST_POINTS)
    return {"optimizer": rate.optimizer, "group": rate.group, "steps": steps, "values": values}
