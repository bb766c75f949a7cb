"""Where two runs part: the result of a comparison, as plain values. Needs numpy."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any

from gradsurgeon.errors import printable, shorten_names
from gradsurgeon.language.planning.table import abridged, count
from gradsurgeon.report.comparison import findings
from gradsurgeon.report.comparison.alignment import align
from gradsurgeon.report.comparison.limits import carry_on
from gradsurgeon.report.comparison.pairs import Pair, texts_of
from gradsurgeon.report.comparison.reading import Reading
from gradsurgeon.report.comparison.tolerance import AUTOCAST, BOUND, Tolerance
from gradsurgeon.report.tables import Table

VERSION = 1
_COLUMNS = 100
_STEPS = 8
_MAY_BE_ROUNDING = "; this may be rounding, which noise runs would tell"
# The JSON gives these attributes in another form.
_APART = ("pairs", "alike", "others")
_OF_A_TENSOR = [
    "name",
    "tensor",
    "step",
    "phase",
    "micro_batch",
    "call",
    "rank",
    "distance",
    "tolerance",
    "why",
    "text",
]


@dataclass(frozen=True)
class Comparison:
    """Where a run parts from a reference. ``print`` shows it in words.

    Attributes:
        alike: whether the runs agree, which rounding may leave open: then it is `False`, and ``largest`` is `None`.
        run: the directory of the run.
        reference: the directory of the reference.
        step: the first step in which they part, `None` if they do not.
        phase: where in the step: ``"forward"``, ``"backward"``, ``"gradient"`` or ``"update"``.
        inside: the innermost module around the first difference whose input agrees.
        last: the last tensors that agree, each with name, distance and tolerance.
        first: the first tensors that do not, in the order of execution.
        modules: the modules that add to the difference in that forward pass.
        steps: how many tensors are apart in each step, and how far.
        growth: whether the distance ``"grows"``, ``"stays"`` or ``"shrinks"`` by the last step, if known.
        largest: the tensor whose distance is the most times its tolerance, `None` if rounding decides all.
        only_run: names that only the run has. Parameters among them make the runs differ.
        only_reference: names that only the reference has.
        undecided: tensors that rounding decides in some step, so that they say nothing there.
        tolerance: how tolerances came about.
        notes: what else a reader has to know.
        model: the name of the model, empty if the runs have one each.
        others: the comparisons of the other models, if the runs have several. This one parts first.
    """

    alike: bool
    run: str
    reference: str
    step: int | None
    phase: str
    inside: str
    last: tuple[Pair, ...]
    first: tuple[Pair, ...]
    modules: tuple[findings.ModuleDifference, ...]
    steps: tuple[findings.StepDifference, ...]
    growth: str
    largest: Pair | None
    only_run: tuple[str, ...]
    only_reference: tuple[str, ...]
    undecided: tuple[str, ...]
    tolerance: Tolerance
    notes: tuple[str, ...]
    pairs: tuple[Pair, ...] = field(repr=False, compare=False)
    model: str = ""
    others: tuple[Comparison, ...] = ()

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `gradsurgeon compare --format json`; ``None`` stands for an infinite distance."""
        content: dict[str, Any] = {"version": VERSION, "alike": self.alike}
        content["verdict"] = _verdict(self)
        for attribute in fields(self):
            name = attribute.name
            if name not in _APART:
                content[name] = _plain(getattr(self, name))
        content["others"] = [other.to_dict() for other in self.others]
        return content


