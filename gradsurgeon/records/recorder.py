"""The recorder of a session: rows on their way from the device to the store."""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradsurgeon.actions import ObserverRule
from gradsurgeon.common.events import Event, is_trip
from gradsurgeon.errors import TrapError, printable, reason_of
from gradsurgeon.records.device_queue import DeviceQueue, PendingStatistics
from gradsurgeon.records.event_log import EventLog
from gradsurgeon.records.script_edits import ScriptEdits
from gradsurgeon.records.shared_rows import MeasuredRow, PendingRow, SharedRows, shares
from gradsurgeon.records.store import Key, Records
from gradsurgeon.records.store.layout import state_name
from gradsurgeon.tensors import _torch

if TYPE_CHECKING:
    from gradsurgeon.records.delivery import Delivery
    from gradsurgeon.records.store.writer import RunWriter

# Rows wait on the device so one transfer serves many; this many rows take a few hundred kB
# for a large model.
_ROWS_PER_FLUSH = 128
# Statistics of single tensors, each with a copy of at most 8 kB: several steps are measured together.
_MOST_PENDING = 1024
# A killed script resumes from a state that is at most this many seconds old.
_STATE_SECONDS = 60.0
_LONG_STEP = 1.0
_NO_STATE = "the state to resume from could not be written, and training goes on"
_DROPPED = (
    "records in memory have reached their limit: from now on new records replace the oldest; a run "
    "directory (record=) keeps all of them"
)


