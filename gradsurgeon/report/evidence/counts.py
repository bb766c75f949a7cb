"""The count of what one rule would have done. Needs numpy."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from gradsurgeon.language.planning.table import fold_names
from gradsurgeon.report.evidence.gradients import MatchedGradients, TrialOutcome
from gradsurgeon.report.evidence.run_norms import Array, RecordedTable
from gradsurgeon.report.evidence.told import SHARES, Strongest, Thresholds, Told

# For each table, what a rule compared with its bound, and did.
Compared = Sequence[tuple[RecordedTable, TrialOutcome]]


def add(
    told: Told, table: RecordedTable, gradients: MatchedGradients, outcome: TrialOutcome
) -> None:
    """Add what a rule did to the gradients of a table."""
    is_known = np.broadcast_to(np.logical_not(outcome.unknown), outcome.acted.shape)
    acted = outcome.acted & is_known
    # Another gradient of the row may tell.
    known = np.any(acted, axis=1) | np.all(is_known, axis=1)
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
    for _, outcome in compared:
        names |= dict.fromkeys(outcome.compared)
    for group, members in fold_names(names).items():
        yield from _thresholds_of(group, members, compared)


def _thresholds_of(group: str, members: Sequence[str], compared: Compared) -> Iterator[Thresholds]:
    tables = []
    values = []
    for table, outcome in compared:
        columns = [outcome.compared[name] for name in members if name in outcome.compared]
        if columns:
            tables.append((table, np.array(columns), outcome.acts_at))
            values.append(np.repeat(columns, table.weights, axis=1).ravel())
    every = np.concatenate(values)
    finite = every[np.isfinite(every)]
    if not len(finite):
        return
    bounds = np.quantile(finite, SHARES, method="inverted_cdf")
    acts = np.zeros(len(SHARES), int)
    steps = 0
    for table, numbers, acts_at in tables:
        steps += table.updates(~np.all(np.isnan(numbers), axis=0))
        acts += [table.updates(np.any(acts_at(numbers, bound), axis=0)) for bound in bounds]
    yield Thresholds(group, tuple(bounds.tolist()), tuple(acts.tolist()), steps)
