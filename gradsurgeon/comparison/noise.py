"""Noise runs that cannot measure how far rounding goes: refused, with the reason. Needs numpy."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from gradsurgeon.comparison.reading import Reading
from gradsurgeon.comparison.tolerance import DECIDED_BY_ROUNDING, distances
from gradsurgeon.errors import RecordError, printable
from gradsurgeon.report.sheets import Flags
from gradsurgeon.report.spikes import Floats
from gradsurgeon.store.layout import section

# Layers carry a difference on: at once it becomes a hundred times as large only by another computation.
_JUMP, _FAR = 100.0, 0.01
# Runs that rounding parts are not nearer to each other than by so many times.
_ALIKE = 10.0
# In later steps the weights of a noise run differ by more than rounding.
_EARLY = 10
_REMEDY = (
    "make noise runs by the script of the reference, with its data and seed, and "
    "`gradsurgeon run --perturb EPS --seed N`"
)


def same(one: Reading, other: Reading) -> bool:
    """Return whether two runs are one directory."""
    return os.path.realpath(one.path) == os.path.realpath(other.path)


def refuse_repeated(run: Reading, reference: Reading, noise: Sequence[Reading]) -> None:
    """Refuse a directory that is given twice.

    Raises:
        RecordError: a noise run is the run, the reference or another noise run.
    """
    for place, one in enumerate(noise):
        for what, other in (
            ("the reference", reference),
            ("the run", run),
            *(("given twice", before) for before in noise[:place]),
        ):
            if same(one, other):
                _refuse(one, f"is {what}", "give each noise run once, none of which is compared")


def refuse_non_finite(
    noise: Sequence[Reading], found: Flags, values: Floats, cells: Any, told: Callable[[Any], str]
) -> None:
    """Refuse NaN and Inf where the reference is finite.

    Args:
        noise: the noise runs.
        found: of shape `[noise runs, tensors]`: which tensors each noise run has.
        values: norms and projections of the reference and of the noise runs.
        cells: the tensors, in the order of execution.
        told: returns what a tensor is called.

    Raises:
        RecordError: a noise run is non-finite where the reference is finite.
    """
    finite = np.asarray(np.isfinite(values).all(axis=2))
    for one, here, fine in zip(noise, found, finite[1:], strict=True):
        bad = np.flatnonzero(here & ~fine & finite[0])
        if len(bad):
            where = f"has NaN or Inf at the {told(cells[bad[0]])}"
            _refuse(one, f"{where}, where the reference is finite", "lower --perturb, or its seed")


def refuse_strangers(
    noise: Sequence[Reading], values: Floats, cells: Any, told: Callable[[Any], str]
) -> None:
    """Refuse what differs from the reference by more than rounding can in the first forward pass.

    Args:
        noise: the noise runs.
        values: norms and projections of the reference and of the noise runs, NaN where a run lacks a tensor.
        cells: the tensors of the forward pass, in the order of execution.
        told: returns what a tensor is called.

    Raises:
        RecordError: a noise run does not repeat the reference.
    """
    # Where rounding decides, noise runs differ from each other too; another script differs alike in all of them.
    spread = np.zeros(len(cells))
    if len(noise) > 1:
        spread = np.min([distances(*both) for both in combinations(values, 2)], axis=0)
    for one, numbers in zip(noise, values[1:], strict=True):
        early = len(cells) and cells["step"][0] <= (one.meta.get("start_step") or 0) + _EARLY
        known = np.isfinite(numbers).all(axis=1) & np.isfinite(values[0]).all(axis=1)
        if not early or not known.any():
            continue
        far, there = distances(numbers[known], values[0][known]), cells[known]
        before = np.concatenate([[0.0], np.maximum.accumulate(far)[:-1]])
        # The first tensor that noise moves shows how large the noise is.
        rules = section(one.meta, "plan").get("rules", ())
        begin = DECIDED_BY_ROUNDING if any(rule["action"] == "perturb" for rule in rules) else _FAR
        limit = np.where(before == 0, begin, np.maximum(_FAR, _JUMP * before))
        strange = np.flatnonzero((far > limit) & (_ALIKE * spread[known] < far))
        if not len(strange):
            continue
        at = strange[0]
        moved = f"differs from the reference by {far[at]:.2g} at the {told(there[at])}"
        rounding = f"by at most {before[at]:.2g} before, so by more than rounding"
        _refuse(one, f"{moved}, {rounding}", _REMEDY)


def _refuse(one: Reading, what: str, do: str) -> None:
    raise RecordError(f"noise run {printable(one.path)}: {what}; {do}")
