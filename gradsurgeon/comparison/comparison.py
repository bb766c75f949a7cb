"""Where two runs part: the result of a comparison, as plain values. Needs numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from gradsurgeon._libraries import library
from gradsurgeon.comparison import findings, kinks, text
from gradsurgeon.comparison import noise as noise_runs
from gradsurgeon.comparison.alignment import Pairs, align
from gradsurgeon.comparison.findings import Answer
from gradsurgeon.comparison.reading import Reading, Words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSION = 1


class Comparison(Answer):
    __doc__ = Answer.__doc__

    def __str__(self) -> str:
        return "\n".join(text.lines(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `gradsurgeon compare --format json`; ``None`` stands for an infinite distance."""
        hidden = ("pairs", "alike")
        plain = {
            one.name: _plain(getattr(self, one.name))
            for one in fields(self)
            if one.name not in hidden
        }
        return {"version": VERSION, "alike": self.alike, "verdict": text.verdict(self), **plain}

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
    if isinstance(value, tuple):
        named = getattr(value, "_asdict", None)
        return (
            {key: _plain(one) for key, one in named().items()} if named else [*map(_plain, value)]
        )
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compared(
    run: Reading, reference: Reading, noise: Sequence[Reading], words: Words
) -> Comparison:
    """Return where a run parts from a reference."""
    pairs, tolerance, notes = align(run, reference, noise, words)
    notes += kinks.allow(pairs, tolerance.times) if noise else ()
    last, first = findings.border_of(pairs)
    only_run, only_reference = _only(run, reference, pairs), _only(reference, run, pairs)
    largest = findings.largest_of(pairs)
    border = first[0] if first else None
    phase = pairs.kind(border).phase if border is not None else ""
    everywhere = np.unique(np.concatenate([one.steps for one in (run, reference, *noise)]))
    if lost := len(everywhere) - len(np.unique(pairs.cells["step"])):
        notes.append(f"{lost} of {len(everywhere)} steps are not in all runs")
    if noise_runs.same(run, reference):
        notes.append("both are one directory")
    undecided = np.flatnonzero(pairs.cells["undecided"]).tolist()
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
        steps=tuple(findings.steps_of(pairs)),
        growth="" if border is None else findings.growth_of(pairs, border),
        largest=findings.tensor_of(pairs, largest) if largest >= 0 else None,
        only_run=tuple(only_run),
        only_reference=tuple(only_reference),
        undecided=tuple(dict.fromkeys(findings.words(pairs, at) for at in undecided)),
        tolerance=tolerance,
        notes=tuple(notes),
        pairs=pairs,
    )


def _only(one: Reading, other: Reading, pairs: Pairs) -> dict[str, bool]:
    """Return the names that one run alone has, and whether they are of parameters."""
    found: dict[str, bool] = {}
    for kind in one.bound.keys() & other.bound.keys():
        alone = {*one.bound[kind]} - {*other.bound[kind]}
        found |= {pairs.names[name]: not pairs.kinds[kind].of_modules for name in sorted(alone)}
    return found
