"""Tables for people: aligned columns, counted nouns, and many names in a few words."""

import re
from collections.abc import Iterable, Iterator, Sequence

from gradsurgeon.errors import printable, shorten_names

_SHOWN = 6
NOUNS = {"params": "parameter", "modules": "module", "tensors": "tag"}

_NUMBER = re.compile(r"(?<![0-9])([0-9]{1,18})(?![0-9])")
_MAX_PIECES = 6  # of a list of numbers with gaps

_Row = tuple[tuple[str, ...], ...]  # for each position of a number, all its values


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def grid(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()


def abridged(names: Sequence[str], aliases: dict[str, tuple[str, ...]]) -> str:
    """Return the names with runs of equal layers folded: ``h.{0..11}.attn.weight``."""
    shown = []
    for text, members in fold_names(names).items():
        tied = [alias for name in members for alias in aliases.get(name, ())]
        shown.append(printable(text) + f" (tied to {shorten_names(tied)})" * bool(tied))
    more = len(shown) - _SHOWN
    return ", ".join(shown[:_SHOWN]) + (f", and {more} more" if more > 0 else "")


def fold_names(names: Iterable[str]) -> dict[str, list[str]]:
    """Return short texts for all names, each with its names. A text covers existing names only.

    >>> fold_names(["h.0.w", "h.1.w", "h.2.w", "h.1.b"])
    {'h.{0..2}.w': ['h.0.w', 'h.1.w', 'h.2.w'], 'h.1.b': ['h.1.b']}
    """
    # By the texts between the numbers.
    groups: dict[tuple[str, ...], dict[_Row, list[str]]] = {}
    for name in names:
        parts = _NUMBER.split(name)
        numbers = tuple((number,) for number in parts[1::2])
        groups.setdefault(tuple(parts[::2]), {})[numbers] = [name]
    folded: dict[str, list[str]] = {}
    for texts, rows in groups.items():
        for row, members in _merge(rows, columns=len(texts) - 1).items():
            ranges = [*map(_range, row), ""]
            text = "".join(a + b for a, b in zip(texts, ranges, strict=True))
            # Distinct names may have equal numbers: 1 and 01.
            folded.setdefault(text, []).extend(members)
    return folded


def _merge(rows: dict[_Row, list[str]], columns: int) -> dict[_Row, list[str]]:
    for column in range(columns):
        alike: dict[_Row, list[_Row]] = {}
        for row in rows:
            alike.setdefault((*row[:column], *row[column + 1 :]), []).append(row)
        rows = {
            (*rest[:column], tuple(n for row in group for n in row[column]), *rest[column:]): [
                name for row in group for name in rows[row]
            ]
            for rest, group in alike.items()
        }
    return rows


def _range(texts: tuple[str, ...]) -> str:
    """Return ``{0..3}`` for consecutive numbers, ``{0,2,7}`` for others, or the only one."""
    if len(texts) == 1:
        return texts[0]
    numbers = sorted(map(int, texts))
    consecutive = numbers[-1] - numbers[0] == len(numbers) - 1
    if consecutive and not any(text != "0" and text.startswith("0") for text in texts):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    pieces = sorted(texts, key=int)
    more = len(pieces) > _MAX_PIECES
    return f"{{{','.join(pieces[:_MAX_PIECES])}{',...' if more else ''}}}"
