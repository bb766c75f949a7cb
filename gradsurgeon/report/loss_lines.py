"""How losses conflict and were combined, as text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from gradsurgeon.errors import printable
from gradsurgeon.planning.table import count, grid
from gradsurgeon.report.losses import FAR, Combined, Compared, OfLosses, Pair
from gradsurgeon.report.signed_curve import CELLS, Curve, means_of
from gradsurgeon.report.sparkline import level_line

_LEAST_CELLS = 8
_PAIRS, _MATRICES, _WEIGHTS, _SAID = 10, 3, 20, 5
PAIR_HEAD = (
    "losses",
    "history",
    "mean cosine",
    "least",
    "< 0",
    "ratio",
    "opposed",
    "calls",
    "conflicting",
)
PAIR_NUMBERS = frozenset({2, 3, 4, 5, 6, 7})
WEIGHT_HEAD = ("loss", "history", "mean weight", "least", "largest", "calls")
WEIGHT_NUMBERS = frozenset({2, 3, 4, 5})
MATRIX_HINT = "above the diagonal the mean cosine, below it the share of calls in which it was < 0"
PAIR_HINTS = (
    "cosine < 0: a small step down one loss is a step up the other",
    "ratio: norm of the first over the second; opposed: share of elements with opposite signs, by norm",
)
_HISTORY_HINT = "history: the mean cosine of a few calls each, from -1 (▁) to 1 (█)"


def loss_lines(found: OfLosses, *, observed: bool, columns: int) -> Iterator[str]:
    for place, compared in enumerate(found.compared):
        if place:
            yield ""
        yield from _compared_lines(compared, columns)
    for place, combined in enumerate(found.combined):
        if place or found.compared:
            yield ""
        yield from _combined_lines(combined, columns, observed=observed)


def compared_title(found: Compared) -> str:
    parts = f" in each of {len(found.parts):,} parts" if any(found.parts) else ""
    return (
        f"conflicts of {len(found.losses)} losses{parts}, recorded by "
        f"{printable(found.rule)} in steps {found.steps[0]}..{found.steps[1]}"
    )


def _compared_lines(found: Compared, columns: int) -> Iterator[str]:
    yield compared_title(found)
    worst = found.worst()
    if len(found.losses) > 2:  # noqa: PLR2004 # of two the table says it all
        yield from _matrices(found, columns)
    shown = worst[:_PAIRS]
    curves = [one.curve for one in shown]
    yield from _table([PAIR_HEAD, *map(pair_cells, shown)], curves, (-1.0, 1.0), columns)
    if len(shown) < len(worst):
        yield f"  ... and {len(worst) - len(shown):,} more; the lowest mean cosines are shown"
    yield f"  {_HISTORY_HINT}"
    yield from (f"  {text}" for text in (*PAIR_HINTS, *compared_remarks(found)))


def _matrices(found: Compared, columns: int) -> Iterator[str]:
    parts = sorted(found.parts.items(), key=lambda item: min(map(_badness, item[1])))
    shown = parts[:_MATRICES]
    for part, pairs in shown:
        lines = list(grid(matrix(found.losses, pairs), right=frozenset(range(1, 100))))
        if max(map(len, lines)) > columns:
            return  # the table says it of the worst
        if part:
            yield f"  {printable(part)}"
        yield from lines
    if len(shown) < len(parts):
        yield f"  ... and {len(parts) - len(shown):,} more; the lowest mean cosines are shown"
    yield f"  {MATRIX_HINT}"


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
        table[row][column] = cosine(pair.cosine)
        table[column][row] = share(pair.below)
    return table


def _badness(pair: Pair) -> float:
    return math.inf if math.isnan(pair.cosine) else pair.cosine


def pair_cells(pair: Pair) -> list[str]:
    """Return the cells of a row; that of the history is empty, and whoever draws it fills it."""
    name = f"{printable(pair.part)}: {printable(pair.name)}" if pair.part else printable(pair.name)
    return [
        name,
        "",
        cosine(pair.cosine),
        cosine(pair.least),
        share(pair.below),
        _number(pair.ratio),
        share(pair.opposed),
        f"{pair.calls:,}",
        pair.when if pair.calls else "",
    ]


def cosine(value: float) -> str:
    # Plain zero has no sign: `-0.00` would look like a conflict.
    return "-" if math.isnan(value) else f"{value:.2f}".replace("-0.00", "0.00")


def share(value: float) -> str:
    """Return a share in percent; 0 and 100 are said of nothing else."""
    if math.isnan(value):
        return "-"
    if 0 < value < 0.01 or 0.99 < value < 1:  # noqa: PLR2004 # what rounding would make 0 and 100
        return "<1%" if value < 0.01 else ">99%"  # noqa: PLR2004 # the same
    return f"{100 * value:.0f}%"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def compared_remarks(found: Compared) -> Iterator[str]:
    """Yield what stands out, a sentence each."""
    worst = found.worst()
    low = [one for one in worst if one.cosine < 0]
    # Those that began late agree on average, and are what goes wrong now.
    begun = [one for one in worst if one.when.startswith("since")]
    if not low and not begun:
        yield "no losses conflict on average"
    elif len(found.parts) > 1:
        yield from _parts(found, low)
    elif low:
        one = low[0]
        yield (
            f"the worst: {printable(one.name)}, mean cosine {cosine(one.cosine)}, below 0 in {share(one.below)} of "
            f"{count(one.calls, 'call')}; conflicting {one.when}"
        )
    if begun:
        named = [f"{pair_cells(one)[0]} {one.when}" for one in begun[:_SAID]]
        more = f", and {len(begun) - _SAID:,} more" if len(begun) > _SAID else ""
        yield f"conflicts that have begun: {', '.join(named)}{more}"
    yield from _far(found)
    yield from _unknown(found)


def _parts(found: Compared, low: Sequence[Pair]) -> Iterator[str]:
    known = Counter(one.name for one in found.pairs if one.calls)
    conflicting = Counter(one.name for one in low)  # in the order of the worst of each
    for name, many in list(conflicting.items())[:_SAID]:
        yield f"{printable(name)} conflict on average in {many:,} of {known[name]:,} parts"
    if len(conflicting) > _SAID:
        yield f"... and {count(len(conflicting) - _SAID, 'more pair')} in some parts"


def _far(found: Compared) -> Iterator[str]:
    far = [one for one in found.pairs if one.ratio >= FAR or one.ratio <= 1 / FAR]  # never of NaN
    if far:
        one = max(far, key=lambda pair: abs(math.log(pair.ratio)))
        large, small = (one.first, one.second) if one.ratio > 1 else (one.second, one.first)
        more = f" (and {len(far) - 1:,} more)" if len(far) > 1 else ""
        times = max(one.ratio, 1 / one.ratio)
        where = f" in {printable(one.part)}" if one.part else ""
        yield (
            f"the gradient of {printable(large)} is {times:.3g} times that of {printable(small)}{where}{more}: that is no "
            "conflict, a loss wants another weight"
        )


def _unknown(found: Compared) -> Iterator[str]:
    lacking = [one for one in found.pairs if one.missing]
    if lacking:
        most = max(lacking, key=lambda one: one.missing)
        more = f", and of {count(len(lacking) - 1, 'more pair')}" if len(lacking) > 1 else ""
        where = f"{printable(most.part)}: " if most.part else ""
        yield (
            f"left out: {count(most.missing, 'call')} of {where}{printable(most.name)}{more}, in which a loss gave no "
            "gradient, or none that is finite"
        )
    if found.every > 1:
        yield f"the run is long: one call in {found.every:,} was read"


def combined_title(found: Combined) -> str:
    return (
        f"combined gradients of losses, recorded by {printable(found.rule)} in {count(found.calls, 'call')}, "
        f"steps {found.steps[0]}..{found.steps[1]}"
    )


def _combined_lines(found: Combined, columns: int, *, observed: bool) -> Iterator[str]:
    yield combined_title(found)
    shown = found.weights[:_WEIGHTS]
    low = min(0.0, *(one.least for one in shown))
    high = max(1.0, *(one.largest for one in shown))
    curves = [one.curve for one in shown]
    yield from _table([WEIGHT_HEAD, *weight_rows(found)[:_WEIGHTS]], curves, (low, high), columns)
    if len(shown) < len(found.weights):
        yield f"  ... and {len(found.weights) - len(shown):,} more"
    yield f"  history: the mean weight of a few calls each, from {low:.3g} (▁) to {high:.3g} (█)"
    yield from (f"  {remark}" for remark in combined_remarks(found, observed=observed))


def weight_rows(found: Combined) -> list[list[str]]:
    return [
        [
            printable(one.name),
            "",
            *map(_number, (one.mean, one.least, one.largest)),
            f"{one.calls:,}",
        ]
        for one in found.weights
    ]


def combined_remarks(found: Combined, *, observed: bool) -> Iterator[str]:
    would = "would have changed" if observed else "changed"
    yield (
        f"{would} the sum in {share(found.changed)} of calls; distance from it, over its norm: mean "
        f"{_number(found.distance)}, largest {found.largest:.3g} at step {found.largest_step}"
    )
    if found.every > 1:
        yield f"the run is long: one call in {found.every:,} was read"


def _table(
    table: Sequence[Sequence[str]],
    curves: Sequence[Curve],
    ends: tuple[float, float],
    columns: int,
) -> Iterator[str]:
    """Yield the lines of a table whose histories get the room that is left; names are never cut."""
    widths = [2 + max(map(len, column)) for column in zip(*table, strict=True)]
    room = columns - (sum(widths) - widths[1] + 2)
    width = max(_LEAST_CELLS, min(CELLS, room))
    rows = [table[0]]
    for row, curve in zip(table[1:], curves, strict=True):
        means = [value for _, value in means_of(curve, width)]
        rows.append([row[0], level_line(means, *ends), *row[2:]])
    yield from grid(rows, right=PAIR_NUMBERS if table[0] is PAIR_HEAD else WEIGHT_NUMBERS)
