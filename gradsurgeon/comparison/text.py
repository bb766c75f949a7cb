"""A comparison in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gradsurgeon.errors import printable, shorten_names
from gradsurgeon.planning.table import abridged, count
from gradsurgeon.report.tables import Table

if TYPE_CHECKING:
    from gradsurgeon.comparison.comparison import Comparison
    from gradsurgeon.comparison.findings import Step

_COLUMNS = 100
_STEPS = 8


def verdict(comparison: Comparison) -> str:
    """Return the answer in one sentence."""
    largest = comparison.largest
    tensors = count(sum(step.compared for step in comparison.steps), "tensor")
    steps = count(len(comparison.steps), "step")
    if comparison.first:
        where = f"step {comparison.step}, {comparison.phase}"
        return f"They part at {where}: {printable(comparison.first[0].text)}."
    if largest is None:
        return "Nothing can be said: rounding decides every tensor."
    if comparison.tolerance.kind == "exact":
        said = f"They are equal bit for bit in {tensors} of {steps}"
    else:
        ratio = largest.distance / largest.tolerance
        said = (
            f"They agree within rounding in {tensors} of {steps}: the largest distance is {ratio:.2g} of what "
            f"is allowed ({printable(largest.text)}, step {largest.step})"
        )
    if not comparison.alike:
        only = [*comparison.only_run, *comparison.only_reference]
        return f"They differ in their parameters ({shorten_names(only)}). {said} that both have."
    return f"{said}."


def lines(comparison: Comparison) -> Iterator[str]:
    """Yield the answer: the verdict, the border, what modules add, how it goes on, what was compared."""
    yield verdict(comparison)
    yield f"run {printable(comparison.run)}, reference {printable(comparison.reference)}"
    if comparison.first:
        yield _border(comparison)
        yield ""
        yield from _tensors(comparison)
    for told, names in (("run", comparison.only_run), ("reference", comparison.only_reference)):
        if names:
            yield f"only in the {told}: {abridged(names, {})}"
    if comparison.modules:
        yield ""
        yield from _modules(comparison)
    if comparison.first:
        yield ""
        yield from _steps(comparison)
    yield ""
    yield f"tolerance: {comparison.tolerance.text}"
    if comparison.undecided:
        number, names = len(comparison.undecided), shorten_names(comparison.undecided)
        yield f"rounding decides {count(number, 'tensor')} in some step, which say nothing: {names}"
    yield from (f"note: {note}" for note in comparison.notes)


def _border(comparison: Comparison) -> str:
    first = comparison.first[0]
    where = f"step {comparison.step}, {comparison.phase}"
    far = first.why or f"distance {first.distance:.2g}, tolerance {first.tolerance:.2g}"
    text = printable(first.text)
    if comparison.inside and first.tensor == "output" and comparison.inside == first.name:
        return f"{where}: the input of {printable(first.name)} agrees, its output does not: {far}"
    if comparison.inside:
        inside = printable(comparison.inside)
        return f"{where}: the input of {inside} agrees, the {text} does not: {far}"
    if comparison.last and comparison.last[-1].step == first.step:
        last = printable(comparison.last[-1].text)
        return f"{where}: the {last} agrees, the {text} does not: {far}"
    before = f"all of step {comparison.last[-1].step} agrees" if comparison.last else ""
    return f"{where}: {before or 'no tensor before it was compared'}, the {text} does not agree: {far}"


def _tensors(comparison: Comparison) -> Iterator[str]:
    rows = [
        (f"{one.step}", printable(one.text), one.why or f"{one.distance:.2g}", f"{one.tolerance:.2g}", word)
        for tensors, word in ((comparison.last, "agrees"), (comparison.first, "parts"))
        for one in tensors
    ]  # fmt: skip
    head = ("step", "tensor", "distance", "tolerance", "")
    table = Table("the border, in the order of execution", head, rows, frozenset({0, 2, 3}))
    yield from table.lines(_COLUMNS)


def _modules(comparison: Comparison) -> Iterator[str]:
    rows = [
        (printable(one.name), f"{one.came_in:.2g}", f"{one.went_out:.2g}")
        for one in comparison.modules
    ]
    title = f"modules that add to the difference in step {comparison.step}"
    head = ("module", "distance in", "distance out")
    yield from Table(title, head, rows, frozenset({1, 2})).lines(_COLUMNS)


def _steps(comparison: Comparison) -> Iterator[str]:
    shown = _some([one for one in comparison.steps if one.step >= (comparison.step or 0)])
    rows = [
        (f"{one.step}", f"{one.apart:,} of {one.compared:,}", f"{one.median:.2g}", f"{one.largest:.2g}")
        for one in shown
    ]  # fmt: skip
    told = {"grows": ": it grows", "stays": ": it stays", "shrinks": ": it shrinks", "": ""}
    head = ("step", "tensors apart", "median distance", "largest distance")
    title = f"how it goes on{told[comparison.growth]}"
    yield from Table(title, head, rows, frozenset({0, 1, 2, 3})).lines(_COLUMNS)


def _some(items: Sequence[Step]) -> list[Step]:
    """Return at most so many items, with the first and the last, evenly spread."""
    if len(items) <= _STEPS:
        return list(items)
    return [items[place * (len(items) - 1) // (_STEPS - 1)] for place in range(_STEPS)]
