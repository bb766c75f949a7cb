"""Reading the SQLite file of one rank, finished, killed, or still being written.

Nothing in a file is trusted: its tables must be ours to the letter (a view or a trigger could run for
ever), every blob must have the size that its series says, and texts are data.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import weakref
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from gradsurgeon.errors import RecordError, printable
from gradsurgeon.events import Event, EventKind, RuleStatus
from gradsurgeon.store import layout
from gradsurgeon.store.claim import is_live
from gradsurgeon.store.database import uri
from gradsurgeon.store.layout import CHUNK, Summary, row_id
from gradsurgeon.store.memory import Key

_PATIENCE = 5.0
_LONGEST = 256 * 2**20
# Short queries, each on its own, never keep a writer without WAL waiting, and bound the memory.
_BATCH_BYTES = 4 * 2**20
_COLUMN_BATCH = 8192
_FLOAT = 4
_KINDS = frozenset(get_args(EventKind))
_STATUS = frozenset(field.name for field in fields(RuleStatus))


@dataclass(slots=True)
class Row:
    """The values of one step; ``absent`` holds the columns that have none."""

    step: int
    values: array[float]
    absent: frozenset[int] = frozenset()


class RankFile:
    """The records of one rank.

    Attributes:
        path: the file.
        rank: whose it is.
        close: lets go of it; what is dropped does so by itself.

    Raises:
        RecordError: it is no such file, or damaged.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        self._series: dict[int, StoredSeries] = {}
        try:
            self._connection = sqlite3.connect(
                uri(path, "mode=ro"),
                uri=True,
                timeout=_PATIENCE,
                isolation_level=None,
                check_same_thread=False,
            )
        except sqlite3.Error as error:
            raise self._unreadable(error) from None
        # Who drops a run without closing it must not be warned of a database that is still open.
        self.close = weakref.finalize(self, self._connection.close)
        try:
            self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
            for pragma in ("query_only=ON", "trusted_schema=OFF", "cell_size_check=ON"):
                self._connection.execute(f"PRAGMA {pragma}")
            self._check()
        except sqlite3.Error as error:
            self.close()
            raise self._unreadable(error) from None
        except BaseException:
            self.close()
            raise

    def query(self, sql: str, *arguments: int) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(sql, arguments).fetchall()
        except (sqlite3.Error, OverflowError, UnicodeDecodeError, MemoryError) as error:
            # Python's module does not turn into errors of its own what it cannot decode.
            raise self._unreadable(error) from None

    def damaged(self, what: str) -> RecordError:
        return RecordError(
            f"{printable(str(self.path))}: is damaged: {what}; the other files of the run may still be fine"
        )

    def _unreadable(self, error: Exception) -> RecordError:
        hint = "it is damaged, or was not written by gradsurgeon"
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_CANTOPEN:
            hint = "copy the whole run directory to a place that can be written, and open that"
        return RecordError(
            f"{printable(str(self.path))}: cannot be read: {printable(str(error))}; {hint}"
        )

    def _check(self) -> None:
        ((application,),) = self.query("PRAGMA application_id")
        ((version,),) = self.query("PRAGMA user_version")
        where = printable(str(self.path))
        if application != layout.APPLICATION:
            if not self.path.stat().st_size:
                raise RecordError(f"{where}: is empty: its run has not begun, or never did")
            raise RecordError(f"{where}: is an SQLite file, but none that gradsurgeon has written")
        if version > layout.FORMAT:
            raise RecordError(
                f"{where}: has format {version}, and this gradsurgeon reads {layout.FORMAT}: it was "
                "written by a newer one; upgrade gradsurgeon"
            )
        tables = self.query("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
        if dict(tables) != layout.TABLES:
            raise self.damaged("its tables are not those of a run")

    @property
    def state(self) -> str:
        """``running``, ``finished``, or ``stopped`` without having been closed."""
        if self.query("SELECT 1 FROM meta WHERE key = 'closed'"):
            return "finished"
        return "running" if is_live(self.path) else "stopped"

    def series(self) -> list[StoredSeries]:
        """Return all series, in order of creation; a running process adds to them."""
        newest = max(self._series, default=0)
        for number, rule, stat, point, text in self.query(
            "SELECT id, rule, stat, point, names FROM series WHERE id > ? ORDER BY id", newest
        ):
            names = self._json(text, "the names of a series")
            words = [rule, stat, point, *(names if isinstance(names, list) else [None])]
            if not all(isinstance(word, str) for word in words) or len(set(words[3:])) < len(names):
                raise self.damaged(f"series {number} has no proper names")
            key = Key(rule, stat, point, tuple(names))
            self._series[number] = StoredSeries(self, number, key)
        return list(self._series.values())

    def events(self) -> Iterator[tuple[float, Event]]:
        """Yield time and event, oldest first."""
        for time, kind, rule, step, rank, name, message in self.query(
            "SELECT time, kind, rule, step, rank, name, message FROM events ORDER BY id"
        ):
            texts = (kind, rule, name, message)
            whole = isinstance(step, int) and isinstance(rank, int) and isinstance(time, float)
            if not whole or not all(isinstance(text, str) for text in texts) or kind not in _KINDS:
                raise self.damaged("an event has values of wrong types")
            yield time, Event(kind, rule, step, rank, name, message)

    def statuses(self) -> dict[str, RuleStatus]:
        """Return what each rule had done when it was last written."""
        rows = self.query("SELECT rule, state FROM statuses ORDER BY rowid")
        return {str(rule): self._status(text) for rule, text in rows}

    def _status(self, text: object) -> RuleStatus:
        state = self._json(text, "the status of a rule")
        if not isinstance(state, dict) or not state.keys() >= _STATUS:
            raise self.damaged("the status of a rule is incomplete")
        match state:
            case {
                "matched": int(matched),
                "fired": int(fired),
                "changed": int() | float() as changed,
                "last_step": int() | None as last_step,
                "warnings": [*warnings],
            } if abs(changed) < sys.maxsize and all(isinstance(text, str) for text in warnings):
                return RuleStatus(matched, fired, float(changed), last_step, tuple(warnings))
        raise self.damaged("the status of a rule has values of wrong types")

    def _json(self, text: object, what: str) -> Any:
        try:
            return json.loads(text if isinstance(text, str) else "")
        except (ValueError, RecursionError):
            raise self.damaged(f"{what}: no JSON") from None


class StoredSeries:
    """One series in a file; what is asked for is read when it is asked for."""

    def __init__(self, file: RankFile, number: int, key: Key) -> None:
        self.key = key
        self.columns = {name: column for column, name in enumerate(key.names)}
        self._file = file
        self._width = len(key.names)
        self._low, self._high = row_id(number, 0), row_id(number + 1, 0) - 1

    @property
    def rank(self) -> int:
        return self._file.rank

    def __len__(self) -> int:
        ((top,),) = self._file.query(
            "SELECT max(id) FROM rows WHERE id BETWEEN ? AND ?", self._low, self._high
        )
        return 0 if top is None else int(top) - self._low + 1

    def ends(self) -> tuple[int, ...]:
        """Return the steps of the first and of the last row, nothing where there is none."""
        steps: list[int] = []
        for end in ("min", "max"):
            sql = f"SELECT step FROM rows WHERE id = (SELECT {end}(id) FROM rows WHERE id BETWEEN ? AND ?)"  # noqa: S608
            steps += [row[0] for row in self._file.query(sql, self._low, self._high)]
        if not all(isinstance(step, int) for step in steps):
            raise self._file.damaged(f"a row of {printable(self.key.rule)} has no step")
        return tuple(steps)

    def rows(self, start: int = 0, stop: int | None = None, every: int = 1) -> Iterator[Row]:
        """Yield every so many rows from ``start`` to before ``stop``, a few megabytes at a time."""
        for step, values, absent in self._stored(start, stop, every):
            yield Row(step, array("f", values), layout.unpack_absent(absent))

    def _stored(
        self, start: int = 0, stop: int | None = None, every: int = 1
    ) -> Iterator[layout.Stored]:
        size = max(1, _BATCH_BYTES // max(1, self._width * _FLOAT))
        end = self._low + (len(self) if stop is None else stop)
        for first in range(self._low + start, end, size * every):
            rows = self._batch(range(first, min(end, first + size * every), every))
            yield from map(self._checked, rows)
            if not rows:
                return

    def _batch(self, ids: range) -> list[tuple[Any, ...]]:
        sql = "SELECT step, floats, absent FROM rows WHERE id "
        if ids.step > 1:
            # Looking up each row jumps from one to the next, where `id % every` would read them all.
            return [row for number in ids for row in self._file.query(f"{sql} = ?", number)]
        return self._file.query(f"{sql} BETWEEN ? AND ? ORDER BY id", ids[0], ids[-1])

    def _checked(self, row: Sequence[Any]) -> layout.Stored:
        step, values, absent = row
        bits = b"\0" * layout.absent_size(self._width) if absent is None else absent
        if (
            not isinstance(step, int)
            or not (isinstance(values, bytes) and len(values) == _FLOAT * self._width)
            or not (isinstance(bits, bytes) and len(bits) == layout.absent_size(self._width))
            or int.from_bytes(bits, "little") >> self._width  # a column that is not there
        ):
            raise self._wrong_size("row")
        return step, values, absent

    def of(self, name: str) -> list[tuple[int, float]]:
        pairs: list[tuple[int, float]] = []
        first = self._low
        while rows := self._column(name, first, first + _COLUMN_BATCH - 1):
            pairs += _present(rows)
            first += _COLUMN_BATCH
        return pairs

    def last(self, name: str) -> tuple[int, float] | None:
        end = self._low + len(self)
        size = 1
        while end > self._low:
            first = max(self._low, end - size)
            if pairs := _present(self._column(name, first, end - 1)):
                return pairs[-1]
            end, size = first, min(2 * size, _COLUMN_BATCH)
        return None

    def newest(self) -> int | None:
        ends = self.ends()
        return ends[-1] if ends else None

    def between(self, name: str, start: int, stop: int) -> list[tuple[int, float]]:
        """Return ``(step, value)`` of one tensor in the rows from ``start`` to before ``stop``."""
        return _present(self._column(name, self._low + start, self._low + stop - 1))

    def _column(self, name: str, first: int, last: int) -> list[tuple[int, float, bool]]:
        """Return step, value, and whether there is none, of one column."""
        column = self.columns[name]
        # Slicing inside SQLite, so that other columns are never copied.
        rows = self._file.query(
            "SELECT step, substr(floats, ?, 4), substr(absent, ?, 1) FROM rows "
            "WHERE id BETWEEN ? AND ? ORDER BY id",
            column * _FLOAT + 1,
            column // 8 + 1,
            first,
            min(last, self._high),
        )
        for step, value, bits in rows:
            sound = isinstance(step, int) and isinstance(value, bytes) and len(value) == _FLOAT
            if not sound or not (bits is None or (isinstance(bits, bytes) and len(bits) == 1)):
                raise self._wrong_size("row")
        values = array("f", b"".join(row[1] for row in rows))
        bit = 1 << column % 8
        return [
            (step, value, bits is not None and bool(bits[0] & bit))
            for (step, _, bits), value in zip(rows, values, strict=True)
        ]

    def _wrong_size(self, what: str) -> RecordError:
        return self._file.damaged(f"a {what} of {printable(self.key.rule)} has the wrong size")

    def summaries(self) -> Iterator[Summary]:
        """Yield a summary of every `CHUNK` rows, and of the rest."""
        done = 0
        size = max(1, _BATCH_BYTES // max(1, 3 * self._width * _FLOAT))
        while rows := self._file.query(
            "SELECT id, first, last, maxima, minima, nonfinite, present FROM chunks "
            "WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?",
            self._low + done,
            self._high,
            size,
        ):
            for row in rows:
                yield self._summary(row, self._low + done)
                done += 1
        stored = self._stored(done * CHUNK)
        while rest := list(islice(stored, CHUNK)):
            yield layout.summarise(rest, self._width)

    def _summary(self, row: Sequence[Any], expected: int) -> Summary:
        number, first, last, *blobs = row
        sizes = [size * self._width for size in (_FLOAT, _FLOAT, 2, 2)]
        whole = all(isinstance(blob, bytes) for blob in blobs)
        sound = number == expected and isinstance(first, int) and isinstance(last, int)
        if not (whole and sound) or [len(blob) for blob in blobs] != sizes:
            raise self._wrong_size("summary")
        maxima, minima, nonfinite, present = blobs
        return Summary(
            first,
            last,
            array("f", maxima),
            array("f", minima),
            array("H", nonfinite),
            array("H", present),
        )


def _present(rows: Sequence[tuple[int, float, bool]]) -> list[tuple[int, float]]:
    """Return step and value of those rows that have one."""
    return [(step, value) for step, value, absent in rows if not absent]
