"""Rows of a tensor, and their words. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MOST_NUMBERS = 6


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a tensor that hold its non-finite elements. All indices count from 0.

    Attributes:
        rows: indices in its first dimension.
        size: size of its first dimension.
        columns: of a matrix the columns with these elements, if they are few; else empty.
        input_rows: indices in the first dimension of the model's input, if these rows come from there: in another replay,
            with another row instead, the operation was finite.
        ids: the numbers of these samples, if the script tagged some as ``sample_ids``.
    """

    rows: tuple[int, ...]
    size: int
    columns: tuple[int, ...] = ()
    input_rows: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()

    def __str__(self) -> str:
        text = f"all in {numbered('row', self.rows)} of {self.size}"
        if self.columns:
            text += f", {numbered('column', self.columns)}"
        if self.input_rows:
            text += f", from {numbered('row', self.input_rows)} of the input"
        if self.ids:
            text += f" ({numbered('sample_id', self.ids)})"
        return text


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """Return ``row 3``, ``rows 3 and 7``, or the first of many."""
    shown = list(map(str, numbers[:_MOST_NUMBERS]))
    more = len(numbers) - len(shown)
    if more:
        shown.append(f"{more} more")
    *before, last = shown
    if not before:
        return f"{noun} {last}"
    return f"{noun}s {', '.join(before)} and {last}"
