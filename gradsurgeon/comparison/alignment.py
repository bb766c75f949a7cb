"""Two runs side by side: the same tensors of the same steps, in the order in which they came about. Needs numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradsurgeon.comparison import order, tolerance
from gradsurgeon.comparison.reading import Cells, Kind, Reading
from gradsurgeon.comparison.tolerance import Tolerance
from gradsurgeon.errors import RecordError, printable
from gradsurgeon.planning.table import count
from gradsurgeon.report.sheets import Flags
from gradsurgeon.report.spikes import Floats, Ints

# What became of a tensor: a missing one has rows in one run only, a resized one another number of elements.
BOTH, MISSING_IN_RUN, MISSING_IN_REFERENCE, RESIZED = range(4)
# Gradients come after all forward and backward passes of a step.
_LATE = 2**40


@dataclass(frozen=True)
class Pairs:
    """The tensors of two runs, in the order of execution. All arrays have the shape `[tensors]`.

    Attributes:
        kinds: the kinds of tensors.
        names: the names of each kind.
        kind: of each tensor its kind, a place in `kinds`.
        name: its name, a place in the names of its kind.
        step: its step.
        rank: its rank.
        part: its micro-batch.
        call: its call within the micro-batch.
        place: its place among all tensors of a step.
        state: `BOTH`, or why the tensors have no distance.
        distance: how far the runs are apart, relative to the norm.
        limit: the distance that is allowed.
        undecided: whether rounding decides the tensor.
        norms: the norms in both runs, of shape `[tensors, 2]`.
    """

    kinds: tuple[Kind, ...]
    names: tuple[tuple[str, ...], ...]
    kind: Ints
    name: Ints
    step: Ints
    rank: Ints
    part: Ints
    call: Ints
    place: Ints
    state: Ints
    distance: Floats
    limit: Floats
    undecided: Flags
    norms: Floats

    @property
    def apart(self) -> Flags:
        return (self.distance > self.limit) & ~self.undecided

    @property
    def ratio(self) -> Floats:
        """How many times the allowed distance a tensor is away; where none is allowed, 0 or infinite."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self.distance == 0, 0.0, self.distance / self.limit)

    def phase(self, place: int) -> str:
        return self.kinds[self.kind[place]].phase


@dataclass(frozen=True)
class _Joined:
    """The tensors of one kind in both runs and in all noise runs, sorted by step, rank, name and row."""

    names: tuple[str, ...]
    index: Ints  # step, rank, name, row; of shape [4, tensors]
    state: Ints
    run: Floats
    reference: Floats
    noise: list[Floats]


def _codes(cells: Cells, names: Sequence[str], steps: Ints, sizes: Sequence[int]) -> Any:
    """Return one number for each cell, and the cells that have a step and a name in common with the other run."""
    name = cells.named(names)
    chosen = np.flatnonzero((name >= 0) & np.isin(cells.step, steps))
    place = np.searchsorted(steps, cells.step[chosen])
    index = (place, cells.rank[chosen], name[chosen], cells.row[chosen])
    return np.ravel_multi_index(index, sizes), chosen


def _join(run: Cells, reference: Cells, noise: Sequence[Cells | None], steps: Ints) -> _Joined:
    there = set(run.names)
    names = tuple(name for name in reference.names if name in there)
    all_cells = [run, reference, *(one for one in noise if one is not None)]
    tops = [max(int(getattr(one, key).max()) for one in all_cells) + 1 for key in ("rank", "row")]
    sizes = (max(1, len(steps)), tops[0], max(1, len(names)), tops[1])
    (code_a, at_a), (code_b, at_b) = (_codes(one, names, steps, sizes) for one in (run, reference))
    codes = np.union1d(code_a, code_b)

    def spread(cells: Cells, code: Ints, at: Ints) -> Floats:
        values = np.full((len(codes), cells.values.shape[1]), np.nan)
        known = np.isin(code, codes)
        values[np.searchsorted(codes, code[known])] = cells.values[at[known]]
        return values

    state = np.full(len(codes), BOTH)
    state[~np.isin(codes, code_a)] = MISSING_IN_RUN
    state[~np.isin(codes, code_b)] = MISSING_IN_REFERENCE
    place, rank, name, row = np.unravel_index(codes, sizes)
    index = np.stack([steps[place] if len(codes) else place, rank, name, row])
    spreads = [spread(run, code_a, at_a), spread(reference, code_b, at_b)]
    noises = [spread(one, *_codes(one, names, steps, sizes)) for one in noise if one is not None]
    return _Joined(names, index, state, spreads[0], spreads[1], noises)


