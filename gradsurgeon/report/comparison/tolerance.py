"""How far two runs are apart, and how far rounding alone takes them; unfit noise runs are refused.

A projection is a signed sum, so the difference of two projections is a sample of the norm of the difference:
its expected square is the squared norm.
"""

import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gradsurgeon.common._grouping import grouped
from gradsurgeon.errors import RecordError, printable
from gradsurgeon.records.store.layout import section
from gradsurgeon.report.comparison.pairs import Pair, values_of
from gradsurgeon.report.comparison.reading import Reading
from gradsurgeon.report.spikes import Floats

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
# Half precision decides the signs of elements of a gradient that are near 0: of two, and of this share of many.
_SIGNS = 2.0
_SHARE_OF_SIGNS = 0.02
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
_EARLY = 10


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


def set_limits(pairs: Sequence[Pair], readings: Sequence[Reading]) -> Tolerance:
    """Set how far apart each tensor is and may be, in the order of execution, and return the rule."""
    run, reference, *noise = readings
    values = values_of(pairs, len(readings))
    theirs = values[:, 1]
    _set_distances(pairs, values[:, 0], theirs)
    # Finer dtypes than that of the records count as `float32`.
    dtypes = ["float32", *run.dtypes.values(), *reference.dtypes.values()]
    dtype = max(dtypes, key=eps_of)
    for pair in pairs:
        # A parameter is rounded to its dtype, other tensors to the coarsest one.
        eps = eps_of(dtype)
        if not pair.kind.of_modules:
            own = run.dtypes.get(pair.name, "")
            other = reference.dtypes.get(pair.name, "")
            eps = max(eps_of(own), eps_of(other))
        pair.floor = _EPS * eps
    if noise:
        drift = noise_of(values[:, 2:], theirs)
        begin = (pairs[0].step, pairs[0].phase)
        shown = [(pair.step, pair.phase) == begin for pair in pairs]
        rule = by_noise(drift[shown], dtype)
    else:
        drift = vanishing(pairs, dtype)
        rule = by_rounding(dtype)
    drift = lifted(pairs, drift)
    for pair, of_noise in zip(pairs, drift.tolist(), strict=True):
        pair.is_undecided = of_noise > DECIDED_BY_ROUNDING
        pair.tolerance = rule.times * of_noise + max(rule.least, pair.floor)
        if rule.kind == "gross-noise":
            pair.tolerance = max(pair.tolerance, of_signs(pair))
    if not noise:
        _grow(pairs)
    return rule


def _set_distances(pairs: Sequence[Pair], ours: Floats, theirs: Floats) -> None:
    """Set how far apart tensors are, given their norms and projections, of shape `[pairs, 3]`."""
    far = distances(ours, theirs).tolist()
    shifts = distances(ours[:, :1], theirs[:, :1]).tolist()
    for pair, distance, shift in zip(pairs, far, shifts, strict=True):
        pair.shift = shift
        pair.distance = distance
        if pair.state:
            # A missing gradient is like a gradient of zeros.
            pair.distance = math.inf if pair.norm else 0.0


def _groups_of(pairs: Sequence[Pair]) -> list[list[int]]:
    """Return the places of tensors of one kind in one step."""
    kinds = [(pair.step, pair.kind) for pair in pairs]
    return list(grouped(range(len(pairs)), kinds.__getitem__).values())


def vanishing(pairs: Sequence[Pair], dtype: str) -> Floats:
    """Return 1 for gradients that seem to be rounding alone, by the norms of their group, and 0 for others."""
    share = max(_VANISHING, _VANISHING_EPS * eps_of(dtype))
    drift = np.zeros(len(pairs))
    for places in _groups_of(pairs):
        if pairs[places[0]].phase == "gradient":
            norms = np.array([pairs[place].norm for place in places])
            drift[places] = norms < share * np.median(norms)
    return drift


def lifted(pairs: Sequence[Pair], drift: Floats) -> Floats:
    """Return drifts that are at least the median of their group; rounding decides the update if it decides the gradient.

    Adam divides a gradient by its size, so it makes a full step of a gradient that is rounding alone.
    """
    result = drift.copy()
    for places in _groups_of(pairs):
        known = drift[places]
        known = known[np.isfinite(known)]
        if len(known):
            result[places] = np.fmax(result[places], np.median(known))
    # A tensor has an accumulated and a final gradient, which come before its update.
    of_gradients: dict[tuple[int, str], float] = {}
    for place, pair in enumerate(pairs):
        tensor = pair.step, pair.name
        before = of_gradients.get(tensor, 0.0)
        if pair.phase == "update":
            result[place] = np.fmax(result[place], before)
        elif pair.phase == "gradient" and drift[place] > DECIDED_BY_ROUNDING:
            of_gradients[tensor] = max(before, drift[place])
    return np.nan_to_num(result)


