"""Tables for people: aligned columns, counted nouns, and many names in a few words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from gradsurgeon.errors import printable

_SHOWN = 6
_TIED_SHOWN = 2
NOUNS = {"params": "parameter", "modules": "module", "tensors": "tag"}


def count(number: int, noun: str) -> str:
    """Return ``3 rules`` or ``1 rule``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def grid(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> Iterator[str]:
    """Yield lines with the cells of each column aligned, those in ``right`` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()


def abridged(names: Sequence[str], aliases: dict[str, tuple[str, ...]]) -> str:
    """Return the names with runs of equal layers folded: ``h.{0..11}.attn.weight``."""
    folded: dict[str, list[str]] = {}
    for name in names:
        folded.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    shown = []
    for group in folded.values():
        text = group[0] if len(group) == 1 else _range(group)
        tied = [alias for name in group for alias in aliases.get(name, ())]
        ellipsis = ", ..." if len(tied) > _TIED_SHOWN else ""
        suffix = f" (tied to {', '.join(tied[:_TIED_SHOWN])}{ellipsis})" if tied else ""
        shown.append(printable(text + suffix))
    more = len(shown) - _SHOWN
    return ", ".join(shown[:_SHOWN]) + (f", and {more} more" if more > 0 else "")


def _range(group: Sequence[str]) -> str:
    """Return one pattern-like text for names that differ in their numbers only."""
    numbers = [[int(number) for number in re.findall(r"\d+", name)] for name in group]
    columns = iter(list(zip(*numbers, strict=True)))

    def span(_: re.Match[str]) -> str:
        values = sorted(set(next(columns)))
        if len(values) == 1:
            return str(values[0])
        whole = values == list(range(values[0], values[-1] + 1))
        inner = f"{values[0]}..{values[-1]}" if whole else ",".join(map(str, values[:4]))
        return f"{{{inner}{'' if whole or len(values) <= 4 else ',...'}}}"  # noqa: PLR2004 # as above

    return re.sub(r"\d+", span, group[0])
