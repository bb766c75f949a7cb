"""A comparison in words."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from gradsurgeon.comparison.findings import Answer, Tensor
from gradsurgeon.comparison.tolerance import BOUND
from gradsurgeon.errors import printable, shorten_names
from gradsurgeon.planning.table import abridged, count
from gradsurgeon.report.tables import Table

_COLUMNS, _STEPS = 100, 8


def verdict(answer: Answer) -> str:
    """Return the answer in one sentence."""
    largest = answer.largest
    tensors = count(sum(step.compared for step in answer.steps), "tensor")
    of = f"{tensors} of {count(len(answer.steps), 'step')}"
    if answer.first:
        first = answer.first[0]
        where = f"step {answer.step}, {answer.phase}: {printable(first.text)}"
        if answer.tolerance.kind == "exact" and first.distance <= _small(answer):
            ask = "record noise runs to tell whether it is more than rounding"
            return f"They are not equal bit for bit: first at {where}; {ask}."
        if answer.tolerance.kind == "rounded-away":
            return f"They part at {where}; the noise of the noise runs rounded away, so that may be rounding."
        return f"They part at {where}."
    if largest is None:
        return "Nothing can be said: rounding decides every tensor."
    said = f"They are equal bit for bit in {of}"
    if answer.tolerance.kind != "exact":
        share = f"{largest.distance / largest.tolerance:.2g} of its tolerance"
        where = f"{printable(largest.text)}, step {largest.step}"
        said = f"They agree within rounding in {of}: the largest distance is {share} ({where})"
    if others := len(answer.undecided):
        said += f"; rounding decides {others:,} others, which say nothing"
    if answer.alike:
        return f"{said}."
    only = shorten_names([*answer.only_run, *answer.only_reference])
    return f"They have other parameters: {only}. {said}, of those that both have."


def _small(answer: Answer) -> float:
    """Return the distance that rounding alone can make."""
    return max(BOUND, float(answer.pairs.cells["floor"].max()))


def lines(answer: Answer) -> Iterator[str]:
    """Yield the answer: the verdict, the border, what modules add, how it goes on, what was compared."""
    yield verdict(answer)
    yield f"run {printable(answer.run)}, reference {printable(answer.reference)}"
    for told, names in (("run", answer.only_run), ("reference", answer.only_reference)):
        if names:
            yield f"only in the {told}: {abridged(names, {})}"
    if answer.first:
        yield from (_border(answer, answer.first[0]), "")
        for table in _tables(answer):
            yield from (*table.lines(_COLUMNS), "")
    texts = [
        f"tolerance: {answer.tolerance.text}",
        *(f"note: {one}" for one in answer.notes),
    ]
    if answer.undecided:
        number = count(len(answer.undecided), "tensor")
        texts.append(f"rounding decides {number}, not judged: {shorten_names(answer.undecided)}")
    for text in texts:
        yield textwrap.fill(text, _COLUMNS, break_long_words=False, break_on_hyphens=False)


def _border(answer: Answer, first: Tensor) -> str:
    where, other = f"step {first.step}, {first.phase}", f"the {printable(first.text)}"
    far = first.why or f"distance {first.distance:.2g}, tolerance {first.tolerance:.2g}"
    if answer.inside:
        before = f"the input of {printable(answer.inside)} agrees"
        other = "its output" if answer.inside == first.name else other
    elif not answer.last:
        remedy = "; look at the data and at the first weights" if first.phase == "forward" else ""
        return f"{where}: {other} does not agree: {far}{remedy}"
    elif answer.last[-1].step < first.step:
        before = f"all of step {answer.last[-1].step} agrees"
    else:
        before = f"the {printable(answer.last[-1].text)} agrees"
    return f"{where}: {before}, {other} does not: {far}"


def _tables(answer: Answer) -> Iterator[Table]:
    tensors = [(one, "agrees") for one in answer.last]
    tensors += [(one, "parts") for one in answer.first]
    rows = [
        (f"{one.step}", printable(one.text), one.why or f"{one.distance:.2g}", f"{one.tolerance:.2g}", word)
        for one, word in tensors
    ]  # fmt: skip
    head = ("step", "tensor", "distance", "tolerance", "")
    yield Table("the border, in the order of execution", head, rows, frozenset({0, 2, 3}))
    if answer.modules:
        added = [
            (printable(one.name), f"{one.came_in:.2g}", f"{one.went_out:.2g}")
            for one in answer.modules
        ]
        heads = ("module", "distance of its input", "of its output")
        title = f"modules that add to the difference in step {answer.step}"
        yield Table(title, heads, added, frozenset({1, 2}))
    steps = [one for one in answer.steps if one.step >= (answer.step or 0)]
    shown = min(_STEPS, len(steps))
    steps = [steps[place * (len(steps) - 1) // max(1, shown - 1)] for place in range(shown)]
    numbers = [
        (f"{one.step}", f"{one.apart:,} of {one.compared:,}", f"{one.median:.2g}", f"{one.largest:.2g}")
        for one in steps
    ]  # fmt: skip
    title = f"how it goes on{answer.growth and f': the difference {answer.growth}'}"
    columns = ("step", "tensors apart", "their median distance", "largest")
    yield Table(title, columns, numbers, frozenset(range(4)))
