"""What a session or a run directory has recorded, as a report reads it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from gradsurgeon.common.events import Event, RuleStatus
from gradsurgeon.records.store.memory import AnySeries, WholeSeries


class RankEnd(NamedTuple):
    """How one rank of a run directory ended, as far as files and processes tell."""

    state: str  # "running", "finished", or "stopped" without having been closed
    # The rank wrote these facts of its end: `error`, and `step` and `rule` of a trap.
    ending: Mapping[str, Any]
    written: float | None  # when it last wrote, in seconds since 1970


@dataclass(frozen=True)
class Recorded:
    """Rules, records and events of one run.

    Attributes:
        meta: rules, plan and model, as `run.json` has them.
        aliases: the canonical name of each further name of a parameter or module.
        series: every series of every rank.
        pending: by name of a parameter, the update that its last records wait for.
        dropped: how many of the oldest rows are gone, because memory is bounded.
        events: what happened, oldest first.
        statuses: what each rule has done.
        next_step: the number of the next update; `None` if nothing but the records tells it.
        ends: how each rank ended; nothing of a session.
        missing_ranks: ranks of the job that have no file.
        changed_by_script: whether the script changed gradients between backward and the update; `None` if no trap saw them.
    """

    meta: Mapping[str, Any]
    aliases: Mapping[str, str]
    series: Sequence[WholeSeries]
    pending: Mapping[str, int]
    events: Sequence[Event]
    statuses: Mapping[str, RuleStatus]
    dropped: int = 0
    next_step: int | None = None
    ends: Mapping[int, RankEnd] = field(default_factory=dict)
    missing_ranks: Sequence[int] = ()
    changed_by_script: bool | None = None


class RecordSource(Protocol):
    """What a report is made of: a `Session`, running or removed, or a `Run`."""

    def recorded(self) -> Recorded:
        """Return what has been recorded so far. Waits for the device."""


def of_lowest_ranks(all_series: Iterable[AnySeries]) -> Iterator[tuple[AnySeries, frozenset[int]]]:
    """Yield every series that no lower rank has recorded whole, each with the columns that a lower rank has recorded."""
    # A module that runs on some ranks only can share a series with other modules.
    owners: dict[tuple[str, str, str], int] = {}
    for series in all_series:
        rule, stat, _, names = series.key
        repeated = set()
        for column, name in enumerate(names):
            owner = owners.setdefault((rule, stat, name), series.rank)
            if owner != series.rank:
                repeated.add(column)
        if len(repeated) < len(names):
            yield series, frozenset(repeated)
