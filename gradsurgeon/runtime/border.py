"""The border between gradients that are finite and those that are not, as a person reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradsurgeon import _dist
from gradsurgeon.errors import printable
from gradsurgeon.runtime.measure import Count

_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Finding:
    """What a trap has to say: the first culprit, the first line, the lines after the outcome.

    ``ranks`` are those that the culprit came from, where that is known.
    """

    name: str
    head: str
    lines: list[str]
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Border:
    """Which gradients were finite and which were not, in the order in which backward made them.

    Attributes:
        moment: when they were seen so.
        order: the tensors, as backward delivered them.
        bad: those that are not finite.
        norms: of them, as far as they are known.
        ranks: those that contributed what is not finite to an average; empty where that is not known.
    """

    moment: str
    order: tuple[int, ...]
    bad: dict[int, Count]
    norms: dict[int, float]
    ranks: tuple[int, ...] = ()

    @property
    def first(self) -> int:
        """The place in ``order`` of the first that is not finite."""
        return next(place for place, tensor in enumerate(self.order) if tensor in self.bad)

    @property
    def origin(self) -> tuple[int, ...]:
        """The ranks that the first one came from."""
        return self.ranks or self.bad[self.order[self.first]].ranks

    def finding(self, names: Sequence[str], why: str = "") -> Finding:
        """Return what there is to say.

        Args:
            names: of all tensors.
            why: what the first line begins with.
        """
        head = f"{len(self.bad)} of {len(self.order)} gradients are not finite {self.moment}"
        if self.ranks:
            head += f"; {_dist.named(self.ranks)} contributed what is not finite"
        name = names[self.order[self.first]]
        return Finding(name, why + head, self._lines(names), self.origin)

    def _lines(self, names: Sequence[str]) -> list[str]:
        """Return the border line by line, and what to make of it."""
        width = max(len(printable(names[tensor])) for tensor in self.order)
        rows = [self._row(tensor, printable(names[tensor]).ljust(width)) for tensor in self.order]
        head = "in the order in which backward produced them:"
        lines = [head, *window(rows, self.first), self._advice(names)]
        if self.bad[self.order[self.first]].ranks:
            lines.append(
                "a part is where a rank keeps its share of the sum: any rank may have added it"
            )
        return lines

    def _row(self, tensor: int, label: str) -> str:
        bad = self.bad.get(tensor)
        if bad is None:
            norm = self.norms.get(tensor)
            return f"    finite  {label}" + ("" if norm is None else f"  norm {norm:.3g}")
        if not bad.number:
            return f"  > {bad.kind}  {label}"
        part = f", in the part of {_dist.named(bad.ranks)}" if bad.ranks else ""
        plural = "s" if bad.number > 1 else ""
        return f"  > {bad.kind:<6}  {label}  {bad.number:,} element{plural}{part}"

    def _advice(self, names: Sequence[str]) -> str:
        culprit = printable(names[self.order[self.first]])
        if self.first == 0:
            first = f"{culprit} is the first that backward reached and already non-finite"
            if len(self.bad) < len(self.order):
                return f"{first}: look at the loss and at what comes after this layer in the forward pass"
            # What is not finite anywhere in the forward pass reaches the loss, and so every gradient.
            return (
                f"{first}, as is all that came after it: look at the inputs of the model, at its weights, "
                "and at the loss, any of which can be what is not finite"
            )
        last = printable(names[self.order[self.first - 1]])
        return f"the border lies between {last} (still finite) and {culprit} (first that is not)"


def window(rows: list[str], first: int) -> list[str]:
    """Return the rows around the first bad one; what is left out is counted."""
    if len(rows) <= _SHOWN:
        return rows
    start = max(0, min(first - _SHOWN // 2, len(rows) - _SHOWN))
    stop = start + _SHOWN
    above = [f"    ... {start} more before"] if start else []
    below = [f"    ... {len(rows) - stop} more after"] if stop < len(rows) else []
    return [*above, *rows[start:stop], *below]
