"""The count of what one rule would have done. Needs numpy."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from gradsurgeon.language.planning.table import fold_names
from gradsurgeon.report.evidence.gradients import MatchedGradients, TrialOutcome
from gradsurgeon.report.evidence.run_norms import Array, RecordedTable
from gradsurgeon.report.evidence.told import SHARES, Strongest, Thresholds, Told

# For each table, by name what was compared with the bound.
Compared = Sequence[tuple[RecordedTable, Mapping[str, Array]]]


def add(
    told: Told, table: RecordedTable, gradients: MatchedGradients, outcome: TrialOutcome
) -> None:
    """Add what a rule did to the gradients of a table."""
    known = np.broadcast_to(np.logical_not(outcome.unknown), len(table.steps))
    acted = outcome.acted & known[:, None]
    told.steps += table.updates(known)
    told.acts += table.updates(np.any(acted, axis=1))
    numbers = (table.weights @ acted).tolist()
    # A sum of counters has no zeros.
    told.by_name += Counter(dict(zip(gradients.names, numbers, strict=True)))
    if acted.any():
        _find_largest(told, gradients, acted, outcome.strength)


def _find_largest(
    told: Told, gradients: MatchedGradients, acted: Array, over_bound: Array | None
) -> None:
    # The first NaN is as large as any.
    norms = np.nan_to_num(gradients.norms, nan=np.inf, posinf=np.inf)
    strength = norms if over_bound is None else over_bound
    order = np.where(acted, strength, -np.inf)
    most = float(order.max())
    if most <= told.strength:
        return
    told.strength = most
    # The largest of gradients with one common norm is named.
    ties = np.where(order == most, norms, -np.inf)
    row, column = divmod(int(ties.argmax()), len(gradients.names))
    factor = None if over_bound is None else most
    told.largest = Strongest(gradients.names[column], int(gradients.steps[row]), factor)


def thresholds(compared: Compared) -> Iterator[Thresholds]:
    """Yield, for each group of like layers, quantiles of what was compared, and how often each would have acted."""
    names: dict[str, None] = {}
    for _, by_name in compared:
        names |= dict.fromkeys(by_name)
    for group, members in fold_names(names).items():
        yield from _thresholds_of(group, members, compared)


def _thresholds_of(group: str, members: Sequence[str], compared: Compared) -> Iterator[Thresholds]:
    values = []
    largest = []
    for table, by_name in compared:
        columns = [by_name[name] for name in members if name in by_name]
        if columns:
            largest.append((table, np.fmax.reduce(columns)))
            values.append(np.repeat(columns, table.weights, axis=1).ravel())
    every = np.concatenate(values)
    finite = every[np.isfinite(every)]
    if not len(finite):
        return
    bounds = np.quantile(finite, SHARES, method="inverted_cdf")
    acts = np.zeros(len(SHARES), int)
    steps = 0
    for table, norms in largest:
        steps += table.updates(~np.isnan(norms))
        acts += [table.updates(norms > bound) for bound in bounds]
    yield Thresholds(group, tuple(bounds.tolist()), tuple(acts.tolist()), steps)
