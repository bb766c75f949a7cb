"""Tables for people: aligned columns, counted nouns, and many names in a few words."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence

from gradsurgeon.common._grouping import grouped
from gradsurgeon.errors import printable, shorten_names

_SHOWN = 6
NOUNS = {"params": "parameter", "modules": "module", "tensors": "tag"}

_NUMBER = re.compile(r"(?<![0-9])([0-9]{1,18})(?![0-9])")


def count(number: int, noun: str) -> str:
    if number == 1:
        return f"{number:,} {noun}"
    return f"{number:,} {noun}s"


def grid(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = []
        for number, cell in enumerate(row):
            align = ">" if number in right else "<"
            cells.append(f"{cell:{align}{widths[number]}}")
        yield "  " + "  ".join(cells).rstrip()


def abridged(names: Sequence[str], aliases: dict[str, tuple[str, ...]]) -> str:
    """Return the names with runs of equal layers folded: ``h.{0..11}.attn.weight``."""
    shown = []
    for text, members in fold_names(names).items():
        tied: list[str] = []
        for name in members:
            tied += aliases.get(name, ())
        shown_text = printable(text)
        if tied:
            shown_text += f" (tied to {shorten_names(tied)})"
        shown.append(shown_text)
    more = len(shown) - _SHOWN
    if more > 0:
        return f"{', '.join(shown[:_SHOWN])}, and {more} more"
    return ", ".join(shown)


def fold_names(names: Iterable[str]) -> dict[str, list[str]]:
    """Return short texts for all names, each with its names. A text covers existing names only.

    >>> fold_names(["h.0.w", "h.1.w", "h.2.w", "h.1.b"])
    {'h.{0..2}.w': ['h.0.w', 'h.1.w', 'h.2.w'], 'h.1.b': ['h.1.b']}
    """
    folded: dict[str, list[str]] = {}
    for texts, alike in grouped(dict.fromkeys(names), _texts_of).items():
        rows = {tuple(_NUMBER.findall(name)): name for name in alike}
        groups = [list(rows)]
        combinations = math.prod(len(set(numbers)) for numbers in zip(*rows, strict=True))
        if combinations != len(rows):
            # Not all combinations are there: the first number alone is folded.
            groups = list(grouped(rows, lambda row: row[1:]).values())
        for group in groups:
            columns = [list(dict.fromkeys(column)) for column in zip(*group, strict=True)]
            members = [rows[numbers] for numbers in group]
            folded.setdefault(_joined(texts, columns), []).extend(members)
    return folded


def _texts_of(name: str) -> tuple[str, ...]:
    """Return the texts between the numbers of a name."""
    return tuple(_NUMBER.split(name)[::2])


def _joined(texts: Sequence[str], columns: Sequence[Sequence[str]]) -> str:
    text = texts[0]
    for numbers, between in zip(columns, texts[1:], strict=True):
        text += _range(numbers) + between
    return text


def _range(texts: Sequence[str]) -> str:
    """Return ``{0..3}`` for consecutive numbers, ``{0,2,7}`` for others, or the only one."""
    if len(texts) == 1:
        return texts[0]
    pieces = sorted(texts, key=int)
    first = int(pieces[0])
    if pieces == [str(first + place) for place in range(len(pieces))]:
        return f"{{{pieces[0]}..{pieces[-1]}}}"
    return f"{{{','.join(pieces)}}}"
