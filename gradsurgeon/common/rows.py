"""Rows of a tensor, and their words. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradsurgeon.errors import printable

_MATRIX = 2
# So many numbers are listed, and more of them as a range.
_FEW = 2
_MOST_NUMBERS = 6


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a tensor that hold its non-finite elements. All indices count from 0.

    Attributes:
        rows: indices in its first dimension, at most 100.
        count: number of these rows.
        size: size of its first dimension.
        columns: indices in its second dimension, if they are few; else empty.
        dims: its number of dimensions.
        input: the input of the model that these rows come from, empty if that is unknown.
        input_dim: the dimension of this input in which ``input_rows`` count.
        input_rows: indices there.
        is_tried: whether the operation was finite in another replay, with other rows of the input instead of these.
        ids: the numbers of these samples, if the script tagged some as ``sample_ids``.
    """

    rows: tuple[int, ...]
    count: int
    size: int
    columns: tuple[int, ...] = ()
    dims: int = 1
    input: str = ""
    input_dim: int = 0
    input_rows: tuple[int, ...] = ()
    is_tried: bool = False
    ids: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.count == self.size:
            text = f"in all {self.size} rows"
        else:
            text = f"all in {_numbered('row', self.rows, self.count)} of {self.size}"
        if self.columns and self.dims == _MATRIX:
            text += f", {_numbered('column', self.columns)}"
        elif self.columns:
            text += f", at {_numbered('index', self.columns)} of dimension 1"
        if self.input:
            text += f", {self._place_in_input} of the input `{printable(self.input)}`"
        if self.ids:
            text += f" (sample_ids {listed(self.ids)})"
        if self.is_tried:
            text += "; the result is finite with "
            text += "another in its place" if len(self.input_rows) == 1 else "others in their place"
        return text

    @property
    def _place_in_input(self) -> str:
        if not self.input_dim and self.input_rows == self.rows:
            return "the same row" if len(self.rows) == 1 else "the same rows"
        if not self.input_dim:
            return _numbered("row", self.input_rows)
        return f"{_numbered('index', self.input_rows)} of dimension {self.input_dim}"


def _numbered(noun: str, numbers: Sequence[int], count: int = 0) -> str:
    """Return ``row 3``, ``rows 3 and 7``, ``rows 4 to 9``, or the first of many."""
    if max(len(numbers), count) == 1:
        return f"{noun} {numbers[0]}"
    plural = "indices" if noun == "index" else f"{noun}s"
    if count > len(numbers) or len(numbers) > _MOST_NUMBERS:
        return f"{max(len(numbers), count)} {plural} ({listed(numbers)})"
    return f"{plural} {listed(numbers)}"


def listed(numbers: Sequence[int]) -> str:
    first, *_, last = (*numbers, numbers[-1])
    if len(numbers) > _FEW and last - first == len(numbers) - 1:
        return f"{first} to {last}"
    if len(numbers) > _MOST_NUMBERS:
        return f"{', '.join(map(str, numbers[:_MOST_NUMBERS]))}, ..."
    if len(numbers) == 1:
        return str(first)
    return f"{', '.join(map(str, numbers[:-1]))} and {last}"
