"""Tables for people: aligned columns, counted nouns, and many names in a few words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradsurgeon._name_ranges import fold_names
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
    shown = []
    for text, members in fold_names(names).items():
        tied = [alias for name in members for alias in aliases.get(name, ())]
        ellipsis = ", ..." if len(tied) > _TIED_SHOWN else ""
        suffix = f" (tied to {', '.join(tied[:_TIED_SHOWN])}{ellipsis})" if tied else ""
        shown.append(printable(text + suffix))
    more = len(shown) - _SHOWN
    return ", ".join(shown[:_SHOWN]) + (f", and {more} more" if more > 0 else "")
