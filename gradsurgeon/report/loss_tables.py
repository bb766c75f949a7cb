"""Losses, how they conflict and were combined, as tables and sentences. Needs numpy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from gradsurgeon.errors import printable
from gradsurgeon.planning.table import count
from gradsurgeon.report.losses import Combined, Compared, OfLosses, Pair, Tagged
from gradsurgeon.report.tables import Table

_PAIRS, _WEIGHTS = 28, 20
_TAGGED_HEAD = ("loss", "history", "first", "least", "max", "last", "non-finite")
_PAIR_HEAD = ("losses", "history", "mean cosine", "least", "< 0", "ratio", "calls")
_WEIGHT_HEAD = ("loss", "history", "mean weight", "least", "largest", "calls")
_PAIR_HINTS = (
    "history: the mean cosine of a few calls each, from -1 (▁) to 1 (█)",
    "cosine < 0: a small step down one loss is a step up the other",
    "ratio: norm of the first over the second",
)


def tagged_table(found: Sequence[Tagged]) -> Table:
    rows, curves = [], []
    for one in found:
        numbers = (f"{value:.3g}" for value in (one.first, one.least, one.largest, one.last))
        bad = f"{one.nonfinite:,}" if one.nonfinite else "-"
        rows.append([printable(one.name), "", *numbers, bad])
        # A log scale has no place for 0 and less.
        curves.append(one.curve.values.tolist() if one.least > 0 else [])
    rules = dict.fromkeys(printable(one.rule) for one in found)
    steps = np.concatenate([one.curve.steps for one in found])
    return Table(
        f"losses, recorded by {', '.join(rules)} in steps {steps.min()}..{steps.max()}",
        _TAGGED_HEAD,
        rows,
        right=frozenset(range(2, len(_TAGGED_HEAD))),
        curves=curves,
        levels=["bad" if one.nonfinite else "" for one in found],
    )


def loss_tables(found: OfLosses, *, observed: bool) -> list[Table]:
    """Return one table for each rule that compares or combines losses; its notes say what stands out."""
    compared = [compared_table(one) for one in found.compared]
    return [*compared, *(combined_table(one, observed=observed) for one in found.combined)]


def compared_table(found: Compared) -> Table:
    names = {one.part for one in found.pairs}
    parts = f" in each of {len(names):,} parts" if any(names) else ""
    worst = found.worst()
    shown = worst[:_PAIRS]
    notes = []
    if len(shown) < len(worst):
        notes.append(f"and {len(worst) - len(shown):,} more; the lowest mean cosines are shown")
    return Table(
        f"conflicts of {len(found.losses)} losses{parts}, recorded by {printable(found.rule)} in steps "
        f"{found.steps[0]}..{found.steps[1]}",
        _PAIR_HEAD,
        [_cells(one) for one in shown],
        right=frozenset(range(2, len(_PAIR_HEAD))),
        curves=[one.curve.values.tolist() for one in shown],
        ends=(-1.0, 1.0),
        levels=["warning" if one.cosine < 0 else "" for one in shown],
        notes=[*notes, *_PAIR_HINTS, *_remarks(found, worst)],
    )


def pair_name(pair: Pair) -> str:
    return f"{printable(pair.part)}: {printable(pair.name)}" if pair.part else printable(pair.name)


def _cells(pair: Pair) -> list[str]:
    cosines, shares = _cosine(pair.cosine), _share(pair.below)
    numbers = (cosines, _cosine(pair.least), shares, _number(pair.ratio))
    return [pair_name(pair), "", *numbers, f"{pair.calls:,}"]


def _cosine(value: float) -> str:
    # Plain zero has no sign: `-0.00` would look like a conflict.
    return "-" if math.isnan(value) else f"{value:.2f}".replace("-0.00", "0.00")


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.0f}%"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def _remarks(found: Compared, worst: Sequence[Pair]) -> Iterator[str]:
    """Yield what stands out, a sentence each."""
    low = [one for one in worst if one.cosine < 0]
    if low:
        yield (
            f"{count(len(low), 'pair')} of {len(worst):,} conflict on average; the worst: {pair_name(low[0])}, mean cosine "
            f"{_cosine(low[0].cosine)}, below 0 in {_share(low[0].below)} of {count(low[0].calls, 'call')}"
        )
    else:
        yield "no losses conflict on average"
    if missing := sum(one.missing for one in worst):
        yield f"left out: {missing:,} times a loss of a pair gave no gradient, or none that is finite"
    yield from _long(found.every)


def _long(every: int) -> list[str]:
    return [f"the run is long: one call in {every:,} was read"] if every > 1 else []


def combined_table(found: Combined, *, observed: bool) -> Table:
    shown = found.weights[:_WEIGHTS]
    low = min(0.0, *(one.least for one in shown))
    high = max(1.0, *(one.largest for one in shown))
    more = [f"and {len(found.weights) - len(shown):,} more"] * (len(shown) < len(found.weights))
    return Table(
        f"combined gradients of losses, recorded by {printable(found.rule)} in {count(found.calls, 'call')}, "
        f"steps {found.steps[0]}..{found.steps[1]}",
        _WEIGHT_HEAD,
        [
            [printable(one.name), "", *map(_number, (one.mean, one.least, one.largest)), calls]
            for one in shown
            for calls in [f"{one.calls:,}"]
        ],
        right=frozenset(range(2, len(_WEIGHT_HEAD))),
        curves=[one.curve.values.tolist() for one in shown],
        ends=(low, high),
        notes=[
            *more,
            f"history: the mean weight of a few calls each, from {low:.3g} (▁) to {high:.3g} (█)",
            f"{'would have ' * observed}changed the sum in {_share(found.changed)} of calls; distance from it, over its "
            f"norm: mean {_number(found.distance)}, largest {found.largest:.3g} at step {found.largest_step}",
            *_long(found.every),
        ],
    )
