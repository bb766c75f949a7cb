"""Where two runs part: the result of a comparison, as plain values. Needs numpy."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from gradsurgeon.errors import printable, shorten_names
from gradsurgeon.language.planning.table import abridged, count
from gradsurgeon.report.comparison import findings, limits
from gradsurgeon.report.comparison.alignment import Pairs, align
from gradsurgeon.report.comparison.reading import Reading, Words
from gradsurgeon.report.comparison.tolerance import AUTOCAST, BOUND, Tolerance
from gradsurgeon.report.tables import Table

VERSION = 1
_COLUMNS, _STEPS = 100, 8


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
    last: tuple[findings.TensorDifference, ...]
    first: tuple[findings.TensorDifference, ...]
    modules: tuple[findings.ModuleDifference, ...]
    steps: tuple[findings.StepDifference, ...]
    growth: str
    largest: findings.TensorDifference | None
    only_run: tuple[str, ...]
    only_reference: tuple[str, ...]
    undecided: tuple[str, ...]
    tolerance: Tolerance
    notes: tuple[str, ...]
    pairs: Pairs = field(repr=False, compare=False)
    model: str = ""
    others: tuple[Comparison, ...] = ()

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `gradsurgeon compare --format json`; ``None`` stands for an infinite distance."""
        apart = ("pairs", "alike", "others")
        shown = [field.name for field in fields(self) if field.name not in apart]
        plain = {name: _plain(getattr(self, name)) for name in shown}
        plain["others"] = [other.to_dict() for other in self.others]
        return {"version": VERSION, "alike": self.alike, "verdict": _verdict(self), **plain}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        named = getattr(value, "_asdict", None)
        return (
            {key: _plain(one) for key, one in named().items()} if named else [*map(_plain, value)]
        )
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compared(
    run: Reading, reference: Reading, noise: Sequence[Reading], words: Words
) -> Comparison:
    pairs, tolerance, notes = align(run, reference, noise, words)
    notes += limits.settle(pairs, tolerance)
    last, first = findings.border_of(pairs)
    only_run, only_reference = _only(run, reference, pairs), _only(reference, run, pairs)
    largest = findings.largest_of(pairs)
    border = first[0] if first else None
    phase = pairs.kind(border).phase if border is not None else ""
    everywhere = np.unique(np.concatenate([one.steps for one in (run, reference, *noise)]))
    if lost := len(everywhere) - len(np.unique(pairs.cells["step"])):
        notes.append(f"{lost} of {len(everywhere)} steps are not in all runs")
    undecided = np.flatnonzero(pairs.cells["undecided"]).tolist()
    steps = tuple(findings.steps_of(pairs))
    return Comparison(
        alike=border is None and largest >= 0 and not any({**only_run, **only_reference}.values()),
        run=run.path,
        reference=reference.path,
        step=None if border is None else int(pairs.cells["step"][border]),
        phase=phase,
        inside="" if border is None else findings.inside_of(pairs, border),
        last=tuple(findings.tensor_of(pairs, at) for at in last),
        first=tuple(findings.tensor_of(pairs, at) for at in first),
        modules=tuple(findings.modules_of(pairs, first[0])) if phase == "forward" else (),
        steps=steps,
        growth=findings.growth_of(steps),
        largest=findings.tensor_of(pairs, largest) if largest >= 0 else None,
        only_run=tuple(only_run),
        only_reference=tuple(only_reference),
        undecided=tuple(dict.fromkeys(map(pairs.text, undecided))),
        tolerance=tolerance,
        notes=tuple(notes),
        pairs=pairs,
    )


def of_models(
    comparisons: Sequence[Comparison], only_run: Sequence[str], only_reference: Sequence[str]
) -> Comparison:
    """Return the comparison of the model that parts first, with those of the others."""
    if len(comparisons) == 1 and not only_run and not only_reference:
        return replace(comparisons[0], model="")
    first = min(comparisons, key=_begins)
    are_alike = all(comparison.alike for comparison in comparisons)
    return replace(
        first,
        alike=are_alike and not only_run and not only_reference,
        only_run=(*first.only_run, *(f"model {name}" for name in only_run)),
        only_reference=(*first.only_reference, *(f"model {name}" for name in only_reference)),
        others=tuple(comparison for comparison in comparisons if comparison is not first),
    )


def _begins(one: Comparison) -> tuple[float, ...]:
    """Return a key by which the model that parts first comes first, and models that agree last.

    In one step, a difference that begins with a gradient or an update is the model's own. One that begins with the
    first input or the last output gradient came from elsewhere, such as from another model, and has become smaller.
    """
    if not one.first:
        return math.inf, 2.0 * one.alike + (one.largest is None)
    first = one.first[0]
    doubt = 0
    if one.phase == "forward":
        is_input = first.tensor.startswith("input")
        doubt = 1 if one.inside or not is_input else 3
    elif one.phase == "backward":
        is_inner = one.last and one.last[-1].phase == "backward"
        doubt = 2 if is_inner else 3
    return first.step, doubt, -first.distance


