"""What the rows of one rule are called, where several optimizers have measured them. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from gradsurgeon.sinks.summary import Measured, joined


class Parts:
    """The series of one rule and statistic, in the order in which they came.

    Optimizers that take turns count their steps each on their own: together they are one norm where all of them
    have the same step. A sum of whatever is there is of nothing, and each has a name of its own then.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, ...], int] = {}
        self._current: set[tuple[str, ...]] = set()

    def meet(self, names: tuple[str, ...]) -> None:
        """Note that a series goes on; one that a tensor has left for it, as the optimizer got more, does not."""
        if names in self._current:
            return
        tensors = set(names)
        self._current = {one for one in self._current if tensors.isdisjoint(one)} | {names}
        self._numbers.setdefault(names, len(self._numbers) + 1)

    def are_current(self, names: tuple[str, ...]) -> bool:
        return names in self._current

    def named(self, rows: Sequence[Measured]) -> list[Measured]:
        """Return the rows of one step as one if it is of all series, else each by a name of its own."""
        if len(self._current) > len(rows) or len({row.step for row in rows}) > 1:
            return [self._part(row) for row in rows]
        return [rows[0] if len(rows) == 1 else joined(rows)]

    def _part(self, row: Measured) -> Measured:
        rule = f"{row.key.rule}/part-{self._numbers[row.key.names]}"
        return row._replace(key=row.key._replace(rule=rule))
