"""How far two runs are apart, and how far rounding alone takes them. Needs numpy.

A projection is a signed sum, so the difference of two projections is a sample of the norm of the difference:
its expected square is the squared norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gradsurgeon.comparison.reading import Reading, origin
from gradsurgeon.planning.table import count
from gradsurgeon.report.sheets import Flags
from gradsurgeon.report.spikes import Floats, Ints

EPS = 2.0**-23  # of float32, in which records are written
_TIMES, _FLOOR = 10.0, 8 * EPS
# Noise that is as large as the rounding of half precision: ten times it would hide every fault.
_GROSS, _GROSS_TIMES = 2.0**-10, 4.0
DECIDED_BY_ROUNDING = 0.1
_BOUND = 1e-3  # without noise runs, of runs that cannot be bit-identical
_ENOUGH = 3  # noise runs
# What decides whether two runs can be bit-identical, and that a run directory tells.
_KNOWN = ("torch", "python", "ranks")


class Tolerance(NamedTuple):
    """How tolerances came about.

    Attributes:
        kind: `noise`, `gross-noise`, `exact` or `bound`.
        times: so many times the distance of noise runs are allowed.
        least: and so much more.
        text: a sentence for the reader.
    """

    kind: str
    times: float
    least: float
    text: str


def distances(run: Floats, reference: Floats) -> Floats:
    """Return the relative distance of tensors by their norms and projections, infinite if one alone is non-finite."""
    a, b = run[:, :3], reference[:, :3]
    bad = ~np.isfinite(a).all(axis=1), ~np.isfinite(b).all(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.abs(a - b).max(axis=1) / np.maximum(a[:, 0], b[:, 0])
    found = np.where((a == b).all(axis=1) | (bad[0] & bad[1]), 0.0, found)
    return np.where(bad[0] != bad[1], np.inf, found)


def noise_of(noise: Sequence[Floats], reference: Floats, step: Ints) -> Floats:
    """Return how far noise takes each tensor: 0 without noise runs.

    The root mean square over noise runs and projections, at least the shift of the norm, and at least the median of
    this kind of tensor at this step.
    """
    if not noise:
        return np.zeros(len(reference))
    with np.errstate(invalid="ignore", divide="ignore"):
        shifts = np.abs(np.stack(noise)[..., :3] - reference[:, :3]) / reference[:, :1]
    shifts = np.where(np.isfinite(shifts), shifts, np.nan)
    known = np.isfinite(shifts[..., 1:])
    squares = np.where(known, shifts[..., 1:] ** 2, 0.0).sum(axis=(0, 2))
    found = np.sqrt(squares / np.maximum(1, known.sum(axis=(0, 2))))
    found = np.maximum(found, np.nan_to_num(shifts[..., 0]).max(axis=0))
    there = known.any(axis=(0, 2))
    for one in np.unique(step):
        at = step == one
        if (at & there).any():
            found[at] = np.maximum(found[at], np.median(found[at & there]))
    return found


def tolerance_of(run: Reading, reference: Reading, noises: Sequence[Floats]) -> Tolerance:
    """Return the rule by which tensors count as apart.

    Args:
        run: the run.
        reference: the reference.
        noises: how far noise takes the tensors of each kind in the first step.
    """
    if noises:
        return _by_noise(float(np.median(np.concatenate(noises))))
    differ = [key for key in _KNOWN if run.meta.get(key) != reference.meta.get(key)]
    differ += ["model"] * (origin(run) != origin(reference))
    if differ:
        told = ", ".join(differ)
        text = (
            f"no tolerance was measured, and {told} differ: a distance above {_BOUND:g} counts; "
            "record noise runs (`gradsurgeon run --perturb 1e-6 --seed N`) and pass them with --noise"
        )
        return Tolerance("bound", 0.0, _BOUND, text)
    text = (
        "bit for bit, because no noise runs were given and torch, Python, ranks and the class of the model are "
        "the same; devices and threads are not known: if they differ, record noise runs "
        "(`gradsurgeon run --perturb 1e-6 --seed N`) and pass them with --noise"
    )
    return Tolerance("exact", 0.0, 0.0, text)


def _by_noise(median: float) -> Tolerance:
    if median >= _GROSS:
        text = (
            f"{_GROSS_TIMES:g} times the distance of noise runs, which is {median:.1g} in the first step, as by half "
            "precision: only gross faults can be told; to find others, compare runs of one precision"
        )
        return Tolerance("gross-noise", _GROSS_TIMES, _FLOOR, text)
    if median == 0:
        text = (
            "rounding of float32: the noise runs equal the reference bit for bit; record them with "
            "`gradsurgeon run --perturb 1e-6 --seed N`"
        )
        return Tolerance("noise", _TIMES, _FLOOR, text)
    text = f"{_TIMES:g} times the distance of noise runs, which is {median:.1g} in the first step"
    return Tolerance("noise", _TIMES, _FLOOR, text)


def few(noise: Sequence[Reading]) -> str:
    """Return a doubt about few noise runs, empty if there are enough."""
    if not 0 < len(noise) < _ENOUGH:
        return ""
    runs = count(len(noise), "noise run")
    return f"{runs} measured the tolerance: with {_ENOUGH} it is far more certain"


def is_undecided(noise: Floats) -> Flags:
    """Return which tensors rounding decides: such as the bias before a batch norm, whose gradient is rounding alone."""
    return np.asarray(noise > DECIDED_BY_ROUNDING)
