"""What a trap reports of tensors that are not finite, as a person reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradsurgeon import _dist
from gradsurgeon.errors import printable
from gradsurgeon.runtime.activation_flags import Flag
from gradsurgeon.runtime.measure import NonfiniteCount

_SHOWN = 12
_PARTS = "a part is where a rank keeps its share of the sum: any rank may have added it"


@dataclass(frozen=True, slots=True)
class TrapReport:
    """The report of a trap, without what becomes of the step.

    Attributes:
        name: the first tensor that is not finite.
        head: the first line.
        lines: those after the line on what becomes of the step.
        ranks: where the first tensor became non-finite; empty where that is not known.
        expect: what an update that goes on all the same has to expect.
        reduced: whether ranks make the tensors together, so that another one can be the cause.
    """

    name: str
    head: str
    lines: list[str]
    ranks: tuple[int, ...] = ()
    expect: str = ": expect non-finite weights"
    reduced: bool = True

    def caused_by(self, ranks: tuple[int, ...]) -> TrapReport:
        """Return the same with the ranks that contributed what is not finite, if they are known."""
        if not (ranks and self.reduced):
            return self
        cause = f"{_dist.named(ranks)} contributed what is not finite"
        return replace(self, head=f"{self.head}; {cause}", ranks=ranks)


@dataclass(frozen=True, slots=True)
class GradientReport:
    """Which gradients were finite and which were not, in the order in which backward made them.

    Attributes:
        moment: when they were seen so.
        order: the tensors, as backward delivered them.
        bad: those that are not finite.
        norms: of them, as far as they are known.
    """

    moment: str
    order: tuple[int, ...]
    bad: dict[int, NonfiniteCount]
    norms: dict[int, float]

    def finding(self, names: Sequence[str]) -> TrapReport:
        head = f"{len(self.bad)} of {len(self.order)} gradients are not finite {self.moment}"
        labels = [printable(names[tensor]) for tensor in self.order]
        first = next(place for place, tensor in enumerate(self.order) if tensor in self.bad)
        culprit = self.order[first]
        width = max(map(len, labels))
        rows = [
            self._row(tensor, label.ljust(width))
            for tensor, label in zip(self.order, labels, strict=True)
        ]
        lines = ["in the order in which backward produced them:", *_window(rows, first)]
        lines.append(self._advice(labels, first))
        ranks = self.bad[culprit].ranks
        if ranks:
            lines.append(_PARTS)
        return TrapReport(names[culprit], head, lines, ranks)

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

    def _advice(self, labels: Sequence[str], first: int) -> str:
        culprit = labels[first]
        if first > 0:
            return (
                f"the border lies between {labels[first - 1]} (still finite) and {culprit} "
                "(first that is not)"
            )
        reached = f"{culprit} is the first that backward reached and already non-finite"
        if len(self.bad) < len(self.order):
            return f"{reached}: look at the loss and at what comes after this layer in the forward pass"
        # What is not finite anywhere in the forward pass reaches the loss, and so every gradient.
        return (
            f"{reached}, as is all that came after it: look at the inputs of the model, at its weights, "
            "and at the loss, any of which can be what is not finite"
        )


def threshold_report(
    stat: str, names: Sequence[str], values: Sequence[float], tripped: Sequence[bool]
) -> TrapReport:
    """Tell which gradients a trap refuses for a statistic of theirs."""
    width = max(len(printable(name)) for name in names)
    rows = [
        f"  {'> refused' if bad else '  let pass'}  {printable(name).ljust(width)}  {stat} {value:.3g}"
        for name, value, bad in zip(names, values, tripped, strict=True)
    ]
    first = tripped.index(True)
    head = f"{sum(tripped)} of {len(names)} gradients are refused for their {stat}"
    lines = ["in the order of the model:", *_window(rows, first)]
    return TrapReport(names[first], head, lines, expect="", reduced=False)


def activation_report(flags: Sequence[tuple[Flag, int]]) -> TrapReport:
    """Return the report on module tensors and tags: flags in order, with non-finite elements counted."""
    bad = [place for place, (_, count) in enumerate(flags) if count]
    rows = [
        f"  > non-finite  the {flag.what} of {printable(flag.name)}  {count:,} elements"
        if count
        else f"    finite      the {flag.what} of {printable(flag.name)}"
        for flag, count in flags
    ]
    first = flags[bad[0]][0]
    head = f"{len(bad)} of {len(flags)} tensors are not finite"
    last = f"the first that is not finite is the {first.what} of {printable(first.name)}"
    lines = ["in the order in which they came:", *_window(rows, bad[0]), last]
    return TrapReport(first.name, head, lines, reduced=False)


def _window(rows: list[str], first: int) -> list[str]:
    """Return the rows around the first bad one; what is left out is counted."""
    if len(rows) <= _SHOWN:
        return rows
    start = max(0, min(first - _SHOWN // 2, len(rows) - _SHOWN))
    stop = start + _SHOWN
    above = [f"    ... {start} more before"] if start else []
    below = [f"    ... {len(rows) - stop} more after"] if stop < len(rows) else []
    return [*above, *rows[start:stop], *below]