class Recorder:
    """Moves rows of measurements to the host in one transfer per flush, to memory, the run directory and sinks."""

    def __init__(
        self,
        records: Records,
        event_log: EventLog,
        writer: RunWriter | None = None,
        sinks: Sequence[Delivery] = (),
        *,
        step: Callable[[], int] = int,
        write_state: Callable[[Path], object] = bool,
        pending: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self.records = records
        self.writer = writer
        self._sinks = sinks
        self._outlets: list[RunWriter | Delivery] = [*sinks]
        # Only readers of a run directory ask whether the script edits gradients.
        self.script_edits: ScriptEdits | None = None
        if writer is not None:
            self._outlets.insert(0, writer)
            self.script_edits = ScriptEdits()
        self._step = step
        self._write_state_file = write_state
        self._pending_updates = pending
        self._state_written = self._step_ended = time.monotonic()
        self._outlived = _exceptions()
        # The failed writes, with the reasons.
        self.lost: list[str] = []
        # How the training ended, once it has.
        self.ending: dict[str, Any] = {}
        self._event_log = event_log
        self._pending = PendingStatistics()
        self._ring: DeviceQueue[PendingRow] = DeviceQueue(self._receive)
        self.shared = SharedRows(self._report_of_shared)
        event_log.listen(self.event)
        # A script may end without `remove()`, above all on an exception. The reference is weak, because otherwise
        # the exit handler would keep alive a session that never began.
        self._at_exit = partial(_close, weakref.ref(self))
        if self._outlets:
            atexit.register(self._at_exit)

    def _is_due(self) -> bool:
        return any(outlet.is_due() for outlet in self._outlets)

    def add(
        self,
        key: Key,
        step: int,
        columns: Sequence[int],
        values: Tensor,
        *,
        replace: bool,
        grads: Sequence[Tensor] = (),
        is_copy: bool = False,
        joined: Key | None = None,
    ) -> None:
        """Add one row, or replace the last row of the same step. ``columns`` are ascending.

        ``values`` are one number per column, or of shards what merging the statistic needs: ``[len(columns), k]``.
        ``grads`` are the tensors of the columns, if this rank has measured only shards of some. Nobody writes to a copy.
        With ``joined``, the numbers of shards become one number in this series.
        """
        row = PendingRow(key, step, columns, replace, (), shares(grads), self.shared.passes, joined)
        slot = None
        if replace:
            # The slot uses the identity of the key: hashing the names of thousands of tensors takes longer than measuring them.
            slot = (id(key), step)
        waiting = self._ring.put(row, values, slot=slot, is_copy=is_copy)
        self._move(are_many=waiting >= _ROWS_PER_FLUSH)

    def observe(self, rule: ObserverRule, name: str, step: int, tensor: Tensor) -> None:
        """Record the statistics of one tensor as it is now; each call adds a value of its own."""
        self._pending.add(rule, name, step, tensor)
        self._move(are_many=len(self._pending) >= _MOST_PENDING)

    def _gather(self) -> None:
        # Tensors on the device have no value during the capture of a CUDA graph.
        if _torch.is_capturing():
            return
        # If two threads take rows, the first must put all of its rows before the second.
        with self._ring.lock:
            for row, values in self._pending.take_rows():
                self._ring.put(row, values, is_copy=True)

    def end_step(self, *, raised: bool = False) -> None:
        # Exceptions that were there at an update have not ended the training: the script trains in an `except` block, or
        # in a notebook, which shows an exception and goes on. The error that the step has ``raised`` may end it.
        if not raised:
            self._outlived = _exceptions()
        # The rows of a long step must not wait until the next one ends.
        now = time.monotonic()
        self._move(is_late=now - self._step_ended > _LONG_STEP)
        self._step_ended = now
        # The state has its own clock: each event commits the outlets and restarts theirs.
        if now - self._state_written > _STATE_SECONDS:
            self._write_state()

    def _move(self, *, are_many: bool = False, is_late: bool = False) -> None:
        """Send what waits if it is time, or if there is too much of it."""
        due = is_late or self._is_due()
        if due or are_many:
            self._send()
        if due:
            self._commit()

    def _send(self, *, wait: bool = False) -> None:
        self._gather()
        self._ring.send(wait=wait)
        with self._ring.lock:
            self._store(self.shared.exchange())

    def event(self, event: Event) -> None:
        if all(outlet.closed for outlet in self._outlets):
            return
        # The trip may be the last event of a run; the host has waited for the device anyway.
        self._send(wait=event.kind == "skipped-step" or is_trip(event, self._event_log.edits))
        for outlet in self._outlets:
            outlet.event(event)
        self._report_failures()

    def flush(self) -> None:
        self._send(wait=True)
        if self._is_due():
            self._commit()

    def collect(self, first: Callable[[], object] = int) -> None:
        """Read what devices still hold. If a device has failed, drop it: from then on no device is asked any more.

        ``first`` may read devices also.
        """
        try:
            first()
            self._event_log.read_devices()
            self.flush()
        except RuntimeError as error:
            failure = _torch.device_failure(error)
            if not failure:
                raise
            self._event_log.flags.drop()
            self._pending.drop()
            self._ring.drop()
            steps = chain.from_iterable(series.ends() for series in self.records)
            last = max(steps, default=None)
            kept = "no record was kept"
            if last is not None:
                kept = f"records up to step {last:,} are kept"
            self._report_loss(f"{printable(failure)}; {kept}")

    def close(self, error: BaseException | None = None) -> None:
        """Store everything, and write that the run has ended, by this exception if there is one."""
        outlived = self._outlived
        self._outlived = (None, None)
        if any(error is earlier for earlier in outlived):
            error = None
        self.ending = cause_of_end(error)
        # Closing may take seconds, and Ctrl-C must not leave the run open.
        with ExitStack() as stack:
            stack.callback(atexit.unregister, self._at_exit)
            stack.callback(self._report_failures)
            if self.writer is not None and self.script_edits is not None:
                left = {
                    "ended": self.ending,
                    "pending": dict(self._pending_updates()),
                    "changed_by_script": self.script_edits.result(),
                }
                stack.callback(self.writer.close, left)
            self.collect()
            with self._ring.lock:
                self._store(self.shared.close())
            self._commit(wait=True)
            self._write_state()
            # All sinks end first: then none waits for another.
            for sink in self._sinks:
                sink.end()
            # A failure of a sink is an event, which the run still gets.
            for sink in self._sinks:
                sink.close()
            self._report_failures()

    def discard(self) -> None:
        atexit.unregister(self._at_exit)
        for outlet in self._outlets:
            outlet.discard()

    def _report_failures(self) -> None:
        for outlet in self._outlets:
            for text in outlet.news():
                self._report_loss(text)

    def _report_loss(self, text: str) -> None:
        """Report a loss, once: a write may be retried every minute."""
        if text not in self.lost:
            self.lost.append(text)
            self._event_log.emit("notice", text, step=self._step(), warn=True)

    def _report_of_shared(self, topic: str, rule: str, text: str) -> None:
        self._event_log.notice_once(topic, text, rule=rule, step=self._step(), warn=True)

    def _commit(self, *, wait: bool = False) -> None:
        if self.writer is not None:
            self.writer.statuses(self._event_log.status(wait=wait))
        for outlet in self._outlets:
            outlet.commit()
        self._report_failures()

    def _write_state(self) -> None:
        """Write the state to resume from; a failure becomes a notice."""
        self._state_written = time.monotonic()
        writer = self.writer
        if writer is None or writer.closed or _torch.is_capturing():
            return
        try:
            self._write_state_file(writer.path / state_name(writer.rank))
        except Exception as error:  # noqa: BLE001 # a failure here must not stop training
            self._report_loss(f"{_NO_STATE}: {reason_of(error)}")

    def _receive(self, rows: Sequence[MeasuredRow]) -> None:
        for row, values in rows:
            if row.shares:
                self.shared.add(row, values)
        self._store((row, values) for row, values in rows if not row.shares)

    def _store(self, rows: Iterable[MeasuredRow]) -> None:
        packed = [row.measured(values) for row, values in rows]
        # Memory has all rows before the file can fail.
        for store in (self.records, *self._outlets):
            for measured in packed:
                store.add_row(measured)
        if packed and self.records.dropped and self.writer is None:
            self._event_log.notice_once("records", _DROPPED, step=packed[-1].step)


def cause_of_end(error: BaseException | None) -> dict[str, Any]:
    """Return the type of the exception that ends a training, with step and rule of a trap; nothing of a clean end."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return {}
    cause: dict[str, Any] = {"error": type(error).__name__}
    if isinstance(error, SystemExit):
        # Python prints a text and exits with 1.
        cause["status"] = error.code if isinstance(error.code, int) else 1
    if isinstance(error, TrapError):
        cause |= {"step": error.step, "rule": error.rule}
    return cause


def _exceptions() -> tuple[BaseException | None, BaseException | None]:
    """Return the exception that is being handled, and the last one that Python, or a notebook, has shown."""
    return sys.exc_info()[1], getattr(sys, "last_value", None)


def _close(reference: weakref.ref[Recorder]) -> None:
    recorder = reference()
    if recorder is not None:
        # The interpreter is shutting down, and knows the exception that nobody has caught.
        recorder.close(getattr(sys, "last_value", None))
