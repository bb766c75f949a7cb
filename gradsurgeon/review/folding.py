"""Names that differ in numbers only, as one: ``layers.{0..11}.attn.weight``, twelve times."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

_NUMBER = re.compile(r"(?<![0-9])([0-9]{1,18})(?![0-9])")
_PIECES = 6  # of a list of numbers with gaps

_Row = tuple[tuple[str, ...], ...]  # per column of numbers, all that stand there


def fold(names: Iterable[str]) -> dict[str, int]:
    """Return texts that stand for all names, each with the number of names it stands for.

    A text stands for no name that is not there: ``{0..1}.{0..1}`` is four names, never two.

    >>> fold(["h.0.w", "h.1.w", "h.2.w", "h.1.b", "head"])
    {'h.{0..2}.w': 3, 'h.1.b': 1, 'head': 1}
    """
    # Distinct names may have one number: 1 and 01. Those keep their texts.
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for name in names:
        parts = _NUMBER.split(name)
        groups.setdefault(tuple(parts[::2]), []).append(parts[1::2])
    found: dict[str, int] = {}
    for texts, rows in groups.items():
        for row, count in _merged([tuple((number,) for number in row) for row in rows]).items():
            spans = [_span(column) for column in row]
            text = "".join(a + b for a, b in zip(texts, [*spans, ""], strict=True))
            found[text] = found.get(text, 0) + count
    return found


def _merged(rows: list[_Row]) -> dict[_Row, int]:
    """Merge rows that differ in one column only, column by column."""
    merged = dict.fromkeys(rows, 1)
    for column in range(len(rows[0])):
        alike: dict[_Row, list[_Row]] = {}
        for row in merged:
            alike.setdefault((*row[:column], *row[column + 1 :]), []).append(row)
        merged = {
            (
                *rest[:column],
                tuple(number for row in group for number in row[column]),
                *rest[column:],
            ): sum(merged[row] for row in group)
            for rest, group in alike.items()
        }
    return merged


def _span(texts: tuple[str, ...]) -> str:
    """Return ``{0..3,7}`` for some numbers, or the only one."""
    if len(texts) == 1:
        return texts[0]
    padded = any(text != "0" and text.startswith("0") for text in texts)
    pieces = list(texts) if padded else list(_runs(sorted(map(int, texts))))
    more = len(pieces) - _PIECES
    return f"{{{','.join(pieces[:_PIECES])}{',...' if more > 0 else ''}}}"


def _runs(numbers: list[int]) -> Iterator[str]:
    start = numbers[0]
    for number, following in pairwise([*numbers, None]):
        if number is not None and following != number + 1:
            few = range(start, number + 1)
            yield f"{start}..{number}" if len(few) > 2 else ",".join(map(str, few))  # noqa: PLR2004 # a run
            if following is not None:
                start = following
