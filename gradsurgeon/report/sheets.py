"""The norms of series as arrays, and medians, growth and spikes of many tensors at once. Needs numpy."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from gradsurgeon.records.store import Part
from gradsurgeon.records.store.tables import blocks
from gradsurgeon.report.spikes import Flags, Floats, Ints, largest_spikes

_ENDS = 8  # steps at each end of a run that tell how far a norm grew


@dataclass(frozen=True)
class Sheet:
    """Norms of some tensors in the same steps, in arrays of shape ``[tensors, columns]``.

    A column stands for one row, or for a few rows of a long run.
    """

    names: Sequence[str]
    steps: Ints  # of the first row of each column
    lasts: Ints  # of its last row
    tops: Floats  # the largest finite norm, NaN where there is none
    sample: Floats  # the norm of the last row, NaN where it is missing
    bad: Ints  # how many norms were not finite
    there: Flags  # whether the tensor had a gradient, or a value


_ARRAYS = ("tops", "sample", "bad", "there")


def read_sheet(series: Part, columns: Sequence[int], every: int) -> Sheet:
    """Return the norms of some columns of a series; `every` rows share a column of the sheet."""
    names = [series.key.names[column] for column in columns]
    no_rows = (0, len(names))
    # A damaged file may hold fewer rows than it says.
    parts = [
        _folded(
            np.empty(0, np.int64), np.empty(no_rows, np.float32), np.empty(no_rows, bool), every
        )
    ]
    for steps, values, present in blocks(series, every=every):
        parts.append(_folded(steps, values[:, columns], present[:, columns], every))
    fields = [np.ascontiguousarray(np.concatenate(field).T) for field in zip(*parts, strict=True)]
    return Sheet(names, *fields)


def _folded(steps: Ints, norms: Floats, there: Flags, every: int) -> tuple[Any, ...]:
    """Return the arrays of a sheet in which `every` rows share a column, one line for each column."""
    norms = np.where(there, norms, np.float32(np.nan))
    finite = np.where(np.isfinite(norms), norms, np.float32(np.nan))
    bad = there & np.isnan(finite)
    if every == 1 or not len(steps):
        return steps, steps, finite, norms, bad.astype(np.int64), there
    firsts = np.arange(0, len(steps), every)
    lasts = np.append(firsts[1:], len(steps)) - 1
    tops = np.fmax.reduceat(finite, firsts)
    counts = np.add.reduceat(bad, firsts, dtype=np.int64)
    some = np.logical_or.reduceat(there, firsts)
    return steps[firsts], steps[lasts], tops, norms[lasts], counts, some


def joined(parts: Sequence[tuple[Sheet, Sequence[int]]], *, once: bool) -> Iterator[Sheet]:
    """Yield the rows of tensors over several series of one rule, in the order of steps.

    A tensor moves to a new series when another optimizer claims it. With `once`, a step has one record of a tensor, and
    the later counts.
    """
    steps = np.concatenate([sheet.steps for sheet, _ in parts])
    first, lines = parts[0]
    is_whole = list(lines) == list(range(len(first.names)))
    if len(parts) == 1 and is_whole and (np.diff(steps) > 0).all():
        yield first  # nearly always
        return
    lasts = np.concatenate([sheet.lasts for sheet, _ in parts])
    for place, line in enumerate(lines):
        rows = {}
        for field in _ARRAYS:
            every = [getattr(sheet, field)[own[place]] for sheet, own in parts]
            rows[field] = np.concatenate(every)
        there = rows["there"]
        # A row without the tensor says nothing if another series, or another call, has it in the same step.
        order = np.lexsort((there, steps))
        if once:
            order = order[np.append(np.diff(steps[order]) > 0, [True])]
        else:
            order = order[there[order] | ~np.isin(steps[order], steps[there])]
        chosen = {field: row[None, order] for field, row in rows.items()}
        yield Sheet([first.names[line]], steps[order], lasts[order], **chosen)


def numbers_of(
    sheet: Sheet, lines: slice
) -> tuple[dict[str, Floats], list[tuple[int, float] | None]]:
    """Return numbers by tensor, NaN where there is nothing to compute, and the column of each spike with its size."""
    tops = sheet.tops[lines]
    sample = sheet.sample[lines]
    numbers = {field: np.full(len(tops), np.nan) for field in ("largest", "median", "rise")}
    spikes: list[tuple[int, float] | None] = [None] * len(tops)
    # The last norms before a non-finite one may have grown within a step or two.
    ends = np.where(sheet.there[lines], np.arange(tops.shape[1]), -1).argmax(axis=1)
    broken = np.asarray(sheet.bad[lines][np.arange(len(tops)), ends] > 0)
    for rows, columns, norms in _alike(tops, ~np.isnan(tops)):
        numbers["largest"][rows] = norms.max(axis=1)
        for row, spike in zip(rows, largest_spikes(norms), strict=True):
            if spike is not None:
                place, times = spike
                spikes[row] = int(columns[place]), times
    for rows, _, norms in _alike(tops, tops > 0):
        numbers["rise"][rows] = _rise(norms, broken[rows])
    for rows, _, norms in _alike(sample, np.isfinite(sample)):
        numbers["median"][rows] = np.median(norms, axis=1)
    return numbers, spikes


def _alike(norms: Floats, kept: Flags) -> Iterator[tuple[list[int], Ints, Floats]]:
    """Yield rows that keep the same columns, these columns, and their norms, none of which is missing."""
    groups: dict[bytes, list[int]] = {}
    for row, mask in enumerate(kept):
        groups.setdefault(mask.tobytes(), []).append(row)
    for rows in groups.values():
        columns = np.flatnonzero(kept[rows[0]])
        if len(columns):
            yield rows, columns, norms[rows][:, columns].astype(float)


def _rise(norms: Floats, broken: Flags) -> Floats:
    """Return how many times the first norms the highest norms are that last a few steps."""
    number = norms.shape[1]
    begin = np.median(norms[:, : max(1, min(_ENDS, number // 4))], axis=1)
    # A single high norm is no growth, unless a non-finite one follows, or it is the last of a module that is seldom called.
    few = max(1, min(3, number // 4))
    lasting = sliding_window_view(norms, few, axis=1).min(axis=2)
    end = np.where(broken, norms[:, -few:].max(axis=1), lasting[:, -1])
    if few > 1:
        end = np.maximum(end, lasting.max(axis=1))
    return np.asarray(end / begin)
