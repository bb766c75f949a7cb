"""How far two runs are apart, and how far rounding alone takes them; unfit noise runs are refused.

A projection is a signed sum, so the difference of two projections is a sample of the norm of the difference:
its expected square is the squared norm.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from gradsurgeon.errors import RecordError, printable
from gradsurgeon.records.store.layout import section
from gradsurgeon.report.comparison.reading import Reading
from gradsurgeon.report.spikes import Flags, Floats, Ints

_TIMES = 10.0
_EPS = 8
_FLOOR = 8 * 2.0**-23  # records are float32
_COARSE = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
# Noise that is as large as the rounding of half precision: ten times it would hide most faults.
_GROSS = 2.0**-10
_GROSS_TIMES = 4.0
DECIDED_BY_ROUNDING = 0.1
# The share of inputs and outputs that noise leaves alone if it rounds away.
_MOST = 0.5
# A gradient so many times smaller than the median seems to be what rounding leaves of a sum.
_VANISHING = 1e-5
_VANISHING_EPS = 4
# Distances that rounding can reach, of float32 and of bfloat16, which autocast uses and no run tells.
BOUND = 1e-3
AUTOCAST = 2.0**-7
# Without noise runs: float32 sums of some thousand elements differ by up to 30 eps on other kernels. Half precision
# rounds the result alone, so its kernels differ by 1 eps.
_ULPS = 64.0
# An error goes on into what comes after it, and grows there by so many times at most.
CARRIED = 16.0
# A parameter's gradient is a sum over the batch, in which much cancels.
_CANCELLED = 10.0
# Layers carry a difference on: at once it becomes a hundred times as large only by another computation.
_JUMP = 100.0
_FAR = 0.01
# Runs that rounding parts are not nearer to each other than by so many times.
_ALIKE = 10.0
# In later steps the weights of a noise run differ by more than rounding.
EARLY = 10


class Tolerance(NamedTuple):
    """How tolerances came about: `times` the distance of noise runs, and `least` more, or 8 eps of half precision."""

    kind: str
    times: float
    least: float
    text: str


def distances(run: Floats, reference: Floats) -> Floats:
    """Return the relative distance of tensors by norms and projections, infinite if one alone is non-finite."""
    is_bad = ~np.isfinite(run).all(axis=1)
    is_bad_in_reference = ~np.isfinite(reference).all(axis=1)
    norms = np.maximum(run[:, 0], reference[:, 0])
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.asarray(np.abs(run - reference).max(axis=1) / norms)
    are_equal = (run == reference).all(axis=1)
    relative[are_equal | is_bad] = 0.0
    relative[is_bad != is_bad_in_reference] = np.inf
    return relative


def noise_of(noise: Floats, reference: Floats) -> Floats:
    """Return how far noise of shape `[tensors, noise runs, 3]` takes each tensor, NaN where no noise run has it.

    It is the root mean square over noise runs and projections, and at least the shift of the norm.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        shifts = np.abs(noise - reference[:, None]) / reference[:, None, :1]
        known = np.isfinite(shifts).all(axis=2)
        shifts[~known] = 0.0
        squares = (shifts[..., 1:] ** 2).mean(axis=2)
        mean_squares = squares.sum(axis=1) / known.sum(axis=1)
    of_norms = shifts[..., 0].max(axis=1)
    return np.asarray(np.maximum(np.sqrt(mean_squares), of_norms))


def vanishing(norms: Floats, groups: Ints, dtype: str) -> Floats:
    """Return 1 for gradients that seem to be rounding alone, by the norms of their group, and 0 for others."""
    share = max(_VANISHING, _VANISHING_EPS * eps_of(dtype))
    drift = np.zeros(len(norms))
    for group in np.unique(groups):
        is_in_group = groups == group
        of_group = norms[is_in_group]
        drift[is_in_group] = of_group < share * np.median(of_group)
    return drift


def lifted(drift: Floats, groups: Ints, tensors: Ints, gradient: Flags, update: Flags) -> Floats:
    """Return drifts that are at least the median of their group; rounding decides the update if it decides the gradient.

    Adam divides a gradient by its size, so it makes a full step of a gradient that is rounding alone.
    """
    lifted_drift = drift.copy()
    unique, numbers = np.unique(tensors, return_inverse=True)
    of_gradients = np.zeros(len(unique))
    decided = gradient & (drift > DECIDED_BY_ROUNDING)
    # A tensor has an accumulated and a final gradient.
    np.fmax.at(of_gradients, numbers[decided], drift[decided])
    lifted_drift[update] = np.fmax(drift[update], of_gradients[numbers[update]])
    for group in np.unique(groups):
        is_in_group = groups == group
        of_group = drift[is_in_group]
        if np.isfinite(of_group).any():
            lifted_drift[is_in_group] = np.fmax(lifted_drift[is_in_group], np.nanmedian(of_group))
    return np.nan_to_num(lifted_drift)


def coarsest(dtypes: Iterable[str]) -> str:
    """Return the dtype that rounds most; finer ones count as `float32`, the dtype of records."""
    coarse = "float32"
    for dtype in dtypes:
        if eps_of(dtype) > eps_of(coarse):
            coarse = dtype
    return coarse


def eps_of(dtype: str) -> float:
    return _COARSE.get(dtype, 2.0**-23)


def floors(names: Iterable[str], of_modules: Flags, dtypes: Sequence[Mapping[str, str]]) -> Floats:
    """Return how far a rounding takes each tensor: a parameter by its dtype, others by the coarsest."""
    eps_of_names: dict[str, float] = {}
    for dtype_of in dtypes:
        for name, dtype in dtype_of.items():
            eps_of_names[name] = max(eps_of(dtype), eps_of_names.get(name, 0.0))
    eps = eps_of("float32")
    widest = max(eps_of_names.values(), default=eps)
    own = np.array([eps_of_names.get(name, eps) for name in names])
    return _EPS * np.where(of_modules, widest, own)


