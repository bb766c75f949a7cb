"""Rows on their way from the device to the store."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradsurgeon import _numbers
from gradsurgeon.events import Event, RuleStatus
from gradsurgeon.store import Key, Records

if TYPE_CHECKING:
    from gradsurgeon.store.writer import RunWriter

# Rows wait on the device so that one transfer serves many; this many of them are a few hundred kB
# for a large model.
_ROWS_PER_FLUSH = 64


class Recorder:
    """Collects rows of measurements and moves them to the host in one transfer per flush.

    Args:
        records: where rows are kept in memory.
        writer: where they are written as well; rows then wait for a second at most.
        statuses: what each rule has done, to be written along with the rows.
    """

    def __init__(
        self,
        records: Records,
        writer: RunWriter | None = None,
        statuses: Callable[[], Mapping[str, RuleStatus]] | None = None,
    ) -> None:
        self.records = records
        self.writer = writer
        self._statuses = statuses
        self._waiting: list[tuple[Key, int, Tensor, frozenset[int], bool]] = []
        # Where the last row of each series waits: statistics and lanes take turns within a step.
        self._places: dict[int, int] = {}
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
        width = len(key.names)
        absent: frozenset[int] = frozenset()
        if len(found) != width:
            absent = frozenset(range(width)) - frozenset(found)
            whole = values.new_zeros(width)
            whole[torch.tensor(found, device=values.device)] = values
            values = whole
        row = (key, step, values.detach(), absent, replace)
        place = self._places.get(id(key))
        if replace and place is not None and self._waiting[place][1] == step:
            self._waiting[place] = row
            return
        self._places[id(key)] = len(self._waiting)
        self._waiting.append(row)
        full = len(self._waiting) >= _ROWS_PER_FLUSH
        if full or (self.writer is not None and self.writer.due()):
            self.flush()

    def end_step(self) -> None:
        """Mark the end of a step: what would be more than a second old by the next is written."""
        if self.writer is not None and self.writer.ends_step():
            self._write()

    def event(self, event: Event) -> None:
        """Write an event, and the rows that led to it: it may be the last that this run does."""
        if self.writer is not None and not self.writer.closed:
            self.flush()
            self.writer.event(event)

    def close(self) -> None:
        """Write what waits and finish the run directory; records stay in memory."""
        if self.writer is not None:
            atexit.unregister(self._at_exit)
            self._write()
            self.writer.close()

    def discard(self) -> None:
        """Remove the files, as if there had been no place to write."""
        if self.writer is not None:
            atexit.unregister(self._at_exit)
            self.writer.discard()
            self.writer = None

    def _write(self) -> None:
        if self.writer is None or self.writer.closed:
            return
        self._move()
        if self._statuses is not None:
            self.writer.statuses(self._statuses())
        self.writer.commit()

    def flush(self) -> None:
        """Move what waits to the store: one transfer per device."""
        if self.writer is not None and self.writer.due():
            self._write()
        else:
            self._move()

    def _move(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._places.clear()
        devices = {row[2].device for row in waiting}
        hosts: dict[torch.device, Tensor] = {}
        for device in devices:
            rows = [row[2] for row in waiting if row[2].device == device]
            hosts[device] = torch.cat(rows).cpu()
        offsets = dict.fromkeys(devices, 0)
        parts = []
        for key, step, values, absent, replace in waiting:
            start = offsets[values.device]
            offsets[values.device] = stop = start + values.numel()
            part = _numbers.to_bytes(hosts[values.device][start:stop])
            self.records.add(key, step, part, absent, replace=replace)
            parts.append(part)
        # Memory has all of it before anything can go wrong with the file.
        if self.writer is not None and not self.writer.closed:
            for (key, step, _, absent, replace), part in zip(waiting, parts, strict=True):
                self.writer.add(key, step, part, absent, replace=replace)


def _close(recorder: weakref.ref[Recorder]) -> None:
    if (found := recorder()) is not None:
        found.close()
