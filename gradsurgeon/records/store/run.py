"""Reading a run directory: finished, killed, or still being written. Needs no torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from gradsurgeon.common._libraries import library
from gradsurgeon.common.events import TRIPS, Event, RuleStatus
from gradsurgeon.common.match import compile_pattern, select
from gradsurgeon.errors import RecordError, printable, shorten_names
from gradsurgeon.records.store.layout import FORMAT, RUN_FILE, has_types, section
from gradsurgeon.records.store.memory import Lookup, RecordQueries, matching
from gradsurgeon.records.store.rank_file import Chosen, RankFile, StoredSeries
from gradsurgeon.records.store.recorded import Recorded

if TYPE_CHECKING:
    import pandas as pd

_FILE = re.compile(r"rank-(0|[1-9][0-9]{0,5})\.db")
_MOST_RANKS = 10**6
AnyRun = TypeVar("AnyRun", bound="StoredRun")


class StoredRun(RecordQueries):
    """The records and events of a run, even while it is being written. A context manager.

    Attributes:
        path: the directory.
        meta: the content of `run.json`: versions, rules, plan, when the run began.
        params: canonical names of the parameters, in the order of the model.
        ranks: the ranks that have records.
    """

    def __init__(self, path: Path, meta: Mapping[str, Any], files: Sequence[RankFile]) -> None:
        self.path = path
        self.meta = meta
        self._files = files
        model = section(meta, "model")
        params = model.get("params", [])
        self.params = tuple([param["name"] for param in params])
        self._aliases: dict[str, str] = {}
        for entry in params + model.get("modules", []):
            self._aliases.update(dict.fromkeys(entry.get("aliases", ()), entry["name"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have records."""
        return tuple(file.rank for file in self._files)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    @property
    def states(self) -> dict[int, str]:
        """The state of each rank: ``running``, ``finished``, or ``stopped`` without having been closed."""
        return {file.rank: file.end().state for file in self._files}

    @property
    def pending(self) -> dict[str, int]:
        """By name of a parameter, the update that its last records waited for, and that never came."""
        return section(self._files[0].left(), "pending")

    @property
    def events(self) -> list[Event]:
        """The events so far of all ranks, oldest first."""
        # The sort is stable: of events at one time, the lower rank comes first.
        return [event for _, event in sorted(self._timed(), key=itemgetter(0))]

    def _timed(self) -> Iterator[tuple[float, Event]]:
        for file in self._files:
            yield from file.events()

    @property
    def first_trip(self) -> float | None:
        """The time of the first event by which a rule said that an update is not as it should be, in seconds since 1970."""
        return min([time for time, event in self._timed() if event.kind in TRIPS], default=None)

    def status(self) -> dict[str, RuleStatus]:
        """Return what each rule has done. The firings of all ranks are added up."""
        by_rule: dict[str, list[RuleStatus]] = {rule["id"]: [] for rule in self.rules}
        for file in self._files:
            for rule, status in file.statuses().items():
                by_rule.setdefault(rule, []).append(status)
        return {rule: _joined(statuses) for rule, statuses in by_rule.items() if statuses}

    def recorded(self) -> Recorded:
        """Return what all ranks have recorded so far, as a report reads it."""
        world = self.meta.get("ranks")
        # A number in a damaged file may be of any size.
        if not isinstance(world, int) or world > _MOST_RANKS:
            world = 0
        started = range(max(world, self.ranks[-1] + 1))
        return Recorded(
            meta=self.meta,
            aliases=self._aliases,
            series=list(self),
            pending=self.pending,
            events=self.events,
            statuses=self.status(),
            ends={file.rank: file.end() for file in self._files},
            missing_ranks=sorted(set(started).difference(self.ranks)),
            changed_by_script=self._files[0].left().get("changed_by_script"),
        )

    @property
    def rules(self) -> list[dict[str, Any]]:
        """The plan of each rule, in file order: at least `id`, `action`, and names."""
        return list(section(self.meta, "plan").get("rules", ()))

    def __iter__(self) -> Iterator[StoredSeries]:
        """Yield every series of every rank."""
        for file in self._files:
            yield from file.series()

    def series(self, name: str, stat: str, rule: str | None = None) -> list[StoredSeries]:
        """Return the series that measure one tensor, from the lowest rank that recorded it."""
        matches = matching(self, name, stat, rule)
        return [series for series in matches if series.rank == matches[0].rank]

    def to_pandas(
        self, *, name: str | None = None, stat: str | None = None, rule: str | None = None
    ) -> pd.DataFrame:
        """Return one line per recorded value of all ranks, with the columns of `gradsurgeon export`.

        The columns are `step` (int64), `rank` (int32), `rule`, `point`, `stat`, `name` (categories) and `value`
        (float32). A tensor without a gradient has no line in that step; NaN and infinity are values. All
        lines must fit into memory: a line takes 64 bytes while the table is made, and 22 afterwards.

        Args:
            name: only tensors whose canonical name matches this pattern, as in a rule file.
            stat: only this statistic.
            rule: only the records of the rule with this id.

        Raises:
            GradSurgeonError: pandas is missing: `pip install 'gradsurgeon[pandas]'`.
            RecordError: nothing recorded fits.
            ValueError: the pattern is malformed.
        """
        library("pandas", "pandas", "to_pandas")
        from gradsurgeon.records.store import tables  # noqa: PLC0415 # events are read without numpy

        fitting = chosen(self, name, stat, rule)
        if not fitting:
            raise nothing_fits(self)
        return tables.data_frame(fitting)

    def _lookup(self) -> Lookup:
        logged = {}
        for rule, role in section(self.meta, "roles").items():
            if role.get("stats"):
                logged[rule] = (set(role["stats"]), set(self.names_of(rule)))
        for series in self:
            stats, names = logged.setdefault(series.key.rule, (set(), set()))
            stats.add(series.key.stat)
            names.update(series.key.names)
        known = set(self.params).union(*[names for _, names in logged.values()])
        return Lookup(sorted(known), self._aliases, logged, self.series)

    def names_of(self, rule: str) -> tuple[str, ...]:
        """Return the names that a rule was bound to."""
        for planned in self.rules:
            if planned["id"] == rule:
                return (*planned.get("params", ()), *planned.get("modules", ()))
        return ()