def align(
    run: Reading, reference: Reading, noise: Sequence[Reading]
) -> tuple[Pairs, Tolerance, list[str]]:
    """Return the tensors of both runs with their distances, how tolerances came about, and notes.

    Raises:
        RecordError: the runs have no rules, tensors or steps in common.
    """
    kinds = [kind for kind in reference.kinds if kind in run.kinds]
    _refuse_if(not kinds, run, reference, _told_kinds)
    steps = np.intersect1d(run.steps, reference.steps)
    _refuse_if(not len(steps), run, reference, _told_steps)
    for one in noise:
        both = np.intersect1d(steps, one.steps)
        _refuse_if(not len(both), one, reference, _told_steps)
        steps = both
    joined, notes, unlike = {}, list[str](), False
    for kind in kinds:
        extra = [one.kinds.get(kind) for one in noise]
        found = _join(run.kinds[kind], reference.kinds[kind], extra, steps)
        if kind.of_modules and _is_unlike(found):
            unlike = True
        elif found.names and found.index.size:
            joined[kind] = found
    if unlike or run.ranks != reference.ranks:
        joined = {kind: found for kind, found in joined.items() if not kind.of_modules}
        notes.append(_why_params_only(run, reference))
    _refuse_if(not joined, run, reference, _told_names)
    drifts = {
        kind: tolerance.noise_of(one.noise, one.reference, one.index[0])
        for kind, one in joined.items()
    }
    first = [drift[joined[kind].index[0] == steps[0]] for kind, drift in drifts.items()]
    rule = tolerance.tolerance_of(run, reference, first if noise else [])
    notes += [doubt] if (doubt := tolerance.few(noise)) else []
    return _pairs(joined, drifts, rule, reference), rule, notes


def _is_unlike(found: _Joined) -> bool:
    """Return whether most modules have other numbers of calls, or of elements: another division of the batch."""
    both = found.state == BOTH
    if not len(both) or 2 * both.sum() <= len(both):
        return bool(len(both))
    a, b = found.run[both, 3], found.reference[both, 3]
    return bool(2 * ((a != b) & ~np.isnan(a) & ~np.isnan(b)).sum() > len(a))


def _why_params_only(run: Reading, reference: Reading) -> str:
    only = "only gradients and weights are compared"
    local = "batch norm and other statistics of a batch differ truly between such runs"
    if run.ranks != reference.ranks:
        return f"{only}: {run.ranks} and {reference.ranks} ranks divide the batch; {local}"
    return f"{only}: the runs divide the batch into other micro-batches, or have other batches; {local}"


def _parts(joined: Mapping[Kind, _Joined]) -> int:
    """Return the number of micro-batches: the largest number that divides all counts of calls."""
    found = 0
    for kind, one in joined.items():
        if kind.phase == "forward":
            starts = np.flatnonzero(one.index[3] == 0)
            found = int(np.gcd.reduce([found, *np.diff(np.append(starts, one.index.shape[1]))]))
    return max(1, found)


def _pairs(
    joined: Mapping[Kind, _Joined],
    drifts: Mapping[Kind, Floats],
    rule: Tolerance,
    reference: Reading,
) -> Pairs:
    parts = _parts(joined)
    calls = {kind: _calls(one, parts) for kind, one in joined.items()}
    places = _Places(joined, calls, reference)
    columns: list[tuple[Any, ...]] = []
    for number, (kind, one) in enumerate(joined.items()):
        step, rank, name, row = one.index
        divisor = calls[kind] if kind.of_modules else np.maximum(1, row + 1)
        part, call = row // divisor, row % divisor
        distance, state = _distance(kind, one)
        drift = drifts[kind]
        place = places.of(kind, part, name, call, divisor)
        columns.append(
            (np.full(len(step), number), name, step, rank, part, call, place, state, distance,
             rule.times * drift + rule.least, tolerance.is_undecided(drift),
             np.stack([one.run[:, 0], one.reference[:, 0]], axis=1))
        )  # fmt: skip
    arrays = [np.concatenate(column) for column in zip(*columns, strict=True)]
    order_of_all = np.lexsort((arrays[3], arrays[6], arrays[2]))
    names = tuple(one.names for one in joined.values())
    return Pairs(tuple(joined), names, *(one[order_of_all] for one in arrays))