def _plain(value: Any) -> Any:
    """Return a value of a comparison as JSON has it."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Pair):
        return {key: _plain(getattr(value, key)) for key in _OF_A_TENSOR}
    if not isinstance(value, tuple):
        return value
    elements = [_plain(element) for element in value]
    if hasattr(value, "_fields"):
        return dict(zip(value._fields, elements, strict=True))
    return elements


def compared(run: Reading, reference: Reading, noise: Sequence[Reading]) -> Comparison:
    pairs, tolerance, notes = align(run, reference, noise)
    carry_on(pairs, tolerance)
    only_run = _only(run, reference)
    only_reference = _only(reference, run)
    has_other_params = any({**only_run, **only_reference}.values())
    decided = [pair for pair in pairs if not pair.is_undecided]
    # `None` if rounding decides all.
    largest = max(decided, key=attrgetter("ratio"), default=None)
    last, first = findings.border_of(pairs)
    inside = ""
    modules: list[findings.ModuleDifference] = []
    if first and first[0].phase == "forward":
        inside = findings.inside_of(pairs, first[0])
        modules = findings.modules_of(pairs, first[0])
    all_steps = run.steps | reference.steps
    for repetition in noise:
        all_steps |= repetition.steps
    steps = tuple(findings.steps_of(pairs))
    lost = len(all_steps) - len(steps)
    if lost:
        notes.append(f"{lost} of {len(all_steps)} steps are not in all runs")
    undecided = texts_of(pair for pair in pairs if pair.is_undecided)
    for pair in (*last, *first, largest):
        if pair is not None:
            pair.text = findings.text_of(pairs, pair)
    return Comparison(
        alike=not first and largest is not None and not has_other_params,
        run=run.path,
        reference=reference.path,
        step=first[0].step if first else None,
        phase=first[0].phase if first else "",
        inside=inside,
        last=tuple(last),
        first=tuple(first),
        modules=tuple(modules),
        steps=steps,
        growth=findings.growth_of(steps),
        largest=largest,
        only_run=tuple(only_run),
        only_reference=tuple(only_reference),
        undecided=tuple(undecided),
        tolerance=tolerance,
        notes=tuple(notes),
        pairs=tuple(pairs),
    )


def of_models(
    comparisons: Sequence[Comparison], only_run: Sequence[str], only_reference: Sequence[str]
) -> Comparison:
    """Return the comparison of the model that parts first, with those of the others."""
    are_all_in_both = not only_run and not only_reference
    if len(comparisons) == 1 and are_all_in_both:
        return replace(comparisons[0], model="")
    first = min(comparisons, key=_begins)
    others = [comparison for comparison in comparisons if comparison is not first]
    models_of_run = [f"model {name}" for name in only_run]
    models_of_reference = [f"model {name}" for name in only_reference]
    return replace(
        first,
        alike=are_all_in_both and all(comparison.alike for comparison in comparisons),
        only_run=(*first.only_run, *models_of_run),
        only_reference=(*first.only_reference, *models_of_reference),
        others=tuple(others),
    )


def _begins(comparison: Comparison) -> tuple[float, ...]:
    """Return a key by which the model that parts first comes first, and models that agree last.

    In one step, a difference that begins with a gradient or an update is the model's own. A difference that begins with
    the first input or an output gradient came from elsewhere, such as another model, and has become smaller.
    """
    if not comparison.first:
        return math.inf, float(comparison.alike)
    first = comparison.first[0]
    is_first_input = first.tensor.startswith("input") and not comparison.inside
    doubt = 0
    if comparison.phase == "backward" or is_first_input:
        doubt = 2
    elif comparison.phase == "forward":
        doubt = 1
    return first.step, doubt, -first.distance


def _only(run: Reading, other: Reading) -> dict[str, bool]:
    """Return the names that one run alone has, and whether they are of parameters."""
    are_params = {}
    for kind in run.bound.keys() & other.bound.keys():
        for name in sorted(run.bound[kind].keys() - other.bound[kind].keys()):
            are_params[name] = not kind.of_modules
    return are_params


def _verdict(comparison: Comparison) -> str:
    sentence = _sentence(comparison)
    if comparison.model:
        return f"{printable(comparison.model)}: {sentence}"
    return sentence


def _sentence(comparison: Comparison) -> str:
    if comparison.first:
        first = comparison.first[0]
        place = f"step {comparison.step}, {comparison.phase}"
        doubt = _doubt(comparison, first.distance)
        return f"They part at {place}: {printable(first.text)}{doubt}."
    largest = comparison.largest
    if largest is None:
        return "Nothing can be said: rounding decides every tensor."
    tensors = 0
    for step in comparison.steps:
        tensors += step.compared
    where = f"in {count(tensors, 'tensor')} of {count(len(comparison.steps), 'step')}"
    end = "." if comparison.alike else ", but have other parameters."
    is_measured = comparison.tolerance.kind != "rounding"
    if not is_measured and not any(pair.distance for pair in comparison.pairs):
        return f"They are equal bit for bit {where}{end}"
    share = f"{largest.distance / largest.tolerance:.2g} of its tolerance"
    place = f"{printable(largest.text)}, step {largest.step}"
    return f"They agree within rounding {where}: the largest distance is {share} ({place}){end}"


def _doubt(comparison: Comparison, distance: float) -> str:
    """Return what to add where rounding may explain the first difference."""
    kind = comparison.tolerance.kind
    if kind == "rounded-away":
        return _MAY_BE_ROUNDING
    if kind != "rounding":
        return ""
    bound = max(BOUND, *(pair.floor for pair in comparison.pairs))
    if distance <= bound:
        return _MAY_BE_ROUNDING
    if distance <= AUTOCAST:
        return "; under autocast this may be rounding, which noise runs would tell"
    return ""


def _lines(comparison: Comparison) -> Iterator[str]:
    yield _verdict(comparison)
    yield f"run {printable(comparison.run)}, reference {printable(comparison.reference)}"
    for other in comparison.others:
        yield _verdict(other)
    if comparison.only_run:
        yield f"only in the run: {abridged(comparison.only_run, {})}"
    if comparison.only_reference:
        yield f"only in the reference: {abridged(comparison.only_reference, {})}"
    if comparison.first:
        yield _border(comparison, comparison.first[0])
        yield ""
        for table in _tables(comparison):
            yield from table.lines(_COLUMNS)
            yield ""
    texts = [f"tolerance: {comparison.tolerance.text}"]
    texts += [f"note: {note}" for note in comparison.notes]
    undecided = comparison.undecided
    if undecided:
        number = count(len(undecided), "tensor")
        texts.append(f"rounding decides {number}, not judged: {shorten_names(undecided)}")
    for text in texts:
        yield textwrap.fill(text, _COLUMNS, break_long_words=False, break_on_hyphens=False)


def _border(comparison: Comparison, first: Pair) -> str:
    """Return the sentence on the border: what agrees, what does not, and how far it is apart."""
    agrees = ""
    if comparison.inside:
        agrees = f"the input of {printable(comparison.inside)} agrees"
    elif comparison.last:
        agrees = f"the {printable(comparison.last[-1].text)} agrees"
    parts = f"the {printable(first.text)} does not"
    text = f"{agrees}, {parts}" if agrees else f"{parts} agree"
    reason = first.why
    if not reason:
        reason = f"distance {first.distance:.2g}, tolerance {first.tolerance:.2g}"
    return f"step {first.step}, {first.phase}: {text}: {reason}"


def _tables(comparison: Comparison) -> Iterator[Table]:
    yield _border_table(comparison)
    if comparison.modules:
        rows = [_cells(*module) for module in comparison.modules]
        head = ("module", "distance of its input", "of its output")
        title = f"modules that add to the difference in step {comparison.step}"
        yield Table(title, head, rows, frozenset({1, 2}))
    yield _steps_table(comparison)


def _border_table(comparison: Comparison) -> Table:
    rows = []
    for tensors, word in ((comparison.last, "agrees"), (comparison.first, "parts")):
        for tensor in tensors:
            distance = tensor.why or tensor.distance
            rows.append(_cells(tensor.step, tensor.text, distance, tensor.tolerance, word))
    head = ("step", "tensor", "distance", "tolerance", "")
    return Table("the border, in the order of execution", head, rows, frozenset({0, 2, 3}))


def _steps_table(comparison: Comparison) -> Table:
    start = comparison.step or 0
    steps = [step for step in comparison.steps if step.step >= start]
    every = -(-len(steps) // _STEPS)
    rows = []
    for step in steps[::every]:
        apart = f"{step.apart:,} of {step.compared:,}"
        rows.append(_cells(step.step, apart, step.median, step.largest))
    title = "how it goes on"
    if comparison.growth:
        title += f": the difference {comparison.growth}"
    head = ("step", "tensors apart", "their median distance", "largest")
    return Table(title, head, rows, frozenset(range(4)))


def _cells(*values: object) -> list[str]:
    cells = []
    for value in values:
        text = f"{value:.2g}" if isinstance(value, float) else str(value)
        cells.append(printable(text))
    return cells
