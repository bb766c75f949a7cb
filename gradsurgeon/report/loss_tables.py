"""How losses conflict and were combined, as tables and sentences. Needs numpy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from gradsurgeon.errors import printable
from gradsurgeon.planning.table import count, grid
from gradsurgeon.report.losses import Combined, Compared, OfLosses, Pair
from gradsurgeon.report.tables import Table

_PAIRS, _WEIGHTS, _SAID = 28, 20, 5
# From here on a weight helps more than a method: the smaller gradient turns the larger one by less than a degree.
_FAR = 100.0
_PAIR_HEAD = ("losses", "history", "mean cosine", "least", "< 0", "ratio", "opposed", "calls")
_WEIGHT_HEAD = ("loss", "history", "mean weight", "least", "largest", "calls")
MATRIX_HINT = "above the diagonal the mean cosine, below it the share of calls in which it was < 0"
_PAIR_HINTS = (
    "history: the mean cosine of a few calls each, from -1 (▁) to 1 (█)",
    "cosine < 0: a small step down one loss is a step up the other",
    "ratio: norm of the first over the second; opposed: share of elements with opposite signs, by norm",
)


def loss_tables(found: OfLosses, *, observed: bool) -> list[Table]:
    """Return one table for each rule that compares or combines losses; its notes say what stands out."""
    compared = [compared_table(one) for one in found.compared]
    return [*compared, *(combined_table(one, observed=observed) for one in found.combined)]


def compared_table(found: Compared) -> Table:
    parts = f" in each of {len(found.parts):,} parts" if any(found.parts) else ""
    worst = found.worst()
    shown = worst[:_PAIRS]
    notes = []
    if len(shown) < len(worst):
        notes.append(f"and {len(worst) - len(shown):,} more; the lowest mean cosines are shown")
    # Of two losses, or of several parts, the table says it all.
    if len(found.losses) > 2 and len(found.parts) == 1:  # noqa: PLR2004 # two
        cells = matrix(found.losses, found.pairs)
        notes += [line[2:] for line in grid(cells, right=frozenset(range(1, 100)))]
        notes.append(MATRIX_HINT)
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


def matrix(losses: Sequence[str], pairs: Sequence[Pair]) -> list[list[str]]:
    """Return the cells of a table of all losses: columns have the numbers that the rows begin with."""
    place = {loss: number for number, loss in enumerate(losses, 1)}
    table = [["", *map(str, place.values())]]
    table += [
        [f"{number} {printable(loss)}", *[""] * len(losses)] for loss, number in place.items()
    ]
    for pair in pairs:
        # In the order of the rule, whatever a record calls first.
        row, column = sorted((place[pair.first], place[pair.second]))
        table[row][column] = _cosine(pair.cosine)
        table[column][row] = _share(pair.below)
    return table


def pair_name(pair: Pair) -> str:
    return f"{printable(pair.part)}: {printable(pair.name)}" if pair.part else printable(pair.name)


def _cells(pair: Pair) -> list[str]:
    cosines, shares = _cosine(pair.cosine), _share(pair.below)
    numbers = (cosines, _cosine(pair.least), shares, _number(pair.ratio), _share(pair.opposed))
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
    if not low:
        yield "no losses conflict on average"
    elif len(found.parts) > 1:
        known = Counter(one.name for one in found.pairs if one.calls)
        conflicting = Counter(one.name for one in low)  # in the order of the worst of each
        for name, many in list(conflicting.items())[:_SAID]:
            yield f"{printable(name)} conflict on average in {many:,} of {known[name]:,} parts"
        if len(conflicting) > _SAID:
            yield f"... and {count(len(conflicting) - _SAID, 'more pair')} in some parts"
    else:
        yield (
            f"the worst: {printable(low[0].name)}, mean cosine {_cosine(low[0].cosine)}, below 0 in "
            f"{_share(low[0].below)} of {count(low[0].calls, 'call')}"
        )
    far = [one for one in found.pairs if one.ratio >= _FAR or one.ratio <= 1 / _FAR]  # never of NaN
    if far:
        one = max(far, key=lambda pair: abs(math.log(pair.ratio)))
        large, small = (one.first, one.second) if one.ratio > 1 else (one.second, one.first)
        where = f" in {printable(one.part)}" if one.part else ""
        more = f" (and {len(far) - 1:,} more)" if len(far) > 1 else ""
        yield (
            f"the gradient of {printable(large)} is {max(one.ratio, 1 / one.ratio):.3g} times that of "
            f"{printable(small)}{where}{more}: that is no conflict, a loss wants another weight"
        )
    lacking = [one for one in found.pairs if one.missing]
    if lacking:
        most = max(lacking, key=lambda one: one.missing)
        more = f", and of {count(len(lacking) - 1, 'more pair')}" if len(lacking) > 1 else ""
        yield (
            f"left out: {count(most.missing, 'call')} of {pair_name(most)}{more}, in which a loss gave no gradient, or "
            "none that is finite"
        )
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
