"""A comparison in words."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gradsurgeon.errors import printable, shorten_names
from gradsurgeon.planning.table import abridged, count
from gradsurgeon.report.tables import Table

if TYPE_CHECKING:
    from gradsurgeon.comparison.comparison import Comparison
    from gradsurgeon.comparison.findings import Tensor

_COLUMNS, _STEPS = 100, 8


def verdict(comparison: Comparison) -> str:
    """Return the answer in one sentence."""
    largest = comparison.largest
    tensors = count(sum(step.compared for step in comparison.steps), "tensor")
    of = f"{tensors} of {count(len(comparison.steps), 'step')}"
    if comparison.first:
        where = f"step {comparison.step}, {comparison.phase}"
        return f"They part at {where}: {printable(comparison.first[0].text)}."
    if largest is None:
        return "Nothing can be said: rounding decides every tensor."
    said = f"They are equal bit for bit in {of}"
    if comparison.tolerance.kind != "exact":
        share = f"{largest.distance / largest.tolerance:.2g} of its tolerance"
        where = f"{printable(largest.text)}, step {largest.step}"
        said = f"They agree within rounding in {of}: the largest distance is {share} ({where})"
    if comparison.alike:
        return f"{said}."
    only = shorten_names([*comparison.only_run, *comparison.only_reference])
    return f"They have other parameters: {only}. {said}, of those that both have."


def lines(comparison: Comparison) -> Iterator[str]:
    """Yield the answer: the verdict, the border, what modules add, how it goes on, what was compared."""
    yield verdict(comparison)
    yield f"run {printable(comparison.run)}, reference {printable(comparison.reference)}"
    for told, names in (("run", comparison.only_run), ("reference", comparison.only_reference)):
        if names:
            yield f"only in the {told}: {abridged(names, {})}"
    if comparison.first:
        yield from (_border(comparison, comparison.first[0]), "")
        for table in _tables(comparison):
            yield from (*table.lines(_COLUMNS), "")
    texts = [
        f"tolerance: {comparison.tolerance.text}",
        *(f"note: {one}" for one in comparison.notes),
    ]
    if comparison.undecided:
        number = count(len(comparison.undecided), "tensor")
        texts.append(
            f"rounding decides {number}, which say nothing: {shorten_names(comparison.undecided)}"
        )
    for text in texts:
        yield textwrap.fill(text, _COLUMNS, break_long_words=False, break_on_hyphens=False)


def _border(comparison: Comparison, first: Tensor) -> str:
    where, other = f"step {first.step}, {first.phase}", f"the {printable(first.text)}"
    far = first.why or f"distance {first.distance:.2g}, tolerance {first.tolerance:.2g}"
    if comparison.inside:
        before = f"the input of {printable(comparison.inside)} agrees"
        other = "its output" if comparison.inside == first.name else other
    elif not comparison.last:
        before = "nothing comes before it"
    elif comparison.last[-1].step < first.step:
        before = f"all of step {comparison.last[-1].step} agrees"
    else:
        before = f"the {printable(comparison.last[-1].text)} agrees"
    return f"{where}: {before}, {other} does not: {far}"


def _tables(comparison: Comparison) -> Iterator[Table]:
    tensors = [(one, "agrees") for one in comparison.last]
    tensors += [(one, "parts") for one in comparison.first]
    rows = [
        (f"{one.step}", printable(one.text), one.why or f"{one.distance:.2g}", f"{one.tolerance:.2g}", word)
        for one, word in tensors
    ]  # fmt: skip
    head = ("step", "tensor", "distance", "tolerance", "")
    yield Table("the border, in the order of execution", head, rows, frozenset({0, 2, 3}))
    if comparison.modules:
        added = [
            (printable(one.name), f"{one.came_in:.2g}", f"{one.went_out:.2g}")
            for one in comparison.modules
        ]
        head = ("module", "distance of its input", "of its output")
        title = f"modules that add to the difference in step {comparison.step}"
        yield Table(title, head, added, frozenset({1, 2}))
    steps = [one for one in comparison.steps if one.step >= (comparison.step or 0)]
    shown = min(_STEPS, len(steps))
    steps = [steps[place * (len(steps) - 1) // max(1, shown - 1)] for place in range(shown)]
    numbers = [
        (f"{one.step}", f"{one.apart:,} of {one.compared:,}", f"{one.median:.2g}", f"{one.largest:.2g}")
        for one in steps
    ]  # fmt: skip
    title = f"how it goes on{comparison.growth and f': it {comparison.growth}'}"
    head = ("step", "tensors apart", "median distance", "largest")
    yield Table(title, head, numbers, frozenset(range(4)))
