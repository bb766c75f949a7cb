"""The tables of norms, one for each kind of tensors, and where the norms of replicas differ. Needs numpy."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store import Key, Part
from gradsurgeon.records.store.tables import blocks
from gradsurgeon.report.callouts import nouns, whole_name
from gradsurgeon.report.history import POINTS, History, WholeNorm
from gradsurgeon.report.rules_and_events import GRADIENT, OF_UPDATES, STAT, STATE, WHOLE
from gradsurgeon.report.tables import Table
from gradsurgeon.report.track import Track

_ROWS = 40
_NUMBERS = frozenset({2, 3, 4, 5, 6})  # columns of the table
_HEAD = ("history", "first", "median", "max", "last", "non-finite")
# DDP reduces to equal bits on all ranks; in other set-ups each rank reduces in another order.
_TOLERANCE = 1e-3
# Ranks whose norms were alike in so many rows are replicas.
_ALIKE = 3
_REDUCED = POINTS[:2]


def norm_tables(history: History) -> Iterator[Table]:
    """Yield the table of each kind of tensors, in the order of the model."""
    for kind in history.kinds:
        tracks = history.tracks_of(kind)
        urgent = ranked(tracks)[:_ROWS]
        yield norm_table(history, kind, [track for track in tracks if track in urgent])


def norm_table(history: History, kind: str, shown: Sequence[Track]) -> Table:
    """Return a table of some tensors of a kind."""
    tracks = history.tracks_of(kind)
    origins = {track.origin for track in tracks}
    head = [nouns(kind), *_HEAD]
    has_rule = len(origins) > 1
    if has_rule:
        head.append("rule")
    rows = []
    curves = []
    for track in shown:
        row = [printable(track.name), ""]
        row += [f"{norm:.3g}" for norm in (track.first, track.median, track.largest, track.last)]
        nonfinite = len(track.nonfinite_steps)
        row.append(f"{nonfinite:,}" if nonfinite else "-")
        if has_rule:
            row.append(printable(track.origin.rule))
        rows.append(row)
        curves.append(track.norms)
    recorders = [f"{printable(rule)} (at {printable(point)})" for _, rule, point in sorted(origins)]
    title = f"{_measured(kind, len(tracks))}, recorded by {', '.join(recorders)}"
    notes = []
    more = len(tracks) - len(shown)
    if more:
        notes.append(
            f"... and {more:,} more; those that are not finite, then spikes, then the largest are shown"
        )
    successive = history.rows_of_a_column
    if successive > 1:
        notes.append(
            f"the run is long: {successive:,} successive steps count as one, by their largest norm"
        )
    return Table(title, head, rows, right=_NUMBERS, curves=curves, notes=notes)


def _measured(kind: str, number: int) -> str:
    if kind in OF_UPDATES.values():
        return f"{kind}, of {count(number, 'parameter')}"
    if kind == WHOLE:
        return count(number, "whole norm")
    if kind.startswith(STATE):
        return f"norms (l2) of {kind} of {count(number, 'parameter')}"
    noun = "parameter" if kind == GRADIENT else kind
    return f"norms (l2) of {count(number, noun)}"


def ranked(tracks: Sequence[Track]) -> list[Track]:
    """Return tensors with the most urgent first: non-finite, then spikes, then the largest medians."""

    def urgency(track: Track) -> tuple[object, ...]:
        first_nonfinite = track.nonfinite_steps[:1].tolist()
        times = 0.0
        if track.spike:
            times = track.spike.times
        # A median is NaN if no norm is finite.
        median = track.median if track.median > 0 else 0.0
        return not first_nonfinite, first_nonfinite, -times, -median

    return sorted(tracks, key=urgency)


def labels(wholes: Sequence[WholeNorm], params: int) -> list[str]:
    """Return what to call each of some whole norms: of several, by their first tensors also."""
    texts = []
    for whole in wholes:
        text = whole_name(whole, params)
        if len(wholes) > 1 and len(whole.names) > 1:
            text += f": {whole.names[0]} ..."
        texts.append(text)
    return texts


def ranks_that_differ(
    series: Iterable[Part], kinds: Mapping[str, str], *, are_replicas: bool
) -> str:
    """Return a sentence on the first step and parameter at which replicas differ, empty if none do.

    Ranks are replicas if `DistributedDataParallel` held the model, or if their norms were alike at first. Others may train
    apart, or a script averages their gradients after the norms were taken.
    """
    lowest: dict[Key, Part] = {}
    differences: list[tuple[int, str]] = []
    for part in series:
        key = part.key
        is_of_gradient = key.stat == STAT and kinds.get(key.rule) == GRADIENT
        if not is_of_gradient or key.point not in _REDUCED:
            continue
        other = lowest.setdefault(key, part)
        if other is not part:
            least = 0 if are_replicas else _ALIKE
            differences += _first_difference(other, part, least)
    first = min(differences, default=(0, ""))
    return first[1]


def _first_difference(lower: Part, higher: Part, least: int) -> Iterator[tuple[int, str]]:
    """Yield step and sentence of the first difference between two ranks, if at least so many rows before were alike."""
    start = max(lower.skipped, higher.skipped)
    alike = 0
    both = zip(blocks(lower.whole, start), blocks(higher.whole, start), strict=False)
    for ours, theirs in both:
        # One rank may have more rows if both are read while they write.
        length = min(len(ours[0]), len(theirs[0]))
        steps, norms, present = [array[:length] for array in ours]
        other_steps, other_norms, other_present = [array[:length] for array in theirs]
        if not np.array_equal(steps, other_steps):
            return  # the ranks have recorded other steps
        with np.errstate(all="ignore"):
            is_close = np.isclose(norms, other_norms, rtol=_TOLERANCE, atol=0.0, equal_nan=True)
        apart = np.argwhere(~is_close & present & other_present)
        if len(apart):
            row, column = apart[0]
            if alike + row >= least:
                name = printable(lower.key.names[column])
                norm = f"{norms[row, column]:.3g} on rank {lower.rank}"
                other_norm = f"{other_norms[row, column]:.3g} on rank {higher.rank}"
                since = f"from step {steps[row]} on"
                if start and not alike + row:
                    since = f"at step {steps[row]} or before"
                yield (
                    int(steps[row]),
                    f"ranks differ {since}: the norm of {name} is {norm} and {other_norm}",
                )
            return
        alike += length
