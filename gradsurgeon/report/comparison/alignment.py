"""Two runs side by side: the same tensors of the same steps, in the order of execution. Needs numpy."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import chain, islice, zip_longest

import numpy as np

from gradsurgeon.common._grouping import names_of
from gradsurgeon.errors import RecordError, printable, shorten_names
from gradsurgeon.report.comparison import order, tolerance
from gradsurgeon.report.comparison.pairs import (
    MISSING_IN_REFERENCE,
    MISSING_IN_RUN,
    RESIZED,
    Pair,
    texts_of,
)
from gradsurgeon.report.comparison.reading import Numbers, Reading, TensorOfStep
from gradsurgeon.report.comparison.tolerance import Tolerance

# The numbers of a tensor in each run.
Rows = Mapping[TensorOfStep, list[list[Numbers]]]
_OTHER_BATCHES = (
    "only gradients and weights are compared: other ranks, batches or micro-batches divide the samples "
    "differently; with batch norm such runs truly differ"
)
_RENAME = "name what was renamed by lines `old: new` in --map FILE"
_CALLED = "called another number of times in one run, as by an evaluation between steps"
_FEW = "fewer than three noise runs measured the tolerance: false alarms are likelier"
# Calls in another order are so many times nearer to each other in the right one.
_NEARER = 10.0


def align(
    run: Reading, reference: Reading, noise: Sequence[Reading]
) -> tuple[list[Pair], Tolerance, list[str]]:
    """Return the tensors of both runs with their distances, how tolerances came about, and notes.

    Raises `RecordError` if the runs have no kind of tensor, no tensor or no step in common.
    """
    tolerance.refuse_repeated(run, reference, noise)
    readings = [run, reference, *noise]
    rows = dict(_joined(readings))
    is_same_world = run.meta.get("ranks") == reference.meta.get("ranks")
    pairs, notes = _comparable(rows, is_same_world=is_same_world)
    notes += _kinds_of_some_runs(readings)
    _need(pairs, run, reference, "tensor", _RENAME)
    _place(pairs, reference)
    pairs.sort(key=lambda pair: (pair.step, pair.place, pair.rank))
    rule = tolerance.set_limits(pairs, readings)
    if noise:
        tolerance.refuse_unlike(noise, pairs, reference)
        if len(noise) < 3:  # noqa: PLR2004 # the trials had three
            notes.append(_FEW)
    return pairs, rule, notes


def _joined(readings: Sequence[Reading]) -> Iterator[tuple[TensorOfStep, list[list[Numbers]]]]:
    """Yield the tensors of run and reference in the steps of all runs, with their numbers in each run."""
    run, reference, *noise = readings
    kinds = set(run.bound)
    steps = run.steps
    for other in readings[1:]:
        kinds &= other.bound.keys()
        _need(kinds, run, other, "kind of tensor", "record both by `gradsurgeon:fingerprint@1`")
        steps &= other.steps
        _need(steps, run, other, "step", "record the same steps, by `steps` or `start_step`")
    both = {kind: run.bound[kind].keys() & reference.bound[kind].keys() for kind in kinds}
    _need(set().union(*both.values()), run, reference, "name of a tensor", _RENAME)
    for repetition in noise:
        shared = [kind for kind in kinds if both[kind] & repetition.bound[kind].keys()]
        _need(shared, reference, repetition, "name of a tensor", "give noise runs of the reference")
    for tensor in {**reference.rows, **run.rows}:
        if tensor.step not in steps or tensor.name not in both.get(tensor.kind, ()):
            continue
        rows = [reading.rows.get(tensor, []) for reading in readings]
        if tensor.kind.phase == "backward" and len(rows[0]) == len(rows[1]):
            rows[0] = _reordered(rows[0], rows[1])
        yield tensor, rows


def _reordered(run: list[Numbers], reference: list[Numbers]) -> list[Numbers]:
    """Return the calls of a module in a backward pass in the order that they have in the reference.

    One backward pass of two losses comes to the last call first; two backward passes come to the first.
    """
    ours = np.array(run)[:, None, :3]
    theirs = np.array(reference)[None, :, :3]
    distances = np.abs(ours - theirs).max(axis=2)
    nearest = distances.argmin(axis=0)
    far_as_reordered = distances.min(axis=0).max()
    far_as_is = distances.diagonal().max()
    is_permutation = len(set(nearest.tolist())) == len(run)
    # Not where one is NaN.
    if is_permutation and far_as_reordered * _NEARER < far_as_is:
        return [run[call] for call in nearest]
    return run


def _pairs_of(rows: Rows) -> Iterator[Pair]:
    """Yield a pair for each row of a tensor that the run or the reference has."""
    for tensor, of_runs in rows.items():
        run, reference, *_ = of_runs
        most = max(len(run), len(reference))
        for row, numbers in enumerate(islice(zip_longest(*of_runs), most)):
            yield Pair(tensor, row, numbers)


def _comparable(rows: Rows, *, is_same_world: bool) -> tuple[list[Pair], list[str]]:
    """Return the pairs that are the same calls in all runs, and notes on the others."""
    pairs = list(_pairs_of(rows))
    alone, unlike = _unlike_calls(rows)
    alike = []
    others = []
    for pair in pairs:
        if not pair.kind.of_modules:
            others.append(pair)
        elif pair.key not in alone and pair.key not in unlike:
            alike.append(pair)
    resized = [pair for pair in alike if pair.state == RESIZED]
    are_most_resized = 2 * len(resized) > len(alike)
    are_all_unlike = unlike and not alike
    if are_most_resized or are_all_unlike or not is_same_world:
        return others, [_OTHER_BATCHES]
    notes = []
    for state, where in ((MISSING_IN_REFERENCE, "run"), (MISSING_IN_RUN, "reference")):
        texts = texts_of([pair for pair in pairs if pair.key in alone and pair.state == state])
        if texts:
            tensors = printable(shorten_names(texts))
            notes.append(f"only in the {where}, so not compared: {tensors}")
    if unlike:
        names = dict.fromkeys(names_of(unlike))
        steps = sorted({pair.step for pair in unlike})
        where = ", ".join(map(str, steps))
        notes.append(f"not compared in step {where}: {shorten_names(list(names))}, {_CALLED}")
    return alike + others, notes


def _unlike_calls(rows: Rows) -> tuple[set[TensorOfStep], dict[TensorOfStep, None]]:
    """Return the tensors of modules that one run alone calls, and of those that runs call unlike numbers of times.

    A gradient that one run lacks is a difference if both runs have the tensor.
    """
    alone = set()
    unlike: dict[TensorOfStep, None] = {}
    called_alike = set()
    called_by_one = set()
    for phase in ("forward", "backward"):
        for tensor, of_runs in rows.items():
            if tensor.kind.phase != phase:
                continue
            is_forward = phase == "forward"
            call = (tensor.step, tensor.rank, tensor.name)
            numbers = {len(calls) for calls in of_runs if calls}
            is_missing = not of_runs[0] or not of_runs[1]
            if len(numbers) > 1:
                if is_forward or call not in called_alike:
                    unlike[tensor] = None
                continue
            if is_forward:
                called_alike.add(call)
            if is_missing and (is_forward or call in called_by_one):
                alone.add(tensor)
                called_by_one.add(call)
    return alone, unlike


def _kinds_of_some_runs(readings: Sequence[Reading]) -> list[str]:
    runs = Counter(chain.from_iterable(reading.bound for reading in readings))
    texts = [" at ".join(kind) for kind in runs if runs[kind] < len(readings)]
    if not texts:
        return []
    return [f"not in all runs, so not compared: {', '.join(texts)}"]


def _place(pairs: Sequence[Pair], reference: Reading) -> None:
    """Set micro-batch, call and place within the step of each tensor."""
    most = _set_calls(pairs)
    names = list(dict.fromkeys(chain.from_iterable(reference.bound.values())))
    modules = order.merged(reference.chains, [name for name in names if name in most])
    events = order.forward_order(modules, most, _numbers_of_events(pairs))
    size = len(events)
    places = {name: place for place, name in enumerate(names)}
    for pair in pairs:
        name = places[pair.name]
        if pair.phase == "update":
            pair.place = (3, name)
        elif pair.phase == "gradient":
            # The backward pass reaches the last module first.
            end = events.get((True, order.parent_of(pair.name, most), 0), -1)
            pair.place = (1 + pair.kind.is_final, size - end, name)
        else:
            event = pair.base.startswith("output"), pair.name, pair.call
            place = events[event]
            if pair.phase == "backward":
                place = 2 * size - 1 - place
            pair.place = (0, pair.micro_batch, place)


def _set_calls(pairs: Sequence[Pair]) -> dict[str, int]:
    """Set micro-batch and call of each tensor, and return the largest number of calls of each module."""
    rows = Counter(pair.key for pair in pairs)
    # The number of micro-batches divides how often each module runs in a step.
    forward = [number for tensor, number in rows.items() if tensor.kind.phase == "forward"]
    parts = max(1, math.gcd(*forward))
    most: dict[str, int] = {}
    for pair in pairs:
        pair.call = pair.row
        if not pair.kind.of_modules:
            continue
        calls = max(1, rows[pair.key] // parts)
        pair.micro_batch, pair.call = divmod(pair.row, calls)
        if pair.phase == "backward":
            # The backward pass comes to the last call first.
            pair.call = calls - 1 - pair.call
        most[pair.name] = max(calls, most.get(pair.name, 0))
    return most


def _numbers_of_events(pairs: Sequence[Pair]) -> dict[order.Event, order.Numbers]:
    """Return norm and projections of inputs and outputs in the first forward pass of the reference."""
    first = min(pair.step for pair in pairs)
    numbers: dict[order.Event, order.Numbers] = {}
    for pair in pairs:
        of_reference = pair.numbers[1]
        is_first = pair.step == first and pair.micro_batch == 0
        if is_first and pair.phase == "forward" and of_reference:
            event = pair.base == "output", pair.name, pair.call
            numbers.setdefault(event, tuple(of_reference[:3]))
    return numbers


def _need(common: Sized, run: Reading, other: Reading, what: str, remedy: str) -> None:
    if not common:
        paths = f"{printable(run.path)} and {printable(other.path)}"
        raise RecordError(f"{paths} have no {what} in common: {remedy}")
