"""Reading the SQLite file of one rank, finished, killed, or still being written. It trusts nothing in the file."""

import json
import sqlite3
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, TypeAdapter

from gradsurgeon.common.events import Event, EventKind, RuleStatus
from gradsurgeon.errors import RecordError, printable
from gradsurgeon.records.store import layout
from gradsurgeon.records.store.database import connect, is_live, logs
from gradsurgeon.records.store.layout import Stored, row_id
from gradsurgeon.records.store.memory import Key, WholeSeries
from gradsurgeon.records.store.recorded import RankEnd

_T = TypeVar("_T")
# The columns of the records in long form, in the order of `gradsurgeon export`.
COLUMNS = ("step", "rank", "rule", "point", "stat", "name", "value")
_PATIENCE = 5.0
_LONGEST = 256 * 2**20
# Short queries bound the memory, and keep no writer without WAL waiting.
_BATCH_BYTES = 2**20
_BATCH_ROWS = 8192
_FLOAT = 4
# Rows that a writer can have written.
_ROWS = """
SELECT step, floats, absent FROM rows WHERE id BETWEEN ? AND ?
AND typeof(step) = 'integer' AND typeof(floats) = 'blob' AND length(floats) = ?
AND (absent IS NULL OR typeof(absent) = 'blob' AND length(absent) = ?) ORDER BY id
"""


@dataclass
class _More:
    """The keys of an event that have no column of their own."""

    diagnosis: dict[str, Any] | None = None
    sample_ids: tuple[int, ...] = ()
    told_at: int | None = None


# Not the parser of pydantic: a name may have lone surrogates.
_JSON = BeforeValidator(json.loads)
_SERIES = TypeAdapter(list[tuple[int, str, str, str, Annotated[tuple[str, ...], _JSON]]])
_EVENTS: Any = TypeAdapter(
    list[tuple[float, EventKind, str, int, int, str, str, Annotated[_More, _JSON]]]
)
_STATUSES = TypeAdapter(list[tuple[str, Annotated[RuleStatus, _JSON]]])
_LEFT = TypeAdapter(list[tuple[str, Annotated[Any, _JSON]]])


class RankFile:
    """The records of one rank. ``close`` closes the file, and so does the garbage collector."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        self._series: dict[int, StoredSeries] = {}
        try:
            self._connection = connect(path, _PATIENCE, "?mode=ro")
        except sqlite3.Error as error:
            raise self._unreadable(error) from None
        # A caller that drops a run without closing it gets no warning of an open database.
        self.close = weakref.finalize(self, self._connection.close)
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
        self.query("PRAGMA cell_size_check=ON")
        tables = dict(self.query("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))
        self._keys_of_event = "coalesce(more, '{}')"
        if tables.get("events") == layout.EVENTS_WITHOUT_MORE:
            tables["events"] = layout.TABLES["events"]
            self._keys_of_event = "'{}'"
        marks = [*self.query("PRAGMA application_id"), *self.query("PRAGMA user_version")]
        if marks != [(layout.APPLICATION,), (layout.FORMAT,)] or tables != layout.TABLES:
            raise self.damaged("its tables are not those of a run, or have yet to be written")

    def query(self, sql: str, *arguments: int) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(sql, arguments).fetchall()
        except (sqlite3.Error, OverflowError, UnicodeDecodeError, MemoryError) as error:
            # A text that is no UTF-8 raises no error of sqlite3.
            raise self._unreadable(error) from None

    def damaged(self, what: str = "it has values of wrong types or sizes") -> RecordError:
        return RecordError(
            f"{printable(str(self.path))}: is damaged: {what}; the other files of the run may still be fine: move this "
            "one elsewhere to read them"
        )

    def _unreadable(self, error: Exception) -> RecordError:
        return RecordError(
            f"{printable(str(self.path))}: cannot be read: {printable(str(error))}; it is damaged, or was "
            "not written by gradsurgeon, or has to be copied, with all of its directory, to a place that "
            "can be written"
        )

    def _checked(self, kind: TypeAdapter[_T], sql: str, *arguments: int) -> _T:
        rows = self.query(sql, *arguments)
        try:
            return kind.validate_python(rows)
        except (ValueError, RecursionError):
            raise self.damaged() from None

    def left(self) -> dict[str, Any]:
        """Return what the writer has left at the end of the run, nothing before."""
        left = self._checked(_LEFT, "SELECT key, value FROM meta")
        return dict(left)

    def end(self) -> RankEnd:
        left = self.left()
        state = "stopped"
        if left:
            state = "finished"
        elif is_live(self.path):
            state = "running"
        times = []
        for path in (self.path, *logs(self.path)):
            # A reader touches the index of the log.
            is_index = path.suffix == ".db-shm"
            if not is_index and path.is_file():
                times.append(path.stat().st_mtime)
        return RankEnd(state, left.get("ended", {}), max(times, default=None))

    def series(self) -> list["StoredSeries"]:
        """Return all series in order of creation. A running process adds further series."""
        sql = "SELECT id, rule, stat, point, names FROM series WHERE id > ? ORDER BY id"
        rows = self._checked(_SERIES, sql, max(self._series, default=0))
        for number, rule, stat, point, names in rows:
            self._series[number] = StoredSeries(self, number, Key(rule, stat, point, names))
        return list(self._series.values())

    def events(self) -> Iterator[tuple[float, Event]]:
        """Yield the events in the order of writing, each with its time in seconds since 1970."""
        columns = f"time, kind, rule, step, rank, name, message, {self._keys_of_event}"
        sql = f"SELECT {columns} FROM events ORDER BY id"  # noqa: S608 # of this file
        for time, *values, more in self._checked(_EVENTS, sql):
            yield time, Event(*values, **vars(more))

    def statuses(self) -> dict[str, RuleStatus]:
        statuses = self._checked(_STATUSES, "SELECT rule, state FROM statuses ORDER BY rowid")
        return dict(statuses)


class StoredSeries(WholeSeries):
    """One series in a file. Every call reads anew."""

    def __init__(self, file: RankFile, number: int, key: Key) -> None:
        super().__init__(key)
        self.rank = file.rank
        self._file = file
        # The ids that rows of the series have.
        self._low = row_id(number, 0)
        self._end = row_id(number + 1, 0)

    def __len__(self) -> int:
        newest = "SELECT coalesce(max(id) + 1, ?) FROM rows WHERE id >= ? AND id < ?"
        ((end,),) = self._file.query(newest, self._low, self._low, self._end)
        return int(end) - self._low

    def damaged(self) -> RecordError:
        return self._file.damaged("it lacks rows")

    def stored(self, start: int = 0, stop: int | None = None) -> Iterator[Stored]:
        width = len(self.key.names)
        size = _FLOAT * width
        if stop is None:
            stop = len(self)
        # At least one row, whatever its size.
        batch = min(_BATCH_ROWS, _BATCH_BYTES // (size + 1) + 1)
        for first in range(start, stop, batch):
            end = min(stop, first + batch)
            ids = (self._low + first, self._low + end - 1)
            rows = self._file.query(_ROWS, *ids, size, layout.absent_size(width))
            if len(rows) < end - first:
                raise self._file.damaged()
            yield from rows


# Series, each with the columns that were asked for.
Chosen = Sequence[tuple[StoredSeries, Sequence[int]]]
