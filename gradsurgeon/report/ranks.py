"""How far each rank of a run came, and which one lags."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from gradsurgeon.common._grouping import grouped
from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store import Part
from gradsurgeon.records.store.recorded import RankEnd
from gradsurgeon.report.ending import clock

_MOST_LINES = 4
_MOST_NAMES = 8


class RankProgress(NamedTuple):
    """The last records of one rank."""

    rank: int
    step: int | None  # `None` without records
    written: float | None  # in seconds since 1970
    behind: int = 0  # how many steps of the rank that is furthest

    @property
    def words(self) -> str:
        text = "no record yet"
        if self.step is not None:
            text = f"last record of step {self.step:,}"
        if self.written is not None:
            text += f" at {clock(self.written)}"
        if self.behind:
            text += f", {count(self.behind, 'step')} behind"
        return text


def progress_of(series: Iterable[Part], ends: Mapping[int, RankEnd]) -> list[RankProgress]:
    """Return how far each rank came, in the order of ranks."""
    lasts: dict[int, int] = {}
    for part in series:
        for step in part.ends():
            lasts[part.rank] = max(step, lasts.get(part.rank, -1))
    furthest = max(lasts.values(), default=-1)
    ranks = []
    for rank, end in sorted(ends.items()):
        behind = furthest - lasts.get(rank, -1)
        ranks.append(RankProgress(rank, lasts.get(rank), end.written, behind))
    return ranks


def rank_lines(ranks: Sequence[RankProgress]) -> Iterator[str]:
    """Yield the last step and moment of each of several ranks, and how far it lags, those that lag most first."""
    if len(ranks) <= 1:
        return
    alike = grouped(sorted(ranks, key=lambda rank: -rank.behind), attrgetter("words"))
    for text, ranks_alike in islice(alike.items(), _MOST_LINES):
        names = [str(rank.rank) for rank in ranks_alike]
        more = ""
        if len(names) > _MOST_NAMES:
            more = f" and {len(names) - _MOST_NAMES:,} more"
        yield f"rank {', '.join(names[:_MOST_NAMES])}{more}: {text}"
