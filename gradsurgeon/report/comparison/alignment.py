"""Two runs side by side: the same tensors of the same steps, in the order of execution. Needs numpy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradsurgeon.errors import RecordError, printable, shorten_names
from gradsurgeon.report.comparison import order, tolerance
from gradsurgeon.report.comparison.reading import KEYS, Kind, Reading, Words, starts
from gradsurgeon.report.comparison.tolerance import Tolerance
from gradsurgeon.report.spikes import Flags, Floats, Ints

# What became of a tensor: it is in one run only, or has another number of elements.
BOTH, MISSING_IN_RUN, MISSING_IN_REFERENCE, RESIZED = range(4)
_PAIR = np.dtype(
    [
        *((key, np.int64) for key in KEYS),
        ("part", np.int64),  # the micro-batch
        ("call", np.int64),  # the call within the micro-batch
        ("place", np.int64),  # among all tensors of a step
        ("state", np.int64),
        ("norm", np.float64),  # in the reference
        ("distance", np.float64),  # relative to the norm
        ("limit", np.float64),  # the distance that is allowed
        ("floor", np.float64),  # the distance that rounding to its dtype makes
        ("shift", np.float64),  # the relative difference of the norms
        ("numel", np.float64),
        ("undecided", bool),  # rounding decides it
        ("finite", bool, 2),  # in the run and in the reference
    ]
)
# Gradients come after the forward and backward passes of all micro-batches, updates after all gradients.
_LATE = 2**40
# Calls in another order are so many times nearer to each other in the right one.
_NEARER = 10.0
_OTHER_BATCHES = (
    "only gradients and weights are compared: other ranks, batches or micro-batches divide the samples "
    "differently; with batch norm such runs truly differ"
)
_RENAME = "name what was renamed by lines `old: new` in --map FILE"
_CALLED = "called another number of times in one run, as by an evaluation between steps"
_FEW = "fewer than three noise runs measured the tolerance: false alarms are likelier"


@dataclass(frozen=True)
class Pairs:
    """The tensors of two runs in the order of execution: numbers of kinds and names, distances, limits."""

    kinds: list[Kind]
    names: list[str]
    cells: Any

    @property
    def apart(self) -> Flags:
        return np.asarray((self.cells["distance"] > self.cells["limit"]) & ~self.cells["undecided"])

    @property
    def ratio(self) -> Floats:
        """How many times the allowed distance; where none is allowed, 0 or infinite."""
        distance = self.cells["distance"]
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(distance == 0, 0.0, distance / self.cells["limit"])

    def kind(self, at: int) -> Kind:
        return self.kinds[int(self.cells["kind"][at])]

    def name(self, at: int) -> str:
        return self.names[int(self.cells["name"][at])]

    def like(self, at: int, *keys: str) -> Flags:
        alike = [self.cells[key] == self.cells[key][at] for key in keys]
        return np.asarray(np.all(alike, axis=0))

    def of_base(self, base: str) -> Flags:
        are_of = np.array([kind.base == base for kind in self.kinds])
        return np.asarray(are_of[self.cells["kind"]])


def align(
    run: Reading, reference: Reading, noise: Sequence[Reading], words: Words
) -> tuple[Pairs, Tolerance, list[str]]:
    """Return the tensors of both runs with their distances, how tolerances came about, and notes.

    Raises `RecordError` if the runs have no kind of tensor, no tensor or no step in common.
    """
    tolerance.refuse_repeated(run, reference, noise)
    kinds, names = list(words.kinds), list(words.names)
    steps, both = _common(run, reference, noise, words)
    cells, values, found = _joined((run, reference, *noise), steps, both)
    _reorder_backward(cells, values, kinds)
    is_same_world = run.meta.get("ranks") == reference.meta.get("ranks")
    is_known, notes = _comparable(cells, values, found, words, is_same_world=is_same_world)
    notes += _kinds_of_some_runs(kinds, (run, reference, *noise))
    cells, values, found = cells[is_known], values[:, is_known], found[:, is_known]
    _need(cells, run, reference, "tensor", _RENAME)
    _measure(cells, values, kinds, run, reference)
    dtype = tolerance.coarsest((*run.dtypes.values(), *reference.dtypes.values()))
    drift, rule = _drift(cells, values, kinds, dtype)
    cells["undecided"] = drift > tolerance.DECIDED_BY_ROUNDING
    if noise:
        cells["limit"] = rule.times * drift + np.maximum(rule.least, cells["floor"])
    _place(cells, values[1], kinds, names, reference.chains)
    in_order = np.lexsort([cells["rank"], cells["place"], cells["step"]])
    cells, values, found = cells[in_order], values[1:, in_order, :3], found[2:, in_order]
    phases = np.array([kind.phase for kind in kinds])[cells["kind"]]
    if not noise:
        cells["limit"] = tolerance.grown(cells["step"], phases, cells["floor"])
        return Pairs(kinds, names, cells), rule, notes
    is_early = steps[0] <= (reference.meta.get("start_step") or 0) + tolerance.EARLY
    forward = (phases == "forward") & (cells["step"] == steps[0]) & is_early
    tolerance.refuse_unlike(
        noise, found, values, forward, lambda at: _tensor_text(words, cells[at])
    )
    if len(noise) < 3:  # noqa: PLR2004 # the trials had three
        notes.append(_FEW)
    return Pairs(kinds, names, cells), rule, notes


def _drift(
    cells: Any, values: Floats, kinds: Sequence[Kind], dtype: str
) -> tuple[Floats, Tolerance]:
    """Return how far rounding takes each tensor, by the noise runs or by its norm, and the rule of tolerances."""
    phases = np.array([kind.phase for kind in kinds])[cells["kind"]]
    # The tensors of one structure, such as a tuple, are one group.
    families = [(kind.base, kind.point) for kind in kinds]
    family = np.array([families.index(one) for one in families])[cells["kind"]]
    groups = cells["step"] * len(kinds) + family
    is_gradient, is_update = phases == "gradient", phases == "update"
    if len(values) > 2:  # noqa: PLR2004 # there are noise runs
        drift = tolerance.noise_of(values[2:, :, :3], values[1, :, :3])
        first = cells["step"] == cells["step"].min()
        forward = first & (phases == "forward")
        rule = tolerance.by_noise(drift[forward if forward.any() else first], dtype)
    else:
        drift = np.zeros(len(cells))
        drift[is_gradient] = tolerance.vanishing(
            cells["norm"][is_gradient], groups[is_gradient], dtype
        )
        rule = tolerance.by_rounding(dtype)
    tensors = cells["step"] * (1 + cells["name"].max()) + cells["name"]
    return tolerance.lifted(drift, groups, tensors, is_gradient, is_update), rule


def _measure(
    cells: Any, values: Floats, kinds: Sequence[Kind], run: Reading, reference: Reading
) -> None:
    """Set what the values say of each tensor alone: norms, distances, the rounding of its dtype."""
    of_modules = np.array([kind.of_modules for kind in kinds])[cells["kind"]]
    cells["norm"] = np.where(
        cells["state"] == MISSING_IN_REFERENCE, values[0, :, 0], values[1, :, 0]
    )
    cells["numel"] = values[1, :, 3]
    cells["floor"] = tolerance.floors(cells["name"], of_modules, (run.dtypes, reference.dtypes))
    cells["distance"] = tolerance.distances(values[0, :, :3], values[1, :, :3])
    # A gradient that does not come is like one of zeros.
    is_absent = (cells["state"] != BOTH) & (cells["norm"] == 0)
    cells["distance"][cells["state"] != BOTH] = np.inf
    cells["distance"][is_absent] = 0.0
    cells["shift"] = tolerance.distances(values[0, :, :1], values[1, :, :1])
    cells["finite"] = np.isfinite(values[:2, :, :3]).all(axis=2).T


def _comparable(
    cells: Any, values: Floats, found: Flags, words: Words, *, is_same_world: bool
) -> tuple[Flags, list[str]]:
    """Return which tensors are the same calls in all runs, and notes on the others."""
    kinds, names = list(words.kinds), list(words.names)
    of_modules = np.array([kind.of_modules for kind in kinds])[cells["kind"]]
    sizes = values[:2, :, 3]
    is_resized = of_modules & (sizes[0] != sizes[1]) & ~np.isnan(sizes).any(axis=0)
    cells["state"][is_resized & (cells["state"] == BOTH)] = RESIZED
    lone, odd = _unlike_calls(cells, found, kinds)
    rest = of_modules & ~odd & ~lone
    few = 2 * (is_resized & rest).sum() > rest.sum() or (odd.any() and not rest.any())
    if few or not is_same_world:
        return ~of_modules, [_OTHER_BATCHES]
    notes = []
    for state, where in ((MISSING_IN_REFERENCE, "run"), (MISSING_IN_RUN, "reference")):
        here = cells[lone & (cells["state"] == state)]
        texts = [kinds[cell["kind"]].text(names[cell["name"]]) for cell in here]
        if texts:
            tensors = shorten_names([*dict.fromkeys(texts)])
            notes.append(f"only in the {where}, so not compared: {printable(tensors)}")
    if odd.any():
        ran = shorten_names([names[name] for name in dict.fromkeys(cells["name"][odd].tolist())])
        at = ", ".join(map(str, np.unique(cells["step"][odd]).tolist()))
        notes.append(f"not compared in step {at}: {ran}, {_CALLED}")
    return ~(odd | lone), notes


def _unlike_calls(cells: Any, found: Flags, kinds: Sequence[Kind]) -> tuple[Flags, Flags]:
    """Return the tensors of modules that one run alone calls, and of those that runs call unlike numbers of times.

    A gradient that one run lacks is a difference if both runs have the tensor.
    """
    phases = np.array([kind.phase for kind in kinds])[cells["kind"]]
    forward, backward = phases == "forward", phases == "backward"
    keys = np.stack([cells[key] for key in ("step", "rank", "name")], axis=1)
    of_call = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    odd = (forward | backward) & _other_calls(cells, found)
    is_missing = np.isin(cells["state"], (MISSING_IN_RUN, MISSING_IN_REFERENCE)) & ~odd
    lone = is_missing & forward
    lone |= is_missing & backward & np.isin(of_call, of_call[lone])
    odd &= ~(backward & np.isin(of_call, of_call[forward & ~odd]))
    return lone, odd


def _kinds_of_some_runs(kinds: Sequence[Kind], readings: Sequence[Reading]) -> list[str]:
    bounds = [{*one.bound} for one in readings]
    if not (left := bounds[0].union(*bounds) - bounds[0].intersection(*bounds)):
        return []
    texts = ", ".join(" at ".join(kinds[kind]) for kind in sorted(left))
    return [f"not in all runs, so not compared: {texts}"]


def _common(
    run: Reading, reference: Reading, noise: Sequence[Reading], words: Words
) -> tuple[Ints, Flags]:
    common, steps = {*run.bound}, run.steps
    for one in (reference, *noise):
        common &= one.bound.keys()
        _need(common, run, one, "kind of tensor", "record both by `gradsurgeon:fingerprint@1`")
        steps = np.intersect1d(steps, one.steps)
        _need(steps, run, one, "step", "record the same steps, by `steps` or `start_step`")
    both = np.zeros((len(words.kinds), len(words.names)), bool)
    for kind in common:
        both[kind, list({*run.bound[kind]} & {*reference.bound[kind]})] = True
    _need(np.flatnonzero(both), run, reference, "name of a tensor", _RENAME)
    for one in noise:
        shared = [kind for kind in common if both[kind, one.bound[kind]].any()]
        _need(shared, reference, one, "name of a tensor", "give noise runs of the reference")
    return steps, both


def _tensor_text(words: Words, cell: Any) -> str:
    text = [*words.kinds][cell["kind"]].text([*words.names][cell["name"]])
    return f"{printable(text)} in step {cell['step']}"


def _other_calls(cells: Any, found: Flags) -> Flags:
    groups = np.cumsum(starts(cells)) - 1
    counts = np.array([np.bincount(groups, weights=here) for here in found])
    least = np.where(counts > 0, counts, np.inf).min(axis=0)
    return np.asarray((counts.max(axis=0) > least)[groups])


def _joined(readings: Sequence[Reading], steps: Ints, both: Flags) -> tuple[Any, Floats, Flags]:
    """Return the tensors of run and reference, their values, else NaN, and which runs have them."""
    sizes = [1 + max(int(one.cells[key].max()) for one in readings) for key in KEYS]
    codes = [np.ravel_multi_index([one.cells[key] for key in KEYS], sizes) for one in readings]
    union = np.union1d(codes[0], codes[1])
    index = dict(zip(KEYS, np.unravel_index(union, sizes), strict=True))
    chosen = np.isin(index["step"], steps) & both[index["kind"], index["name"]]
    union, cells = union[chosen], np.zeros(int(chosen.sum()), _PAIR)
    for key in KEYS:
        cells[key] = index[key][chosen]
    values = np.full((len(readings), len(union), 4), np.nan)
    found = np.zeros((len(readings), len(union)), bool)
    for number, (one, code) in enumerate(zip(readings, codes, strict=True)):
        _, here, there = np.intersect1d(union, code, assume_unique=True, return_indices=True)
        values[number, here], found[number, here] = one.cells["values"][there], True
    cells["state"] = np.where(found[0], BOTH, MISSING_IN_RUN)
    cells["state"][~found[1]] = MISSING_IN_REFERENCE
    return cells, values, found


def _reorder_backward(cells: Any, values: Floats, kinds: Sequence[Kind]) -> None:
    """Give the calls of a module in backward passes of the run the order that they have in the reference.

    One backward pass of two losses comes to the last call first; two backward passes come to the first.
    """
    begins = np.flatnonzero(starts(cells))
    ends = np.append(begins[1:], len(cells))
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        if end - begin == 1 or kinds[cells["kind"][begin]].phase != "backward":
            continue
        rows = values[:2, begin:end, :3]
        if not np.isfinite(rows).all():
            continue
        distances = np.abs(rows[0][:, None] - rows[1][None, :]).max(axis=2)
        nearest = distances.argmin(axis=0)
        is_other = distances.min(axis=0).max() * _NEARER < distances.diagonal().max()
        if is_other and len(np.unique(nearest)) == len(nearest):
            values[0, begin:end] = values[0, begin:end][nearest]


def _place(
    cells: Any, values: Floats, kinds: Sequence[Kind], names: Sequence[str], chains: Sequence[Any]
) -> None:
    kind_of = cells["kind"]
    phases = np.array([kind.phase for kind in kinds])[kind_of]
    forward = phases == "forward"
    begins = np.flatnonzero(starts(cells))
    rows = np.diff(np.append(begins, len(cells)))
    # The number of micro-batches divides how often each module runs in a step.
    parts = max(1, int(np.gcd.reduce(rows[forward[begins]], initial=0)))
    calls = np.maximum(1, np.repeat(rows, rows) // parts)
    of_params = np.isin(phases, ("gradient", "update"))
    calls[of_params] = cells["row"][of_params] + 1
    cells["part"], cells["call"] = cells["row"] // calls, cells["row"] % calls
    # The backward pass comes to the last call first.
    back = phases == "backward"
    cells["call"][back] = (calls - 1 - cells["call"])[back]
    most: dict[str, int] = {}
    rows_of = np.stack([kind_of, *(cells[key] for key in ("name", "call", "part")), calls], axis=1)
    unique, which = np.unique(rows_of, axis=0, return_inverse=True)
    for kind, name, _, _, number in unique.tolist():
        if kinds[kind].of_modules:
            most[names[name]] = max(most.get(names[name], 0), number)
    numbers: dict[order.Event, order.Numbers] = {}
    first = forward & (cells["step"] == cells["step"].min()) & (cells["part"] == 0)
    for at in np.flatnonzero(first).tolist():
        is_output = kinds[kind_of[at]].base == "output"
        event = is_output, names[cells["name"][at]], int(cells["call"][at])
        numbers.setdefault(event, tuple(values[at, :3].tolist()))
    inside = [[name for name in chain if name in most] for chain in chains]
    modules = order.merged(inside, [name for name in names if name in most])
    events = order.forward_order(modules, most, numbers)
    owners = [events.get((True, order.parent_of(name, most), 0), -1) for name in names]

    def place_of(kind: int, name: int, turn: int, part: int) -> int:
        phase, size = kinds[kind].phase, len(events)
        if phase == "update":
            return 3 * _LATE + name
        if phase == "gradient":  # the backward pass reaches the last module first
            return (1 + kinds[kind].is_final) * _LATE + (size - owners[name]) * len(names) + name
        place = events[kinds[kind].base.startswith("output"), names[name], turn]
        return 2 * size * part + (place if phase == "forward" else 2 * size - 1 - place)

    places = np.array([place_of(*one[:4]) for one in unique.tolist()])
    cells["place"] = places[which.reshape(-1)]


def _need(common: Any, run: Reading, other: Reading, what: str, remedy: str) -> None:
    if len(common) == 0:
        paths = f"{printable(run.path)} and {printable(other.path)}"
        raise RecordError(f"{paths} have no {what} in common: {remedy}")