def chosen(run: StoredRun, name: str | None, stat: str | None, rule: str | None) -> Chosen:
    """Return the series that fit, each with the columns. Raises `PatternError` if the pattern is malformed."""
    pattern = compile_pattern("*" if name is None else name)
    fitting = []
    for series in run:
        key = series.key
        if rule in (None, key.rule) and stat in (None, key.stat):
            columns = select([pattern], key.names)
            if columns:
                fitting.append((series, columns))
    return fitting


def nothing_fits(run: StoredRun) -> RecordError:
    stats = {printable(f"{series.key.rule} {series.key.stat}") for series in run}
    if not stats:
        return RecordError(f"{printable(str(run.path))}: nothing was recorded")
    return RecordError(
        f"nothing recorded fits the rule, statistic and name asked for; recorded: {', '.join(sorted(stats))}"
    )


def open_run(path: str | os.PathLike[str]) -> StoredRun:
    return opened(path, StoredRun)


def opened(path: str | os.PathLike[str], kind: type[AnyRun]) -> AnyRun:
    folder = Path(path)
    meta = None
    try:
        meta = json.loads((folder / RUN_FILE).read_bytes())
    except OSError as error:
        message = (
            f"{printable(str(folder))}: cannot be opened as a run: {error.strerror}: {RUN_FILE}; a run "
            "is a directory, the one that `record=` or `--record` named, once rank 0 has begun"
        )
        # Models and processes of one script have runs of their own.
        inside = sorted(str(file.parent) for file in folder.glob(f"*/{RUN_FILE}"))
        if inside:
            message += f"; runs inside: {shorten_names(inside)}"
        raise RecordError(message) from None
    except (ValueError, RecursionError):
        pass  # refused below
    if not isinstance(meta, dict) or meta.get("format") != FORMAT or not has_types(meta):
        raise RecordError(
            f"{printable(str(folder / RUN_FILE))}: is damaged, or was not written by this version of gradsurgeon: "
            f"no JSON with format {FORMAT}; restore it, or record the run again"
        )
    files = {}
    for entry in folder.iterdir():
        match = _FILE.fullmatch(entry.name)
        if match and entry.is_file():
            files[int(match[1])] = entry
    if not files:
        raise RecordError(
            f"{printable(str(folder))}: holds {RUN_FILE}, but no records (rank-0.db): were they moved?"
        )
    return kind(folder, meta, [RankFile(file, rank) for rank, file in sorted(files.items())])


def _joined(ranks: Sequence[RuleStatus]) -> RuleStatus:
    matched, fired, altered, last_steps, warnings = zip(*map(astuple, ranks), strict=True)
    counts = [count for count in altered if count is not None]
    return RuleStatus(
        # Each rank has all the parameters, or a part of each.
        matched=max(matched),
        fired=sum(fired),
        altered=sum(counts) if counts else None,
        last_step=max([step for step in last_steps if step is not None], default=None),
        warnings=tuple(dict.fromkeys(chain.from_iterable(warnings))),
    )