def of_signs(pair: Pair) -> float:
    """Return how far other signs of a few elements of its gradient take a weight, 0 for other tensors.

    Adam makes a full step of each element, however small. Such a step keeps the norm of a weight; a factor does not.
    """
    keeps_norm = 2 * pair.shift <= pair.distance
    if pair.phase != "update" or not keeps_norm:
        return 0.0
    share = _SHARE_OF_SIGNS
    if pair.numel > 0:
        share += _SIGNS / pair.numel
    return 2 * math.sqrt(share)


def eps_of(dtype: str) -> float:
    return _COARSE.get(dtype, 2.0**-23)


def remedy_for(dtype: str) -> str:
    size = "1e-6" if dtype == "float32" else "4e-3"
    command = f"`gradsurgeon run --perturb {size} --seed N`"
    return f"record noise runs by {command}, and pass them with --noise"


def by_noise(drift: Floats, dtype: str = "float32") -> Tolerance:
    """Return the rule, by how far noise takes the first tensors of a model of some dtype."""
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


def _grow(pairs: Sequence[Pair]) -> None:
    """Set the limits of tensors in order without noise runs: rounding adds up like a random walk."""
    sizes = Counter([pair.step for pair in pairs])
    depths: Counter[int] = Counter()
    for pair in pairs:
        depths[pair.step] += 1
        limit = max(_ULPS * eps_of("float32"), pair.floor / _EPS)
        if pair.phase == "gradient":
            # A gradient has the rounding of the whole step, an update no more than its gradient.
            limit *= _CANCELLED * math.sqrt(sizes[pair.step])
        elif pair.phase != "update":
            limit *= math.sqrt(depths[pair.step])
        pair.tolerance = limit


def refuse_repeated(run: Reading, reference: Reading, noise: Sequence[Reading]) -> None:
    """Refuse a noise run that is the run, the reference or another noise run, by `RecordError`."""
    known = {os.path.realpath(run.path), os.path.realpath(reference.path)}
    for repetition in noise:
        path = os.path.realpath(repetition.path)
        if path in known:
            what = "is the run or the reference, or is given twice"
            _refuse(repetition, what, "give each noise run once, none of which is compared")
        known.add(path)


def refuse_unlike(noise: Sequence[Reading], pairs: Sequence[Pair], reference: Reading) -> None:
    """Refuse noise runs that differ from the reference by more than rounding can in the first forward pass."""
    first = pairs[0].step
    start = reference.meta.get("start_step") or 0
    if first > start + _EARLY:
        return  # the weights differ as well
    forward = [pair for pair in pairs if pair.step == first and pair.phase == "forward"]
    values = values_of(forward, 2 + len(noise))
    reference_values = values[:, 1]
    is_finite = np.asarray(np.isfinite(reference_values).all(axis=1))
    # Rounding makes noise runs differ from each other; another script differs from all of them alike.
    spread = distances(values[:, 2], values[:, -1])
    for number, repetition in enumerate(noise, 2):
        far = distances(values[:, number], reference_values)
        # The first tensor that noise moves shows how large the noise was.
        limit = _FAR
        rules = section(repetition.meta, "plan").get("rules", ())
        if any(rule["action"] == "perturb" for rule in rules):
            limit = DECIDED_BY_ROUNDING
        before = 0.0
        for place, pair in enumerate(forward):
            if pair.numbers[number] is None or not is_finite[place]:
                continue
            if far[place] > max(limit, _ALIKE * spread[place]):
                moved = f"differs from the reference by {far[place]:.2g} at the {printable(pair.text)} in step {first}"
                rounding = f"by at most {before:.2g} before, so by more than rounding"
                remedy = "make noise runs by the script of the reference"
                _refuse(repetition, f"{moved}, {rounding}", remedy)
            before = max(before, far[place])
            if before:
                limit = max(_FAR, _JUMP * before)


def _refuse(repetition: Reading, what: str, remedy: str) -> None:
    raise RecordError(f"noise run {printable(repetition.path)}: {what}; {remedy}")