def _only(run: Reading, other: Reading, pairs: Pairs) -> dict[str, bool]:
    """Return the names that one run alone has, and whether they are of parameters."""
    are_params: dict[str, bool] = {}
    for kind in run.bound.keys() & other.bound.keys():
        for name in sorted(run.bound[kind] - other.bound[kind]):
            are_params[pairs.names[name]] = not pairs.kinds[kind].of_modules
    return are_params


def _verdict(answer: Comparison) -> str:
    sentence = _sentence(answer)
    return f"{printable(answer.model)}: {sentence}" if answer.model else sentence


def _sentence(answer: Comparison) -> str:
    largest = answer.largest
    kind = answer.tolerance.kind
    if answer.first:
        first = answer.first[0]
        doubt = _doubt(answer, first.distance)
        return f"They part at step {answer.step}, {answer.phase}: {printable(first.text)}{doubt}."
    if largest is None:
        return "Nothing can be said: rounding decides every tensor."
    tensors = count(sum(step.compared for step in answer.steps), "tensor")
    where = f"in {tensors} of {count(len(answer.steps), 'step')}"
    end = "." if answer.alike else ", but have other parameters."
    if kind == "rounding" and not answer.pairs.cells["distance"].any():
        return f"They are equal bit for bit {where}{end}"
    share = f"{largest.distance / largest.tolerance:.2g} of its tolerance"
    place = f"{printable(largest.text)}, step {largest.step}"
    return f"They agree within rounding {where}: the largest distance is {share} ({place}){end}"


def _doubt(answer: Comparison, distance: float) -> str:
    """Return what to add where rounding may explain the first difference."""
    kind = answer.tolerance.kind
    far = max(BOUND, float(answer.pairs.cells["floor"].max()))
    if kind == "rounded-away" or (kind == "rounding" and distance <= far):
        return "; this may be rounding, which noise runs would tell"
    if kind == "rounding" and distance <= AUTOCAST:
        return "; under autocast this may be rounding, which noise runs would tell"
    return ""


def _lines(answer: Comparison) -> Iterator[str]:
    yield _verdict(answer)
    yield f"run {printable(answer.run)}, reference {printable(answer.reference)}"
    yield from map(_verdict, answer.others)
    for side, names in (("run", answer.only_run), ("reference", answer.only_reference)):
        if names:
            yield f"only in the {side}: {abridged(names, {})}"
    if answer.first:
        yield _border(answer, answer.first[0])
        yield ""
        for table in _tables(answer):
            yield from table.lines(_COLUMNS)
            yield ""
    texts = [f"tolerance: {answer.tolerance.text}", *(f"note: {note}" for note in answer.notes)]
    if answer.undecided:
        number = count(len(answer.undecided), "tensor")
        texts.append(f"rounding decides {number}, not judged: {shorten_names(answer.undecided)}")
    for text in texts:
        yield textwrap.fill(text, _COLUMNS, break_long_words=False, break_on_hyphens=False)


def _border(answer: Comparison, first: findings.TensorDifference) -> str:
    before = f"the {printable(answer.last[-1].text)} agrees, " if answer.last else ""
    if answer.inside:
        before = f"the input of {printable(answer.inside)} agrees, "
    far = first.why or f"distance {first.distance:.2g}, tolerance {first.tolerance:.2g}"
    place = f"step {first.step}, {first.phase}"
    return (
        f"{place}: {before}the {printable(first.text)} does not{'' if before else ' agree'}: {far}"
    )


def _tables(answer: Comparison) -> Iterator[Table]:
    rows = []
    for tensors, word in ((answer.last, "agrees"), (answer.first, "parts")):
        for tensor in tensors:
            distance = tensor.why or tensor.distance
            rows.append(_cells(tensor.step, tensor.text, distance, tensor.tolerance, word))
    head: tuple[str, ...] = ("step", "tensor", "distance", "tolerance", "")
    yield Table("the border, in the order of execution", head, rows, frozenset({0, 2, 3}))
    if answer.modules:
        rows = [_cells(*module) for module in answer.modules]
        head = ("module", "distance of its input", "of its output")
        title = f"modules that add to the difference in step {answer.step}"
        yield Table(title, head, rows, frozenset({1, 2}))
    steps = [step for step in answer.steps if step.step >= (answer.step or 0)]
    every = -(-len(steps) // _STEPS)
    rows = []
    for step in steps[::every]:
        apart = f"{step.apart:,} of {step.compared:,}"
        rows.append(_cells(step.step, apart, step.median, step.largest))
    title = "how it goes on"
    if answer.growth:
        title += f": the difference {answer.growth}"
    head = ("step", "tensors apart", "their median distance", "largest")
    yield Table(title, head, rows, frozenset(range(4)))


def _cells(*values: object) -> tuple[str, ...]:
    texts = (f"{value:.2g}" if isinstance(value, float) else str(value) for value in values)
    return tuple(map(printable, texts))