def remedy_for(dtype: str) -> str:
    size = "1e-6" if dtype == "float32" else "4e-3"
    command = f"`gradsurgeon run --perturb {size} --seed N`"
    return f"record noise runs by {command}, and pass them with --noise"


def by_noise(drift: Floats, dtype: str = "float32") -> Tolerance:
    """Return the rule, by how far noise takes inputs and outputs in the first step of a model of some dtype."""
    drift = drift[np.isfinite(drift)]
    equal = 1.0
    low = 0.0
    if len(drift):
        equal = float(np.mean(drift == 0))
        # A deep model carries any noise far: its first layers show how large the noise was.
        low = float(np.quantile(drift, 0.25))
    measured = f"times the distance of noise runs, {low:.1g} in the first layers"
    if low >= _GROSS:
        text = f"{_GROSS_TIMES:g} {measured}, as by half precision: only gross faults can be told"
        return Tolerance("gross-noise", _GROSS_TIMES, _FLOOR, text)
    if equal < _MOST:
        return Tolerance("noise", _TIMES, _FLOOR, f"{_TIMES:g} {measured}")
    kind = "noise" if dtype == "float32" else "rounded-away"
    text = (
        f"the rounding of {dtype}: most inputs and outputs of the noise runs equal the reference bit for bit, "
        f"so noise of this size rounds away; {remedy_for(dtype)}"
    )
    return Tolerance(kind, _TIMES, _FLOOR, text)


def by_rounding(dtype: str = "float32") -> Tolerance:
    """Return the rule for runs without noise runs."""
    least = max(_ULPS * eps_of("float32"), eps_of(dtype))
    text = (
        f"the rounding of {dtype}, {least:.2g}, which grows with depth, and {CARRIED:g} times what came before; "
        f"{remedy_for(dtype)}"
    )
    return Tolerance("rounding", CARRIED, least, text)


def grown(steps: Ints, phases: Any, floors: Floats) -> Floats:
    """Return the limits of tensors in order without noise runs: rounding adds up like a random walk."""
    limits = np.maximum(_ULPS * eps_of("float32"), floors / _EPS)
    is_gradient = phases == "gradient"
    for step in np.unique(steps):
        places = np.flatnonzero(steps == step)
        depths = 1.0 + np.arange(len(places))
        # A gradient has the rounding of the whole step, an update no more than its gradient.
        depths[is_gradient[places]] = len(places)
        depths[phases[places] == "update"] = 1.0
        limits[places] *= np.sqrt(depths)
    limits[is_gradient] *= _CANCELLED
    return limits


def refuse_repeated(run: Reading, reference: Reading, noise: Sequence[Reading]) -> None:
    """Refuse a noise run that is the run, the reference or another noise run, by `RecordError`."""
    known = {os.path.realpath(run.path), os.path.realpath(reference.path)}
    for repetition in noise:
        path = os.path.realpath(repetition.path)
        if path in known:
            what = "is the run or the reference, or is given twice"
            _refuse(repetition, what, "give each noise run once, none of which is compared")
        known.add(path)


def refuse_unlike(
    noise: Sequence[Reading], cells: Any, forward: Flags, text_of: Callable[[int], str]
) -> None:
    """Refuse noise runs that differ from the reference by more than rounding can in the first forward pass.

    No tensor is of the forward pass if the first step is late, as weights differ there.
    """
    first = cells[forward]
    values = first["values"][:, :, :3]
    reference = values[:, 1]
    is_finite = np.isfinite(reference).all(axis=1)
    spread = _spread(values, len(noise))
    for number, repetition in enumerate(noise, 2):
        places = np.flatnonzero(first["found"][:, number] & is_finite)
        far = distances(values[places, number], reference[places])
        before = np.maximum.accumulate(far)
        before = np.concatenate([[0.0], before])[: len(far)]
        # The first tensor that noise moves shows how large the noise is.
        begin = _FAR
        rules = section(repetition.meta, "plan").get("rules", ())
        if any(rule["action"] == "perturb" for rule in rules):
            begin = DECIDED_BY_ROUNDING
        limit = np.where(before == 0, begin, np.maximum(_FAR, _JUMP * before))
        is_apart_from_noise = _ALIKE * spread[places] < far
        strange = np.flatnonzero((far > limit) & is_apart_from_noise)
        if len(strange):
            at = strange[0]
            place = text_of(np.flatnonzero(forward)[places[at]])
            moved = f"differs from the reference by {far[at]:.2g} at the {place}"
            rounding = f"by at most {before[at]:.2g} before, so by more than rounding"
            remedy = "make noise runs by the script of the reference"
            _refuse(repetition, f"{moved}, {rounding}", remedy)


def _spread(values: Floats, noise_runs: int) -> Floats:
    """Return the least distance between any two of the reference and its noise runs; 0 with one noise run.

    Where rounding decides, noise runs differ from each other; another script differs alike in all.
    """
    if noise_runs == 1:
        return np.zeros(len(values))
    pairs = combinations(range(1, 2 + noise_runs), 2)
    apart = [distances(values[:, one], values[:, other]) for one, other in pairs]
    return np.asarray(np.min(apart, axis=0))


def _refuse(repetition: Reading, what: str, remedy: str) -> None:
    raise RecordError(f"noise run {printable(repetition.path)}: {what}; {remedy}")
