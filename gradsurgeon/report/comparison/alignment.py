"""Two runs side by side: the same tensors of the same steps, in the order of execution. Needs numpy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradsurgeon.errors import RecordError, printable, shorten_names
from gradsurgeon.report.comparison import calls, order, tolerance
from gradsurgeon.report.comparison.reading import (
    KEY_FIELDS,
    KEYS,
    STATS,
    Kind,
    Reading,
    Words,
    starts,
)
from gradsurgeon.report.comparison.tolerance import Tolerance
from gradsurgeon.report.spikes import Flags, Floats, Ints

# What became of a tensor: it is in one run only, or has another number of elements.
BOTH = 0
MISSING_IN_RUN = 1
MISSING_IN_REFERENCE = 2
RESIZED = 3
# Gradients come after the forward and backward passes of all micro-batches, updates after all gradients.
_LATE = 2**40
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
            *KEY_FIELDS,
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
        is_far = self.cells["distance"] > self.cells["limit"]
        return np.asarray(is_far & ~self.cells["undecided"])

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

    def texts(self, places: Ints) -> list[str]:
        """Return the texts of some tensors, each once."""
        return list(dict.fromkeys(self.text(at) for at in places.tolist()))

    def like(self, at: int, *keys: str) -> Flags:
        """Tell which tensors have these keys of a tensor."""
        alike = np.ones(len(self.cells), bool)
        for key in keys:
            column = self.cells[key]
            alike &= column == column[at]
        return alike

    def of_base(self, base: str) -> Flags:
        are_of_base = np.array([kind.base == base for kind in self.kinds])
        return np.asarray(are_of_base[self.cells["kind"]])


def align(
    run: Reading, reference: Reading, noise: Sequence[Reading], words: Words
) -> tuple[Pairs, Tolerance, list[str]]:
    """Return the tensors of both runs with their distances, how tolerances came about, and notes.

    Raises `RecordError` if the runs have no kind of tensor, no tensor or no step in common.
    """
    tolerance.refuse_repeated(run, reference, noise)
    readings = [run, reference, *noise]
    pairs = Pairs(list(words.kinds), list(words.names), _joined(readings, words))
    calls.reorder_backward(pairs.cells)
    is_same_world = run.meta.get("ranks") == reference.meta.get("ranks")
    is_known, notes = _comparable(pairs, is_same_world=is_same_world)
    notes += _kinds_of_some_runs(pairs.kinds, readings)
    pairs = replace(pairs, cells=pairs.cells[is_known])
    _need(pairs.cells, run, reference, "tensor", _RENAME)
    _measure(pairs, run, reference)
    dtype = tolerance.coarsest([*run.dtypes.values(), *reference.dtypes.values()])
    drift, rule = _drift(pairs, dtype, is_measured=bool(noise))
    cells = pairs.cells
    cells["undecided"] = drift > tolerance.DECIDED_BY_ROUNDING
    cells["limit"] = rule.times * drift + np.maximum(rule.least, cells["floor"])
    _place(pairs, reference.chains)
    cells = cells[np.lexsort([cells["rank"], cells["place"], cells["step"]])]
    pairs = replace(pairs, cells=cells)
    if not noise:
        cells["limit"] = tolerance.grown(cells["step"], cells["phase"], cells["floor"])
        return pairs, rule, notes
    _refuse_unlike(noise, pairs, reference)
    if len(noise) < 3:  # noqa: PLR2004 # the trials had three
        notes.append(_FEW)
    return pairs, rule, notes


def _refuse_unlike(noise: Sequence[Reading], pairs: Pairs, reference: Reading) -> None:
    """Refuse noise runs that differ from the reference by more than rounding can in the first forward pass."""
    cells = pairs.cells
    first = cells["step"].min()
    start = reference.meta.get("start_step") or 0
    is_early = first <= start + tolerance.EARLY
    forward = (cells["phase"] == "forward") & (cells["step"] == first) & is_early

    def text_of(at: int) -> str:
        return f"{printable(pairs.text(at))} in step {cells['step'][at]}"

    tolerance.refuse_unlike(noise, cells, forward, text_of)


def _drift(pairs: Pairs, dtype: str, *, is_measured: bool) -> tuple[Floats, Tolerance]:
    """Return how far rounding takes each tensor, by the noise runs or by its norm, and the rule of tolerances."""
    cells = pairs.cells
    steps = cells["step"]
    phases = cells["phase"]
    groups = steps * len(pairs.kinds) + cells["kind"]
    is_gradient = phases == "gradient"
    if is_measured:
        values = cells["values"][:, :, :3]
        drift = tolerance.noise_of(values[:, 2:], values[:, 1])
        first = steps == steps.min()
        forward = first & (phases == "forward")
        shown = forward if forward.any() else first
        rule = tolerance.by_noise(drift[shown], dtype)
    else:
        drift = np.zeros(len(cells))
        norms = cells["norm"][is_gradient]
        drift[is_gradient] = tolerance.vanishing(norms, groups[is_gradient], dtype)
        rule = tolerance.by_rounding(dtype)
    tensors = steps * len(pairs.names) + cells["name"]
    return tolerance.lifted(drift, groups, tensors, is_gradient, phases == "update"), rule


def _measure(pairs: Pairs, run: Reading, reference: Reading) -> None:
    """Set what the values say of each tensor alone: norms, distances, the rounding of its dtype."""
    cells = pairs.cells
    state = cells["state"]
    ours = cells["values"][:, 0, :3]
    theirs = cells["values"][:, 1, :3]
    cells["norm"] = np.where(state == MISSING_IN_REFERENCE, ours[:, 0], theirs[:, 0])
    cells["numel"] = cells["values"][:, 1, 3]
    names = np.array(pairs.names)[cells["name"]]
    cells["floor"] = tolerance.floors(names, of_modules(cells), (run.dtypes, reference.dtypes))
    distances = tolerance.distances(ours, theirs)
    # A missing gradient is like a gradient of zeros.
    is_other = state != BOTH
    distances[is_other] = np.where(cells["norm"][is_other] == 0, 0.0, np.inf)
    cells["distance"] = distances
    cells["shift"] = tolerance.distances(ours[:, :1], theirs[:, :1])


def _comparable(pairs: Pairs, *, is_same_world: bool) -> tuple[Flags, list[str]]:
    """Return which tensors are the same calls in all runs, and notes on the others."""
    cells = pairs.cells
    is_of_module = of_modules(cells)
    _mark_resized(cells, is_of_module)
    in_one_run, unlike = _unlike_calls(cells)
    alike = is_of_module & ~unlike & ~in_one_run
    resized = (cells["state"] == RESIZED) & alike
    are_most_resized = 2 * resized.sum() > alike.sum()
    are_all_unlike = unlike.any() and not alike.any()
    if are_most_resized or are_all_unlike or not is_same_world:
        return ~is_of_module, [_OTHER_BATCHES]
    notes = []
    for state, where in ((MISSING_IN_REFERENCE, "run"), (MISSING_IN_RUN, "reference")):
        places = np.flatnonzero(in_one_run & (cells["state"] == state))
        if len(places):
            tensors = printable(shorten_names(pairs.texts(places)))
            notes.append(f"only in the {where}, so not compared: {tensors}")
    if unlike.any():
        names = dict.fromkeys(pairs.names[name] for name in cells["name"][unlike].tolist())
        steps = ", ".join(map(str, np.unique(cells["step"][unlike]).tolist()))
        notes.append(f"not compared in step {steps}: {shorten_names(list(names))}, {_CALLED}")
    return ~(unlike | in_one_run), notes


def _mark_resized(cells: Any, is_of_module: Flags) -> None:
    sizes = cells["values"][:, :2, 3]
    is_known = ~np.isnan(sizes).any(axis=1)
    is_other = sizes[:, 0] != sizes[:, 1]
    cells["state"][is_of_module & is_known & is_other] = RESIZED


def _unlike_calls(cells: Any) -> tuple[Flags, Flags]:
    """Return the tensors of modules that one run alone calls, and of those that runs call unlike numbers of times.

    A gradient that one run lacks is a difference if both runs have the tensor.
    """
    forward = cells["phase"] == "forward"
    backward = cells["phase"] == "backward"
    keys = np.stack([cells["step"], cells["rank"], cells["name"]], axis=1)
    of_call = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    unlike = (forward | backward) & calls.other_numbers(cells)
    is_missing = np.isin(cells["state"], (MISSING_IN_RUN, MISSING_IN_REFERENCE)) & ~unlike
    in_one_run = is_missing & forward
    in_one_run |= is_missing & backward & np.isin(of_call, of_call[in_one_run])
    unlike &= ~(backward & np.isin(of_call, of_call[forward & ~unlike]))
    return in_one_run, unlike


def _kinds_of_some_runs(kinds: Sequence[Kind], readings: Sequence[Reading]) -> list[str]:
    in_some: set[int] = set()
    in_all = set(readings[0].bound)
    for reading in readings:
        in_some |= reading.bound.keys()
        in_all &= reading.bound.keys()
    if in_some == in_all:
        return []
    texts = ", ".join(" at ".join(kinds[kind]) for kind in sorted(in_some - in_all))
    return [f"not in all runs, so not compared: {texts}"]


def _common(readings: Sequence[Reading], words: Words) -> tuple[Ints, Flags]:
    """Return the steps of all runs, and which names of which kind run and reference have."""
    run, reference, *noise = readings
    common = set(run.bound)
    steps = run.steps
    for other in readings[1:]:
        common &= other.bound.keys()
        _need(common, run, other, "kind of tensor", "record both by `gradsurgeon:fingerprint@1`")
        steps = np.intersect1d(steps, other.steps)
        _need(steps, run, other, "step", "record the same steps, by `steps` or `start_step`")
    both = np.zeros((len(words.kinds), len(words.names)), bool)
    for kind in common:
        both[kind, list(run.bound[kind] & reference.bound[kind])] = True
    _need(np.flatnonzero(both), run, reference, "name of a tensor", _RENAME)
    for repetition in noise:
        shared = [kind for kind in common if both[kind, list(repetition.bound[kind])].any()]
        _need(shared, reference, repetition, "name of a tensor", "give noise runs of the reference")
    return steps, both


def _joined(readings: Sequence[Reading], words: Words) -> Any:
    """Return the tensors of run and reference in the steps of all runs, with the values of each run."""
    steps, both = _common(readings, words)
    sizes = []
    for key in KEYS:
        largest = 0
        for reading in readings:
            largest = max(largest, int(reading.cells[key].max()))
        sizes.append(largest + 1)
    # A code for step, kind, rank, name and row of each cell.
    codes = []
    for reading in readings:
        keys = [reading.cells[key] for key in KEYS]
        codes.append(np.ravel_multi_index(keys, sizes))
    union = np.union1d(codes[0], codes[1])
    index = dict(zip(KEYS, np.unravel_index(union, sizes), strict=True))
    chosen = np.isin(index["step"], steps) & both[index["kind"], index["name"]]
    union = union[chosen]
    cells: Any = np.zeros(len(union), pair_fields(len(readings)))
    for key in KEYS:
        cells[key] = index[key][chosen]
    values = cells["values"]
    is_in_run = cells["found"]
    values[:] = np.nan
    for number, reading in enumerate(readings):
        _, places, rows = np.intersect1d(
            union, codes[number], assume_unique=True, return_indices=True
        )
        values[places, number] = reading.cells["values"][rows]
        is_in_run[places, number] = True
    cells["state"] = np.where(is_in_run[:, 0], BOTH, MISSING_IN_RUN)
    cells["state"][~is_in_run[:, 1]] = MISSING_IN_REFERENCE
    phases = np.array([kind.phase for kind in words.kinds])
    cells["phase"] = phases[cells["kind"]]
    return cells


def _place(pairs: Pairs, chains: Sequence[Sequence[str]]) -> None:
    """Set micro-batch, call and place within the step of each tensor."""
    cells = pairs.cells
    names = pairs.names
    most = _set_calls(pairs)
    numbers = _numbers_of_events(pairs)
    modules = order.merged(chains, [name for name in names if name in most])
    events = order.forward_order(modules, most, numbers)
    size = len(events)
    # Where the module of each parameter ends.
    ends = [events.get((True, order.parent_of(name, most), 0), -1) for name in names]
    for at in range(len(cells)):
        kind = pairs.kind(at)
        name = int(cells["name"][at])
        phase = kind.phase
        if phase == "update":
            place = 3 * _LATE + name
        elif phase == "gradient":
            place = (1 + kind.is_final) * _LATE
            # The backward pass reaches the last module first.
            place += (size - ends[name]) * len(names) + name
        else:
            is_output = kind.base.startswith("output")
            place = events[is_output, names[name], int(cells["call"][at])]
            if phase == "backward":
                place = 2 * size - 1 - place
            place += 2 * size * int(cells["part"][at])
        cells["place"][at] = place


def _set_calls(pairs: Pairs) -> dict[str, int]:
    """Set micro-batch and call of each tensor, and return the largest number of calls of each module."""
    cells = pairs.cells
    phases = cells["phase"]
    begins = np.flatnonzero(starts(cells))
    rows = np.diff(np.append(begins, len(cells)))
    # The number of micro-batches divides how often each module runs in a step.
    forward_rows = rows[phases[begins] == "forward"]
    parts = max(1, int(np.gcd.reduce(forward_rows, initial=0)))
    calls_of_part = np.maximum(1, np.repeat(rows, rows) // parts)
    is_of_module = of_modules(cells)
    calls_of_part[~is_of_module] = cells["row"][~is_of_module] + 1
    cells["part"] = cells["row"] // calls_of_part
    cells["call"] = cells["row"] % calls_of_part
    # The backward pass comes to the last call first.
    back = phases == "backward"
    cells["call"][back] = (calls_of_part - 1 - cells["call"])[back]
    counts = np.stack([cells["name"], calls_of_part], axis=1)[is_of_module]
    most = {}
    # The largest number of calls of a module comes last.
    for name, number in np.unique(counts, axis=0).tolist():
        most[pairs.names[name]] = number
    return most


def _numbers_of_events(pairs: Pairs) -> dict[order.Event, order.Numbers]:
    """Return norm and projections of inputs and outputs in the first forward pass of the reference."""
    cells = pairs.cells
    is_first = (cells["step"] == cells["step"].min()) & (cells["part"] == 0)
    forward = is_first & (cells["phase"] == "forward")
    numbers: dict[order.Event, order.Numbers] = {}
    for at in np.flatnonzero(forward).tolist():
        is_output = pairs.kind(at).base == "output"
        event = is_output, pairs.name(at), int(cells["call"][at])
        numbers.setdefault(event, tuple(cells["values"][at, 1, :3].tolist()))
    return numbers


def _need(common: Any, run: Reading, other: Reading, what: str, remedy: str) -> None:
    if len(common) == 0:
        paths = f"{printable(run.path)} and {printable(other.path)}"
        raise RecordError(f"{paths} have no {what} in common: {remedy}")
