"""Reading the SQLite file of one rank, finished, killed, or still being written. It trusts nothing in the file."""

import json
import sqlite3
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import TypeAdapter

from gradsurgeon.errors import RecordError, printable
from gradsurgeon.events import Event, EventKind, RuleStatus
from gradsurgeon.store import layout
from gradsurgeon.store.database import connect, is_live
from gradsurgeon.store.layout import Stored, row_id
from gradsurgeon.store.memory import Key, WholeSeries

_T = TypeVar("_T")
# The columns of the records in long form, in the order of `gradsurgeon export`.
COLUMNS = ("step", "rank", "rule", "point", "stat", "name", "value")
_PATIENCE = 5.0
_LONGEST = 256 * 2**20
# Short queries bound the memory, and keep no writer without WAL waiting.
_BATCH_BYTES, _BATCH_ROWS = 2**20, 8192
_FLOAT = 4
_KINDS = frozenset(get_args(EventKind))
_NAMES, _STATUS = TypeAdapter(tuple[str, ...]), TypeAdapter(RuleStatus)
_MAPPING, _TIME = TypeAdapter(dict[str, Any]), TypeAdapter(float)


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
        for pragma in ("query_only=ON", "trusted_schema=OFF", "cell_size_check=ON"):
            self.query(f"PRAGMA {pragma}")
        tables = self.query("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
        ((application,),) = self.query("PRAGMA application_id")
        ((form,),) = self.query("PRAGMA user_version")
        found = application, form, dict(tables)
        if found != (layout.APPLICATION, layout.FORMAT, layout.TABLES):
            raise self.damaged("its tables are not those of a run, or have yet to be written")

    def query(
        self, sql: str, *arguments: int, kinds: tuple[type | int, ...] = ()
    ) -> list[tuple[Any, ...]]:
        """Return rows whose first columns have the given kinds. A number stands for a blob of so many bytes."""
        try:
            rows = self._connection.execute(sql, arguments).fetchall()
        except (sqlite3.Error, OverflowError, UnicodeDecodeError, MemoryError) as error:
            # A text that is no UTF-8 raises no error of sqlite3.
            raise self._unreadable(error) from None
        # By column: a check of each value would take longer than the query.
        if kinds and not all(map(_are_of, zip(*rows, strict=True), kinds)):
            raise self.damaged()
        return rows

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

    def _parsed(self, text: str, kind: TypeAdapter[_T]) -> _T:
        try:
            return kind.validate_python(json.loads(text))
        except (ValueError, RecursionError):
            raise self.damaged() from None

    def _meta(self) -> dict[str, str]:
        return dict(self.query("SELECT key, value FROM meta", kinds=(str, str)))

    def written(self, key: str) -> dict[str, Any]:
        """Return a mapping that the writer left at the end of the run, empty if there is none."""
        return self._parsed(self._meta().get(key, "{}"), _MAPPING)

    @property
    def state(self) -> str:
        """``running``, ``finished``, or ``stopped`` without having been closed."""
        if (closed := self._meta().get("closed")) is not None:
            self._parsed(closed, _TIME)
            return "finished"
        return "running" if is_live(self.path) else "stopped"

    def series(self) -> list["StoredSeries"]:
        """Return all series in order of creation. A running process adds further series."""
        for number, rule, stat, point, text in self.query(
            "SELECT id, rule, stat, point, names FROM series WHERE id > ? ORDER BY id",
            max(self._series, default=0),
            kinds=(int, str, str, str, str),
        ):
            names = self._parsed(text, _NAMES)
            if len(set(names)) < len(names):
                raise self.damaged()
            self._series[number] = StoredSeries(self, number, Key(rule, stat, point, names))
        return list(self._series.values())

    def events(self) -> Iterator[tuple[float, Event]]:
        """Yield the events in the order of writing, each with its time in seconds since 1970."""
        for time, kind, *rest in self.query(
            "SELECT time, kind, rule, step, rank, name, message FROM events ORDER BY id",
            kinds=(float, str, str, int, int, str, str),
        ):
            if kind not in _KINDS:
                raise self.damaged()
            yield time, Event(kind, *rest)

    def statuses(self) -> dict[str, RuleStatus]:
        rows = self.query("SELECT rule, state FROM statuses ORDER BY rowid", kinds=(str, str))
        statuses = {rule: self._parsed(text, _STATUS) for rule, text in rows}
        if not all(0 <= status.changed <= 1 for status in statuses.values()):
            raise self.damaged()
        return statuses


def _are_of(values: Sequence[Any], kind: type | int) -> bool:
    if isinstance(kind, type):
        return set(map(type, values)) <= {kind}
    return set(map(type, values)) <= {bytes} and set(map(len, values)) <= {kind}


class StoredSeries(WholeSeries):
    """One series in a file. Every call reads anew."""

    def __init__(self, file: RankFile, number: int, key: Key) -> None:
        super().__init__(key)
        self.rank = file.rank
        self._file = file
        self._width = len(key.names)
        self._batch = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, _FLOAT * self._width)))
        self._low, self._high = row_id(number, 0), row_id(number + 1, 0) - 1

    def __len__(self) -> int:
        ((top,),) = self._file.query(
            "SELECT max(id) FROM rows WHERE id BETWEEN ? AND ?", self._low, self._high
        )
        return 0 if top is None else int(top) - self._low + 1

    def damaged(self) -> RecordError:
        return self._file.damaged("it lacks rows")

    def stored(self, start: int = 0, stop: int | None = None) -> Iterator[Stored]:
        size, floats = layout.absent_size(self._width), _FLOAT * self._width
        end = len(self) if stop is None else stop
        for first in range(start, end, self._batch):
            rows = self._file.query(
                "SELECT step, floats, absent FROM rows WHERE id BETWEEN ? AND ? ORDER BY id",
                self._low + first,
                self._low + min(end, first + self._batch) - 1,
                kinds=(int, floats),
            )
            # Nearly all rows lack the same columns, or none.
            for mask in {row[2] for row in rows} - {None}:
                if not _are_of([mask], size) or int.from_bytes(mask, "little") >> self._width:
                    raise self._file.damaged()  # of a column that is not there
            yield from rows


# Series, each with the columns that were asked for.
Chosen = Sequence[tuple[StoredSeries, Sequence[int]]]
