"""The norms of series as arrays, and medians, growth, noise and spikes of many tensors at once. Needs numpy."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from gradsurgeon.records.store import Part
from gradsurgeon.records.store.tables import blocks
from gradsurgeon.report.spikes import Flags, Floats, Ints, largest_spikes

# An explosion grows so many times, to norms that no usual training has.
GROWTH, LARGE = 1e3, 1e2
_ENDS = 8  # steps at each end of a run that tell how far a norm grew
_LEAST_FOR_GROWTH = 4
_TURNS = 4  # so many losses that take turns are no noise
_MOST_FOR_JITTER = 2**16
_FIELDS = ("largest", "median", "growth", "rise", "jitter")

# Steps and norms of the rows that one cell of a sheet stands for.
Reader = Callable[[int, int], tuple[Ints, Floats]]
# The norm of some tensors of a sheet together, squared, and how many are there, ``[2, rows]``; and the steps.
Squares = Callable[[Sequence[int]], tuple[Ints, Floats]]


@dataclass(frozen=True)
class Sheet:
    """Norms of some tensors in the same steps, in arrays of shape ``[tensors, columns]``.

    A column stands for one row, or for a few rows of a long run.
    """

    names: Sequence[str]
    steps: Ints  # of the first row of each column
    lasts: Ints  # of its last row
    tops: Floats  # the largest finite norm, NaN where there is none
    sample: Floats  # the norm of the first row with the tensor, NaN where it is not finite
    bad: Ints  # how many norms were not finite
    there: Flags  # whether the tensor had a gradient, or a value
    every: int  # the most rows that a column stands for
    read: Reader


def _folded(rows: Any, every: int, fill: float) -> Any:
    """Return rows in groups of `every`; those that lack in the last group are filled up."""
    if lacking := -len(rows) % every:
        rows = np.pad(rows, ((0, lacking), (0, 0)), constant_values=fill)
    return rows.reshape(-1, every, rows.shape[1])


def read_sheet(series: Part, columns: Sequence[int], every: int) -> tuple[Sheet, Squares]:
    """Return the norms of some columns of a series; `every` rows share a column of the sheet.

    The file of a series stays open for as long as a sheet of a long run is in use.
    """
    names = [series.key.names[column] for column in columns]
    # A damaged file may hold fewer rows than it says.
    none, no_step = np.empty((0, len(names)), np.float32), np.empty(0, np.int64)
    found: list[Any] = [(no_step, no_step, none, none, none.astype(bool), none.astype(bool))]
    sums: list[tuple[Ints, Floats]] = [(no_step, np.empty((2, 0)))]
    # All columns need no copy.
    chosen = slice(None) if len(columns) == len(series.key.names) else columns
    for steps, values, present in blocks(series, every=every):
        norms, there = values[:, chosen], present[:, chosen]
        finite = there & np.isfinite(norms)
        bad = there & ~finite
        tops = norms if finite.all() else np.where(finite, norms, np.float32(np.nan))
        sums.append((steps, _squares(norms, there)))
        if every == 1:
            found.append((steps, steps, tops, norms, bad, there))
        else:
            found.append(_columns(steps, tops, bad, there, every))
    joint: Any = (np.concatenate(field).T for field in zip(*found, strict=True))
    steps, lasts, tops, raw, bad, there = map(np.ascontiguousarray, joint)

    def read_rows(line: int, column: int) -> tuple[Ints, Floats]:
        if every == 1:
            return steps[column : column + 1], raw[line, column : column + 1]
        pairs = series.between(names[line], column * every, (column + 1) * every)
        if not pairs:
            raise series.whole.damaged()  # a file: a session never has so many rows
        return np.array([step for step, _ in pairs]), np.array([norm for _, norm in pairs])

    def squares(lines: Sequence[int]) -> tuple[Ints, Floats]:
        parts, some = sums, [columns[line] for line in lines]
        if len(lines) < len(names):
            read = blocks(series)
            parts = [(rows, _squares(norms[:, some], one[:, some])) for rows, norms, one in read]
        all_steps, all_sums = zip(*parts, strict=True)
        return np.concatenate(all_steps), np.concatenate(all_sums, axis=1)

    sample = tops if every == 1 else raw
    return Sheet(names, steps, lasts, tops, sample, bad, there, every, read_rows), squares


def _columns(steps: Ints, tops: Floats, bad: Flags, there: Flags, every: int) -> tuple[Any, ...]:
    """Return the fields of a sheet in which `every` rows share a column."""
    firsts = np.arange(0, len(steps), every)
    lasts = steps[np.minimum(firsts + every, len(steps)) - 1]
    top = np.fmax.reduce(_folded(tops, every, np.nan), axis=1)
    counts = _folded(bad, every, 0).sum(axis=1, dtype=np.uint16)
    # A tensor may rest in every other step.
    picked = firsts[:, None] + _folded(there, every, 0).argmax(axis=1)
    sample = np.take_along_axis(tops, picked, axis=0)
    some = np.take_along_axis(there, picked, axis=0)
    return steps[firsts], lasts, top, sample, counts, some


def _squares(norms: Floats, there: Flags) -> Floats:
    known = norms if there.all() else np.where(there, norms, 0.0)
    return np.array([np.square(known, dtype=float).sum(axis=1), there.sum(axis=1)])


def joined(parts: Sequence[tuple[Sheet, Sequence[int]]], *, once: bool) -> Iterator[Sheet]:
    """Yield the rows of tensors over several series of one rule, in the order of steps.

    A tensor moves to a new series when another optimizer claims it. With `once`, a step has one record of a tensor, and
    the later counts.
    """
    steps = np.concatenate([sheet.steps for sheet, _ in parts])
    first, lines = parts[0]
    if len(parts) == 1 and [*lines] == [*range(len(first.names))] and (np.diff(steps) > 0).all():
        yield first  # nearly always
        return
    for lines in zip(*(lines for _, lines in parts), strict=True):
        own = [(sheet, [line]) for (sheet, _), line in zip(parts, lines, strict=True)]
        there = np.concatenate([sheet.there[line] for sheet, (line,) in own])
        # A row without the tensor says nothing if another series, or another call, has it in the same step.
        order = np.lexsort((there, steps))
        if once:
            order = order[np.append(np.diff(steps[order]) > 0, [True])]
        else:
            order = order[there[order] | ~np.isin(steps[order], steps[there])]
        yield _ordered(own, order)


def _ordered(parts: Sequence[tuple[Sheet, Sequence[int]]], order: Ints) -> Sheet:
    owners = np.repeat(np.arange(len(parts)), [len(sheet.steps) for sheet, _ in parts])[order]
    places = np.concatenate([np.arange(len(sheet.steps)) for sheet, _ in parts])[order]

    def read_rows(line: int, column: int) -> tuple[Ints, Floats]:
        sheet, lines = parts[int(owners[column])]
        return sheet.read(lines[line], int(places[column]))

    first, lines = parts[0]
    joint: dict[str, Any] = {"names": [first.names[line] for line in lines], "read": read_rows}
    joint["steps"] = np.concatenate([sheet.steps for sheet, _ in parts])[order]
    joint["lasts"] = np.concatenate([sheet.lasts for sheet, _ in parts])[order]
    for field in ("tops", "sample", "bad", "there"):
        every = [getattr(sheet, field)[lines] for sheet, lines in parts]
        joint[field] = np.concatenate(every, axis=1)[:, order]
    return Sheet(**joint, every=max(sheet.every for sheet, _ in parts))


def numbers_of(
    sheet: Sheet, lines: slice
) -> tuple[dict[str, Floats], list[tuple[int, float] | None]]:
    """Return numbers by tensor, NaN where there is nothing to compute, and the column of each spike with its size."""
    tops, sample = sheet.tops[lines], sheet.sample[lines]
    found: dict[str, Floats] = {field: np.full(len(tops), np.nan) for field in _FIELDS}
    spikes: list[tuple[int, float] | None] = [None] * len(tops)
    # The last norms before a non-finite one may have grown within a step or two.
    ends = np.where(sheet.there[lines], np.arange(tops.shape[1]), -1).argmax(axis=1)
    broken: Flags = np.asarray(sheet.bad[lines][np.arange(len(tops)), ends] > 0)
    for rows, columns, norms in _alike(tops, ~np.isnan(tops)):
        found["largest"][rows] = norms.max(axis=1)
        for row, spike in zip(rows, largest_spikes(norms), strict=True):
            spikes[row] = spike and (int(columns[spike[0]]), spike[1])
    for rows, _, norms in _alike(tops, tops > 0):
        found["growth"][rows], found["rise"][rows] = _growth(norms, broken[rows])
    for rows, _, norms in _alike(sample, ~np.isnan(sample)):
        found["median"][rows] = np.median(norms, axis=1)
    for rows, _, norms in _alike(sample, sample > 0):
        found["jitter"][rows] = _jitter(np.log(norms[:, -_MOST_FOR_JITTER:]))
    return found, spikes


def _alike(norms: Floats, kept: Flags) -> Iterator[tuple[list[int], Ints, Floats]]:
    """Yield rows that keep the same columns, these columns, and their norms, none of which is missing."""
    groups: dict[bytes, list[int]] = {}
    for row, mask in enumerate(kept):
        groups.setdefault(mask.tobytes(), []).append(row)
    for rows in groups.values():
        columns = np.flatnonzero(kept[rows[0]])
        if len(columns):
            yield rows, columns, norms[rows][:, columns].astype(float)


def _growth(norms: Floats, broken: Flags) -> tuple[Floats, Floats]:
    """Return `growth` and `rise` of tracks; of few norms `rise` alone, up to the last one."""
    # A single high norm is no growth, unless a non-finite one follows, or it is the last of a module that is seldom called.
    number = norms.shape[1]
    few = max(1, min(3, number // 4))
    begin = np.median(norms[:, : max(1, min(_ENDS, number // 4))], axis=1)
    lasting = sliding_window_view(norms, few, axis=1).min(axis=2)
    end = np.where(broken, norms[:, -few:].max(axis=1), lasting[:, -1])
    growth = end / begin if number >= _LEAST_FOR_GROWTH else np.full(len(norms), np.nan)
    return growth, (np.maximum(end, lasting.max(axis=1)) if few > 1 else end) / begin


def _jitter(logs: Floats) -> Floats:
    """Return the median distance of logarithms of norms a few steps apart, the least of several distances in time."""
    # Losses that take turns have a different norm in each step, and the same again a few steps later.
    found = np.full(len(logs), np.nan)
    for lag in range(1, min(_TURNS, logs.shape[1] - 1) + 1):
        found = np.fmin(found, np.median(np.abs(logs[:, lag:] - logs[:, :-lag]), axis=1))
    return found
