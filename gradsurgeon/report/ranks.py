"""How far each rank of a run came, and which one lags."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from gradsurgeon.language.planning.table import count
from gradsurgeon.records.store import Part

_MOST_LINES = 4
_MOST_NAMES = 8


class RankProgress(NamedTuple):
    """The last records of one rank."""

    rank: int
    step: int | None  # `None` without records
    written: float | None  # in seconds since 1970

    @property
    def words(self) -> str:
        text = "no record yet"
        if self.step is not None:
            text = f"last record of step {self.step:,}"
        if self.written is not None:
            # Local time, as on the reader's clock.
            time = datetime.fromtimestamp(self.written, UTC).astimezone()
            text += f" at {time:%Y-%m-%d %H:%M:%S}"
        return text


def progress_of(series: Iterable[Part], written: Mapping[int, float | None]) -> list[RankProgress]:
    """Return how far each rank came, in the order of ranks."""
    steps: dict[int, list[int]] = {}
    for part in series:
        steps.setdefault(part.rank, []).extend(part.ends())
    ranks = []
    for rank, time in sorted(written.items()):
        step = max(steps.get(rank, ()), default=None)
        ranks.append(RankProgress(rank, step, time))
    return ranks


def rank_lines(ranks: Sequence[RankProgress]) -> Iterator[str]:
    """Yield the last step and moment of each of several ranks, and how far it lags, those that lag most first."""
    if len(ranks) <= 1:
        return
    furthest = max(_next_step(rank) for rank in ranks)
    alike: dict[str, list[str]] = {}
    for rank in sorted(ranks, key=_next_step):
        text = rank.words
        behind = furthest - _next_step(rank)
        if behind:
            text += f", {count(behind, 'step')} behind"
        alike.setdefault(text, []).append(str(rank.rank))
    for text, names in list(alike.items())[:_MOST_LINES]:
        more = ""
        if len(names) > _MOST_NAMES:
            more = f" and {len(names) - _MOST_NAMES:,} more"
        yield f"rank {', '.join(names[:_MOST_NAMES])}{more}: {text}"


def _next_step(rank: RankProgress) -> int:
    return 0 if rank.step is None else rank.step + 1
