"""Rows on their way from the device to the store."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradsurgeon import _numbers, _torch
from gradsurgeon.events import Event, RuleStatus
from gradsurgeon.runtime.ring import Ring
from gradsurgeon.store import Key, Records

if TYPE_CHECKING:
    from gradsurgeon.store.writer import RunWriter

# Rows wait on the device so that one transfer serves many; this many of them are a few hundred kB
# for a large model.
_ROWS_PER_FLUSH = 64
# What may be the last that a run does; for it the host has waited already.
_LAST_WORDS = frozenset({"trap", "skipped-step"})


class Recorder:
    """Collects rows of measurements and moves them to the host in one transfer per flush.

    Args:
        records: where rows are kept in memory.
        writer: where they are written as well; rows then wait for a second at most.
        statuses: what each rule has done, to be written along with the rows; it takes `wait`, whether
            for devices, and otherwise may tell what has been a moment ago.

    Nothing is moved while a CUDA graph is being captured: what is on the device has no value then, and
    to ask whether something has arrived would break the capture.
    """

    def __init__(
        self,
        records: Records,
        writer: RunWriter | None = None,
        statuses: Callable[..., Mapping[str, RuleStatus]] | None = None,
    ) -> None:
        self.records = records
        self.writer = writer
        self._statuses = statuses
        # Notes events that are not noted yet.
        self.late: Callable[[], None] | None = None
        self._ring: Ring[_Row] = Ring(self._take)
        # Rows were due on disk, and were still on their way.
        self._owed = False
        if writer is not None:
            # A script may end without `remove()`, on an exception above all. Weakly, because of a
            # session that never began only the list of what is to be done at exit would know.
            self._at_exit = atexit.register(partial(_close, weakref.ref(self)))

    def add(
        self, key: Key, step: int, found: Sequence[int], values: Tensor, *, replace: bool
    ) -> None:
        """Take one row.

        Args:
            key: the series.
            step: the clock of its tensors.
            found: the columns that have a value, ascending.
            values: float32, shape ``[len(found)]``, on any device.
            replace: the row takes the place of an earlier one of the same step.
        """
        row = _Row(key, step, found, replace)
        self._ring.put(row, values, slot=(id(key), step) if replace else None)
        if _torch.is_capturing():
            return
        if len(self._ring) >= _ROWS_PER_FLUSH or (self.writer is not None and self.writer.due()):
            self._flush()
        elif self._owed:
            self._catch_up()

    def end_step(self) -> None:
        """Mark the end of a step: what would be more than a second old by the next is written."""
        if _torch.is_capturing():
            return
        if self.writer is not None and self.writer.ends_step():
            self._write()
        elif self._owed:
            self._catch_up()

    def event(self, event: Event) -> None:
        """Write an event, and the rows that led to it where it may be the last that this run does."""
        if self.writer is None or self.writer.closed:
            return
        if not _torch.is_capturing():
            if event.kind in _LAST_WORDS:
                self.flush()
            else:
                self._send()
        self.writer.event(event)

    def close(self) -> None:
        """Write what waits and finish the run directory; records stay in memory."""
        if self.writer is not None:
            atexit.unregister(self._at_exit)
            if not self.writer.closed:
                if self.late is not None:
                    self.late()
                self._settle()
                self._commit(wait=True)
            self.writer.close()

    def discard(self) -> None:
        """Remove the files, as if there had been no place to write."""
        if self.writer is not None:
            atexit.unregister(self._at_exit)
            self.writer.discard()
            self.writer = None

    def flush(self) -> None:
        """Move all rows to the store. Waits for the device."""
        self._settle()
        if self.writer is not None and self.writer.due():
            self._write()

    def _settle(self) -> None:
        self._ring.settle()

    def _flush(self) -> None:
        """Let the rows travel, and move those to the store that have arrived."""
        if self.writer is not None and self.writer.due():
            self._write()
        else:
            self._send()

    def _send(self) -> None:
        self._ring.send()
        self._ring.collect()

    def _write(self) -> None:
        if self.writer is None or self.writer.closed:
            return
        self._send()
        # What is on its way is a moment late; the second after which it is due again may be long.
        self._owed = self._ring.under_way
        self._commit()

    def _catch_up(self) -> None:
        """Write what was due and has arrived since."""
        if self._ring.collect():
            self._owed = self._ring.under_way
            self._commit()

    def _commit(self, *, wait: bool = False) -> None:
        if self.writer is None or self.writer.closed:
            return
        if self._statuses is not None:
            self.writer.statuses(self._statuses(wait=wait))
        self.writer.commit()

    def _take(self, rows: Sequence[tuple[_Row, Tensor]]) -> None:
        parts = [row.part(values) for row, values in rows]
        # Memory has all of it before anything can go wrong with the file.
        for (row, _), (part, absent) in zip(rows, parts, strict=True):
            self.records.add(row.key, row.step, part, absent, replace=row.replace)
        if self.writer is None or self.writer.closed:
            return
        for (row, _), (part, absent) in zip(rows, parts, strict=True):
            self.writer.add(row.key, row.step, part, absent, replace=row.replace)


@dataclass(frozen=True, slots=True)
class _Row:
    """What the numbers of one row are."""

    key: Key
    step: int
    found: Sequence[int]
    replace: bool

    def part(self, values: Tensor) -> tuple[bytes, frozenset[int]]:
        """Return the whole row as bytes, and the columns without a value."""
        width = len(self.key.names)
        if len(self.found) == width:
            return _numbers.to_bytes(values), frozenset()
        whole = torch.zeros(width, device="cpu")
        whole[torch.tensor(self.found, device="cpu")] = values
        return _numbers.to_bytes(whole), frozenset(range(width)) - frozenset(self.found)


def _close(recorder: weakref.ref[Recorder]) -> None:
    if (found := recorder()) is not None:
        found.close()