def _distance(kind: Kind, one: _Joined) -> tuple[Floats, Ints]:
    found, state = tolerance.distances(one.run, one.reference), one.state.copy()
    # The parts that ranks have of a parameter may differ, and the parameter is still the same.
    sizes = one.run[:, 3], one.reference[:, 3]
    other = (sizes[0] != sizes[1]) & ~np.isnan(sizes[0]) & ~np.isnan(sizes[1])
    state[(state == BOTH) & other & kind.of_modules] = RESIZED
    found[state != BOTH] = np.inf
    return found, state


def _calls(one: _Joined, parts: int) -> Ints:
    """Return how often the module of each tensor runs in a micro-batch."""
    starts = np.flatnonzero(one.index[3] == 0)
    sizes = np.diff(np.append(starts, one.index.shape[1]))
    return np.maximum(1, np.repeat(sizes, sizes) // parts)


class _Places:
    """The place of each tensor among all tensors of a step."""

    def __init__(
        self, joined: Mapping[Kind, _Joined], calls: Mapping[Kind, Ints], reference: Reading
    ) -> None:
        self._names = {kind: one.names for kind, one in joined.items()}
        modules = [kind for kind in joined if kind.of_modules]
        self._known = dict.fromkeys(name for kind in modules for name in joined[kind].names)
        self._calls = dict.fromkeys(self._known, 1)
        numbers: dict[order.Event, order.Numbers] = {}
        for kind in modules:
            one = joined[kind]
            step, rank, name, row = one.index
            at = np.flatnonzero((step == step[0]) & (rank == rank[0]) & (row < calls[kind]))
            for place in at.tolist():
                text = one.names[name[place]]
                self._calls[text] = max(self._calls[text], int(calls[kind][place]))
                if kind.phase == "forward":
                    event = (kind.base == "output", text, int(row[place]))
                    numbers[event] = tuple(one.reference[place, :3].tolist())
        chains = [
            [name for name in chain if name in self._known]
            for kind in modules
            if kind.base == "input"
            for chain in reference.kinds[kind].chains
        ]
        self._events = order.forward_order(chains, list(self._known), self._calls, numbers)

    def of(self, kind: Kind, part: Ints, name: Ints, call: Ints, calls: Ints) -> Ints:
        """Return the place of each tensor of a kind."""
        events, names = len(self._events), self._names[kind]
        if kind.phase == "update":
            return name + 2 * _LATE
        if kind.phase == "gradient":
            owners = [order.parent_of(one, self._known) for one in names]
            places = np.array([self._events.get((True, owner, 0), -1) for owner in owners])
            # The backward pass reaches the last module first.
            rank = np.lexsort((np.arange(len(names)), -places))
            return np.argsort(rank)[name] + _LATE
        is_output, forward = kind.base.startswith("output"), kind.phase == "forward"
        most = max(self._calls.values())
        table = np.array(
            [
                [self._events[is_output, one, min(turn, self._calls[one] - 1)] for turn in range(most)]
                for one in names
            ]
        )
        turn = call if forward else calls - 1 - call
        place = table[name, np.minimum(turn, most - 1)]
        return part * 2 * events + (place if forward else 2 * events - 1 - place)


def _refuse_if(refused: bool, run: Reading, reference: Reading, told: Any) -> None:
    if refused:
        raise RecordError(
            f"{printable(run.path)} and {printable(reference.path)} cannot be compared: {told(run, reference)}"
        )


def _told_kinds(run: Reading, reference: Reading) -> str:
    listed = [", ".join(f"{kind.tensor} at {kind.point}" for kind in one.kinds) for one in (run, reference)]
    return (
        f"their rules record no tensor of the same kind; the first has {listed[0]}, the second {listed[1]}; "
        "record both with the same rules, such as `gradsurgeon:fingerprint@1`"
    )


def _told_steps(run: Reading, reference: Reading) -> str:
    listed = [f"{one.steps[0]} to {one.steps[-1]} ({count(len(one.steps), 'step')})" for one in (run, reference)]
    return (
        f"they have no step in common; the first has {listed[0]}, the second {listed[1]}; record the same steps of "
        "both, by `steps` of the rules or `start_step` of `apply`"
    )


def _told_names(run: Reading, reference: Reading) -> str:
    kind = next(iter(reference.kinds))
    listed = [printable((*one.kinds[kind].names, "none")[0]) for one in (run, reference) if kind in one.kinds]
    return (
        f"they have no tensor in common; their names are such as {' and '.join(listed)}; name what was renamed in a "
        "file with lines `old: new` and pass it with --map"
    )
