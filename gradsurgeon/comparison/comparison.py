"""Where two runs part: the result of a comparison, as plain values. Needs numpy."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gradsurgeon._libraries import library
from gradsurgeon.comparison import findings, names, text
from gradsurgeon.comparison.alignment import Pairs, align
from gradsurgeon.comparison.findings import Module, Step, Tensor
from gradsurgeon.comparison.reading import Reading, read
from gradsurgeon.comparison.tolerance import Tolerance
from gradsurgeon.report.run import open_run
from gradsurgeon.store.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSION = 1
Source = str | os.PathLike[str] | Run


@dataclass(frozen=True)
class Comparison:
    """Where a run parts from a reference. `print` shows it in words.

    Attributes:
        alike: whether the runs agree.
        run: the directory of the run.
        reference: the directory of the reference.
        step: the first step in which they part, `None` if they do not.
        phase: where in the step: ``"forward"``, ``"backward"``, ``"gradient"`` or ``"update"``.
        inside: the innermost module around the first difference whose input agrees.
        last: the last tensors that agree.
        first: the first tensors that do not, in the order of execution.
        modules: the modules that add to the difference in the forward pass of that step.
        steps: how far the runs are apart in each step.
        growth: ``"grows"``, ``"stays"`` or ``"shrinks"``, empty for fewer than two steps.
        largest: the tensor whose distance is the most times its tolerance.
        only_run: tensors that only the run has.
        only_reference: tensors that only the reference has.
        undecided: tensors that rounding decides, so they say nothing.
        tolerance: how tolerances came about.
        notes: what else a reader has to know.
    """

    alike: bool
    run: str
    reference: str
    step: int | None
    phase: Literal["", "forward", "backward", "gradient", "update"]
    inside: str
    last: tuple[Tensor, ...]
    first: tuple[Tensor, ...]
    modules: tuple[Module, ...]
    steps: tuple[Step, ...]
    growth: Literal["", "grows", "stays", "shrinks"]
    largest: Tensor | None
    only_run: tuple[str, ...]
    only_reference: tuple[str, ...]
    undecided: tuple[str, ...]
    tolerance: Tolerance
    notes: tuple[str, ...]
    pairs: Pairs = field(repr=False, compare=False)

    def __str__(self) -> str:
        return "\n".join(text.lines(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `gradsurgeon compare --format json`. A distance that does not exist is `None`."""
        plain = {
            one.name: _plain(getattr(self, one.name))
            for one in fields(self)
            if one.name not in ("pairs", "alike", "only_run", "only_reference")
        }
        head = {"version": VERSION, "alike": self.alike, "verdict": text.verdict(self)}
        only = {"run": list(self.only_run), "reference": list(self.only_reference)}
        return {**head, **plain, "only": only}

    def plot(self) -> Figure:
        """Draw a map of distances over steps and the order of execution, with the border marked.

        Returns:
            A figure, which a notebook shows. ``figure.savefig("map.png")`` writes it to a file.

        Raises:
            GradSurgeonError: matplotlib is missing.
        """
        library("matplotlib", "plot", "plot")
        from gradsurgeon.comparison import plot  # noqa: PLC0415 # needs matplotlib

        return plot.draw(self)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Tolerance):
        return value._asdict()
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compare(
    run: Source,
    reference: Source,
    noise: Source | Sequence[Source] = (),
    renamed: names.Renamed = None,
) -> Comparison:
    """Return where a run parts from a reference. Needs numpy, but no torch.

    Args:
        run: a run directory, recorded with the rules ``gradsurgeon:fingerprint@1``.
        reference: the run that it should equal.
        noise: repetitions of the reference under ``gradsurgeon run --perturb 1e-6 --seed N``: they measure how far
            rounding alone goes. Three are enough.
        renamed: the names that changed, from the reference to the run: a mapping, or a file with lines ``old: new``.
            A name stands also for all names that begin with it.

    Raises:
        RecordError: a run cannot be read, has no fingerprints, or shares no rules, tensors or steps with the reference.
        RuleFileError: the file of names is not valid.
    """
    library("numpy", "report", "compare")
    sources = [noise] if isinstance(noise, str | os.PathLike | Run) else list(noise)
    with ExitStack() as stack:

        def opened(source: Source) -> Run:
            return source if isinstance(source, Run) else stack.enter_context(open_run(source))

        a, b, more = opened(run), opened(reference), [opened(one) for one in sources]
        first = read(a)
        pairs = names.check(renamed, _names(read(b)), _names(first)) if renamed else {}
        rename = names.renaming(pairs)
        return _compared(first, read(b, rename), [read(one, rename) for one in more])


def _names(reading: Reading) -> set[str]:
    return {name for cells in reading.kinds.values() for name in cells.names}


def _compared(run: Reading, reference: Reading, noise: Sequence[Reading]) -> Comparison:
    pairs, tolerance, notes = align(run, reference, noise)
    last, first = findings.border_of(pairs)
    only = _only(run, reference), _only(reference, run)
    params = [name for side in only for name, is_param in side.items() if is_param]
    steps = list(findings.steps_of(pairs))
    largest = findings.largest_of(pairs)
    notes += _lost(run, reference, noise, pairs)
    border = first[0] if first else -1
    phase: Any = pairs.phase(border) if first else ""
    return Comparison(
        alike=not first and not params,
        run=run.path,
        reference=reference.path,
        step=int(pairs.step[border]) if first else None,
        phase=phase,
        inside=findings.inside_of(pairs, border) if first else "",
        last=tuple(findings.tensor_of(pairs, at) for at in last),
        first=tuple(findings.tensor_of(pairs, at) for at in first),
        modules=tuple(findings.modules_of(pairs, border)) if phase == "forward" else (),
        steps=tuple(steps),
        growth=findings.growth_of(steps),
        largest=findings.tensor_of(pairs, largest) if largest >= 0 else None,
        only_run=tuple(only[0]),
        only_reference=tuple(only[1]),
        undecided=tuple(findings.undecided_names(pairs)),
        tolerance=tolerance,
        notes=tuple(notes),
        pairs=pairs,
    )


def _only(one: Reading, other: Reading) -> dict[str, bool]:
    """Return the names that one run alone has, and whether they are of parameters."""
    found: dict[str, bool] = {}
    for kind in one.kinds.keys() & other.kinds.keys():
        there = set(other.kinds[kind].names)
        found |= {
            name: not kind.of_modules for name in one.kinds[kind].names if name not in there
        }
    return dict(sorted(found.items()))


def _lost(
    run: Reading, reference: Reading, noise: Sequence[Reading], pairs: Pairs
) -> list[str]:
    notes = []
    for told, one, other in (("run", run, reference), ("reference", reference, run)):
        if kinds := [kind.tensor for kind in one.kinds if kind not in other.kinds]:
            notes.append(f"only the {told} recorded {', '.join(kinds)}")
    steps = np.unique(pairs.step)
    everywhere = len(np.unique(np.concatenate([one.steps for one in (run, reference, *noise)])))
    if len(steps) < everywhere:
        notes.append(f"{everywhere - len(steps)} of {everywhere} steps are not in all runs")
    lasting = [int(step) for step in steps if pairs.undecided[pairs.step == step].all()]
    if lasting:
        notes.append(f"rounding decides every tensor of step {lasting[0]}: it says nothing")
    return notes
