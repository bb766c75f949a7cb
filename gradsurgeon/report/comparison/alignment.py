"""Two runs side by side: the same tensors of the same steps, in the order of execution. Needs numpy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradsurgeon.errors import RecordError, printable, shorten_names
from gradsurgeon.report.comparison import order, tolerance
from gradsurgeon.report.comparison.reading import KEYS, STATS, Kind, Reading, Words, starts
from gradsurgeon.report.comparison.tolerance import Tolerance
from gradsurgeon.report.spikes import Flags, Floats, Ints

# What became of a tensor: it is in one run only, or has another number of elements.
BOTH, MISSING_IN_RUN, MISSING_IN_REFERENCE, RESIZED = range(4)
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


def pair_fields(readings: int) -> Any:
    """Return the dtype of what is known of a tensor of one step, given the number of runs."""
    return np.dtype(
        [
            *((key, np.int64) for key in KEYS),
            ("phase", "U8"),
            ("values", np.float64, (readings, len(STATS))),  # NaN where a run lacks the tensor
            ("found", bool, readings),  # whether each run has it
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
        ]
    )


def of_modules(cells: Any) -> Flags:
    return np.isin(cells["phase"], ("forward", "backward"))


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

    def text(self, at: int) -> str:
        return self.kind(at).text(self.name(at))

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
    readings = (run, reference, *noise)
    pairs = Pairs(list(words.kinds), list(words.names), _joined(readings, words))
    _reorder_backward(pairs.cells)
    is_same_world = run.meta.get("ranks") == reference.meta.get("ranks")
    is_known, notes = _comparable(pairs, is_same_world=is_same_world)
    notes += _kinds_of_some_runs(pairs.kinds, readings)
    pairs = replace(pairs, cells=pairs.cells[is_known])
    _need(pairs.cells, run, reference, "tensor", _RENAME)
    _measure(pairs, run, reference)
    dtype = tolerance.coarsest((*run.dtypes.values(), *reference.dtypes.values()))
    drift, rule = _drift(pairs, dtype, is_measured=bool(noise))
    pairs.cells["undecided"] = drift > tolerance.DECIDED_BY_ROUNDING
    pairs.cells["limit"] = rule.times * drift + np.maximum(rule.least, pairs.cells["floor"])
    _place(pairs, reference.chains)
    in_order = np.lexsort([pairs.cells[key] for key in ("rank", "place", "step")])
    pairs = replace(pairs, cells=pairs.cells[in_order])
    cells = pairs.cells
    if not noise:
        cells["limit"] = tolerance.grown(cells["step"], cells["phase"], cells["floor"])
        return pairs, rule, notes
    first = cells["step"].min()
    is_early = first <= (reference.meta.get("start_step") or 0) + tolerance.EARLY
    forward = (cells["phase"] == "forward") & (cells["step"] == first) & is_early

    def text_of(at: int) -> str:
        return f"{printable(pairs.text(at))} in step {cells['step'][at]}"

    tolerance.refuse_unlike(noise, cells, forward, text_of)
    if len(noise) < 3:  # noqa: PLR2004 # the trials had three
        notes.append(_FEW)
    return pairs, rule, notes


def _drift(pairs: Pairs, dtype: str, *, is_measured: bool) -> tuple[Floats, Tolerance]:
    """Return how far rounding takes each tensor, by the noise runs or by its norm, and the rule of tolerances."""
    cells = pairs.cells
    groups = cells["step"] * len(pairs.kinds) + cells["kind"]
    is_gradient = cells["phase"] == "gradient"
    if is_measured:
        drift = tolerance.noise_of(cells["values"][:, 2:, :3], cells["values"][:, 1, :3])
        first = cells["step"] == cells["step"].min()
        forward = first & (cells["phase"] == "forward")
        rule = tolerance.by_noise(drift[forward if forward.any() else first], dtype)
    else:
        drift = np.zeros(len(cells))
        norms = cells["norm"][is_gradient]
        drift[is_gradient] = tolerance.vanishing(norms, groups[is_gradient], dtype)
        rule = tolerance.by_rounding(dtype)
    tensors = cells["step"] * len(pairs.names) + cells["name"]
    is_update = cells["phase"] == "update"
    return tolerance.lifted(drift, groups, tensors, is_gradient, is_update), rule


def _measure(pairs: Pairs, run: Reading, reference: Reading) -> None:
    """Set what the values say of each tensor alone: norms, distances, the rounding of its dtype."""
    cells = pairs.cells
    ours = cells["values"][:, 0, :3]
    theirs = cells["values"][:, 1, :3]
    cells["norm"] = np.where(cells["state"] == MISSING_IN_REFERENCE, ours[:, 0], theirs[:, 0])
    cells["numel"] = cells["values"][:, 1, 3]
    names = map(pairs.name, range(len(cells)))
    cells["floor"] = tolerance.floors(names, of_modules(cells), (run.dtypes, reference.dtypes))
    cells["distance"] = tolerance.distances(ours, theirs)
    # A gradient that does not come is like one of zeros.
    is_other = cells["state"] != BOTH
    cells["distance"][is_other] = np.where(cells["norm"][is_other] == 0, 0.0, np.inf)
    cells["shift"] = tolerance.distances(ours[:, :1], theirs[:, :1])


def _comparable(pairs: Pairs, *, is_same_world: bool) -> tuple[Flags, list[str]]:
    """Return which tensors are the same calls in all runs, and notes on the others."""
    cells = pairs.cells
    is_of_module = of_modules(cells)
    sizes = cells["values"][:, :2, 3]
    is_resized = is_of_module & (sizes[:, 0] != sizes[:, 1]) & ~np.isnan(sizes).any(axis=1)
    cells["state"][is_resized & (cells["state"] == BOTH)] = RESIZED
    lone, odd = _unlike_calls(cells)
    rest = is_of_module & ~odd & ~lone
    few = 2 * (is_resized & rest).sum() > rest.sum() or (odd.any() and not rest.any())
    if few or not is_same_world:
        return ~is_of_module, [_OTHER_BATCHES]
    notes = []
    for state, where in ((MISSING_IN_REFERENCE, "run"), (MISSING_IN_RUN, "reference")):
        here = np.flatnonzero(lone & (cells["state"] == state)).tolist()
        if here:
            tensors = shorten_names(list(dict.fromkeys(map(pairs.text, here))))
            notes.append(f"only in the {where}, so not compared: {printable(tensors)}")
    if odd.any():
        names = dict.fromkeys(map(pairs.name, np.flatnonzero(odd).tolist()))
        at = ", ".join(map(str, np.unique(cells["step"][odd]).tolist()))
        notes.append(f"not compared in step {at}: {shorten_names(list(names))}, {_CALLED}")
    return ~(odd | lone), notes


def _unlike_calls(cells: Any) -> tuple[Flags, Flags]:
    """Return the tensors of modules that one run alone calls, and of those that runs call unlike numbers of times.

    A gradient that one run lacks is a difference if both runs have the tensor.
    """
    forward = cells["phase"] == "forward"
    backward = cells["phase"] == "backward"
    keys = np.stack([cells[key] for key in ("step", "rank", "name")], axis=1)
    of_call = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    odd = (forward | backward) & _other_calls(cells)
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


def _common(readings: Sequence[Reading], words: Words) -> tuple[Ints, Flags]:
    """Return the steps of all runs, and which names of which kind run and reference have."""
    run, reference, *noise = readings
    common = set(run.bound)
    steps = run.steps
    for one in readings[1:]:
        common &= one.bound.keys()
        _need(common, run, one, "kind of tensor", "record both by `gradsurgeon:fingerprint@1`")
        steps = np.intersect1d(steps, one.steps)
        _need(steps, run, one, "step", "record the same steps, by `steps` or `start_step`")
    both = np.zeros((len(words.kinds), len(words.names)), bool)
    for kind in common:
        both[kind, list(run.bound[kind] & reference.bound[kind])] = True
    _need(np.flatnonzero(both), run, reference, "name of a tensor", _RENAME)
    for one in noise:
        shared = [kind for kind in common if both[kind, list(one.bound[kind])].any()]
        _need(shared, reference, one, "name of a tensor", "give noise runs of the reference")
    return steps, both


def _other_calls(cells: Any) -> Flags:
    groups = np.cumsum(starts(cells)) - 1
    counts = np.array([np.bincount(groups, weights=here) for here in cells["found"].T])
    least = np.where(counts > 0, counts, np.inf).min(axis=0)
    return np.asarray((counts.max(axis=0) > least)[groups])


def _joined(readings: Sequence[Reading], words: Words) -> Any:
    """Return the tensors of run and reference in the steps of all runs, with the values of each run."""
    steps, both = _common(readings, words)
    sizes = [1 + max(int(one.cells[key].max()) for one in readings) for key in KEYS]
    codes = [np.ravel_multi_index([one.cells[key] for key in KEYS], sizes) for one in readings]
    union = np.union1d(codes[0], codes[1])
    index = dict(zip(KEYS, np.unravel_index(union, sizes), strict=True))
    chosen = np.isin(index["step"], steps) & both[index["kind"], index["name"]]
    union = union[chosen]
    cells: Any = np.zeros(len(union), pair_fields(len(readings)))
    for key in KEYS:
        cells[key] = index[key][chosen]
    cells["values"] = np.nan
    for number, (one, code) in enumerate(zip(readings, codes, strict=True)):
        _, here, there = np.intersect1d(union, code, assume_unique=True, return_indices=True)
        cells["values"][here, number] = one.cells["values"][there]
        cells["found"][here, number] = True
    cells["state"] = np.where(cells["found"][:, 0], BOTH, MISSING_IN_RUN)
    cells["state"][~cells["found"][:, 1]] = MISSING_IN_REFERENCE
    cells["phase"] = np.array([kind.phase for kind in words.kinds])[cells["kind"]]
    return cells


def _reorder_backward(cells: Any) -> None:
    """Give the calls of a module in backward passes of the run the order that they have in the reference.

    One backward pass of two losses comes to the last call first; two backward passes come to the first.
    """
    begins = np.flatnonzero(starts(cells))
    for calls in np.split(cells, begins[1:]):
        if len(calls) < 2 or calls["phase"][0] != "backward":  # noqa: PLR2004 # to reorder
            continue
        rows = calls["values"][:, :2, :3]
        if not np.isfinite(rows).all():
            continue
        distances = np.abs(rows[:, None, 0] - rows[None, :, 1]).max(axis=2)
        nearest = distances.argmin(axis=0)
        is_other = distances.min(axis=0).max() * _NEARER < distances.diagonal().max()
        if is_other and len(np.unique(nearest)) == len(nearest):
            calls["values"][:, 0] = calls["values"][nearest, 0]


def _place(pairs: Pairs, chains: Sequence[Sequence[str]]) -> None:
    """Set micro-batch, call and place within the step of each tensor."""
    cells = pairs.cells
    names = pairs.names
    forward = cells["phase"] == "forward"
    begins = np.flatnonzero(starts(cells))
    rows = np.diff(np.append(begins, len(cells)))
    # The number of micro-batches divides how often each module runs in a step.
    parts = max(1, int(np.gcd.reduce(rows[forward[begins]], initial=0)))
    calls = np.maximum(1, np.repeat(rows, rows) // parts)
    is_of_param = ~of_modules(cells)
    calls[is_of_param] = cells["row"][is_of_param] + 1
    cells["part"] = cells["row"] // calls
    cells["call"] = cells["row"] % calls
    # The backward pass comes to the last call first.
    back = cells["phase"] == "backward"
    cells["call"][back] = (calls - 1 - cells["call"])[back]
    counts = np.stack([cells["name"], calls], axis=1)[~is_of_param]
    # The largest number of calls of a module comes last.
    most = {names[name]: number for name, number in np.unique(counts, axis=0).tolist()}
    numbers: dict[order.Event, order.Numbers] = {}
    first = forward & (cells["step"] == cells["step"].min()) & (cells["part"] == 0)
    for at in np.flatnonzero(first).tolist():
        is_output = pairs.kind(at).base == "output"
        event = is_output, pairs.name(at), int(cells["call"][at])
        numbers.setdefault(event, tuple(cells["values"][at, 1, :3].tolist()))
    inside = [[name for name in chain if name in most] for chain in chains]
    modules = order.merged(inside, [name for name in names if name in most])
    events = order.forward_order(modules, most, numbers)
    size = len(events)
    owners = [events.get((True, order.parent_of(name, most), 0), -1) for name in names]

    def place_of(at: int) -> int:
        kind = pairs.kind(at)
        name = int(cells["name"][at])
        if kind.phase == "update":
            return 3 * _LATE + name
        if kind.phase == "gradient":  # the backward pass reaches the last module first
            return (1 + kind.is_final) * _LATE + (size - owners[name]) * len(names) + name
        event = kind.base.startswith("output"), names[name], int(cells["call"][at])
        place = events[event]
        if kind.phase == "backward":
            place = 2 * size - 1 - place
        return 2 * size * int(cells["part"][at]) + place

    cells["place"] = [place_of(at) for at in range(len(cells))]


def _need(common: Any, run: Reading, other: Reading, what: str, remedy: str) -> None:
    if len(common) == 0:
        paths = f"{printable(run.path)} and {printable(other.path)}"
        raise RecordError(f"{paths} have no {what} in common: {remedy}")
