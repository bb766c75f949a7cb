"""The recorder of a session: rows on their way from the device to the store, and copies of tensors."""

from __future__ import annotations

import atexit
import io
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradsurgeon import _numbers, _torch
from gradsurgeon.actions import ObserverRule, Rule
from gradsurgeon.errors import TrapError, printable
from gradsurgeon.events import Event, is_trip
from gradsurgeon.recording.device_queue import DeviceQueue
from gradsurgeon.recording.event_log import EventLog
from gradsurgeon.recording.pending_statistics import PendingStatistics
from gradsurgeon.recording.previews import CaptureKey, previews
from gradsurgeon.recording.quiet_writing import QuietWriting
from gradsurgeon.recording.shared_rows import PartRow, SharedRows, WholeRow, shares
from gradsurgeon.store import Key, Records

if TYPE_CHECKING:
    from gradsurgeon.sinks.delivery import Delivery
    from gradsurgeon.store.writer import RunWriter

# Rows wait on the device so one transfer serves many; this many rows take a few hundred kB
# for a large model.
_ROWS_PER_FLUSH = 64
# Statistics of single tensors, each with a copy of at most 8 kB: several steps are measured together.
_MOST_PENDING = 1024
# A killed script resumes from a state that is at most this many seconds old.
_STATE_SECONDS = 60.0
_DROPPED = (
    "records in memory have reached their limit: from now on new records replace the oldest; a run "
    "directory (record=) keeps all of them"
)


class Recorder:
    """Collects rows of measurements and moves them to the host in one transfer per flush.

    The rows stay in memory. A writer, if there is one, stores them after a second at most, together with events
    and the status of each rule. Sinks get them equally often.

    Args:
        records: keep the rows in memory.
        event_log: receives notices on failures, and hands each event on.
        writer: the writer of the run directory.
        sinks: receive aggregates.
        step: returns the step for an event without its own.
        state: returns the state from which a later session can resume.
        pending: returns the number of an optimizer's next update, by the names of its parameters.
    """

    def __init__(
        self,
        records: Records,
        event_log: EventLog,
        writer: RunWriter | None = None,
        sinks: Sequence[Delivery] = (),
        *,
        step: Callable[[], int] = int,
        state: Callable[[], dict[str, Any]] | None = None,
        pending: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self.records = records
        self.writer = writer
        self._sinks = list(sinks)
        # The destinations of rows and events besides memory.
        self._outlets: list[RunWriter | Delivery] = [*([] if writer is None else [writer]), *sinks]
        self.captures = CapturedTensors(event_log)
        self._step, self._state, self._next = step, state, pending
        self._state_written = time.monotonic()
        self._outlived = _exceptions()
        self._quiet: QuietWriting | None = None
        # What waited when `_write_waiting` last looked: rows, and tensors that are not rows yet.
        self._waited = (0, 0)
        # The failed writes, with the reasons.
        self.lost: list[str] = []
        self._event_log = event_log
        self._pending = PendingStatistics()
        self._ring: DeviceQueue[_Row | PartRow] = DeviceQueue(self._take)
        # Rows of tensors that ranks share.
        self.shared = SharedRows(self._tell_of_shared)
        event_log.listen(self.event)
        if self._outlets:
            # A script may end without `remove()`, above all on an exception. The reference is weak, because otherwise
            # the exit handler would keep alive a session that never began.
            self._at_exit = atexit.register(partial(_close, weakref.ref(self)))

    def _tell_failures(self) -> None:
        for text in [text for outlet in self._outlets for text in outlet.news()]:
            self.lost.append(text)
            self._event_log.emit("notice", text, step=self._step(), warn=True)

    @property
    def _open(self) -> list[RunWriter | Delivery]:
        return [outlet for outlet in self._outlets if not outlet.closed]

    def _is_due(self) -> bool:
        return any(outlet.due() for outlet in self._outlets)

    def add(
        self, key: Key, step: int, columns: Sequence[int], values: Tensor, *, replace: bool
    ) -> None:
        """Add one row: the values of some columns, ascending, or values that replace an earlier row."""
        row = _Row(key, step, columns, replace)
        # The slot uses the key's identity: hashing the names of thousands of tensors takes longer than measuring them.
        self._ring.put(row, values, slot=(id(key), step) if replace else None)
        self._move(due=self._is_due())

    def add_parts(
        self, key: Key, step: int, columns: Sequence[int], grads: Sequence[Tensor], parts: Tensor
    ) -> None:
        """Add one row of which this rank has measured only shards, or replace the last row of the same step.

        Args:
            key: the key of the series.
            step: the step of the row.
            columns: the columns that have values, ascending.
            grads: the tensors of the columns.
            parts: shape ``[len(columns), k]``, the numbers that merging the statistic needs.
        """
        row = PartRow(key, step, self.shared.passes, columns, shares(grads))
        self._ring.put(row, parts, slot=(id(key), step))
        self._move(due=self._is_due())

    def observe(self, rule: ObserverRule, name: str, step: int, tensor: Tensor) -> None:
        """Record the statistics of one tensor as it is now; each call adds a value of its own."""
        self._pending.add(rule, name, step, tensor)
        due = self._is_due()
        if due or len(self._pending) >= _MOST_PENDING:
            self._gather()
            self._move(due=due)

    def _gather(self) -> None:
        # Tensors on the device have no value during the capture of a CUDA graph.
        if not len(self._pending) or _torch.is_capturing():
            return
        # If two threads take rows, the first must put all of its rows before the second.
        with self._ring.lock:
            for key, step, columns, values, parts in self._pending.take():
                self._ring.put(_Row(key, step, columns, replace=False, parts=parts), values)

    def end_step(self) -> None:
        # Exceptions that were there at an update have not ended the training: the script trains in an `except` block, or
        # in a notebook, which shows an exception and goes on.
        self._outlived = _exceptions()
        due = False
        for outlet in self._outlets:  # each outlet must learn of it
            due |= outlet.ends_step()
        if due:
            self._gather()
            self._move(due=True)
        # The state has its own clock: each event commits the outlets and restarts theirs.
        if time.monotonic() - self._state_written > _STATE_SECONDS:
            self._write_state()

    def _write_waiting(self) -> None:
        """Write the rows that wait on the host, if none has come for a while: the script may hang.

        Another thread calls this. It leaves alone what is on a device, whose CUDA graph may be in the making.
        """
        writer = self.writer
        if writer is None or not writer.due():
            return
        with self._ring.lock:
            before, self._waited = self._waited, (len(self._ring), len(self._pending))
            if self._waited != before or not (self._ring.on_host and self._pending.on_host):
                return
            self._gather()
            self._ring.send()
        writer.commit()

    def _watch(self) -> None:
        """Start to write the rows of a script that hangs."""
        # A process that has too many threads goes without.
        with suppress(RuntimeError):
            self._quiet = QuietWriting(self._write_waiting)

    def _stop_watching(self) -> None:
        if self._quiet is not None:
            self._quiet.stop()

    def _move(self, *, due: bool) -> None:
        if self._quiet is None and self.writer is not None and not self.writer.closed:
            self._watch()
        if due or len(self._ring) >= _ROWS_PER_FLUSH:
            self._ring.send()
            self._exchange()
        if due:
            self._commit()

    def event(self, event: Event) -> None:
        if not (outlets := self._open):
            return
        # The trip may be the last event of a run; the host has waited for the device anyway.
        if event.kind == "skipped-step" or is_trip(event, self._event_log.edits):
            self.flush()
        else:
            self._gather()
            self._ring.send()
            self._exchange()
        for outlet in outlets:
            outlet.event(event)
        self._tell_failures()

    def close(self, error: BaseException | None = None) -> None:
        """Store everything, and write that the run has ended, by this exception if there is one."""
        if any(error is one for one in self._outlived):
            error = None
        # Closing may take seconds, and Ctrl-C must not leave the run open.
        with ExitStack() as stack:
            if self._outlets:
                stack.callback(atexit.unregister, self._at_exit)
            stack.callback(self._tell_failures)
            stack.callback(self._stop_watching)
            if self.writer is not None:
                stack.callback(self._close_writer, self.writer, cause_of_end(error))
            self._gather()
            self._ring.settle()
            with self._ring.lock:
                self._keep(self.shared.close())
            if self._outlets:
                self._commit(wait=True)
            begin = time.monotonic()
            for sink in self._sinks:
                sink.end()
            self._write_previews()
            # A failure of a sink is an event, which the run still gets.
            for sink in self._sinks:
                sink.close(begin)
            self._tell_failures()

    def _close_writer(self, writer: RunWriter, ended: Mapping[str, Any]) -> None:
        # The last rows have arrived by now.
        writer.close(ended, self._pending_rows())

    def _pending_rows(self) -> dict[str, int]:
        steps = self._next()
        keys = (series.key for series in self.records)
        firsts = {key.names[0] for key in keys if key.names and key.point == "accumulated"}
        return {name: steps[name] for name in firsts if name in steps}

    def _write_previews(self) -> None:
        """Write small previews of the captured tensors; a failure becomes a notice."""
        writer, captures = self.writer, self.captures
        if writer is None or writer.closed or not captures.rules or _torch.is_capturing():
            return
        try:
            writer.captures(previews(captures.rules, captures.of))
        except Exception as error:  # noqa: BLE001 # a failure here must not stop training
            self._lose("the pictures of captured tensors could not be written", error)

    def discard(self) -> None:
        self._stop_watching()
        if self._outlets:
            atexit.unregister(self._at_exit)
        for outlet in self._outlets:
            outlet.discard()
        self.writer, self._sinks, self._outlets = None, [], []

    def flush(self) -> None:
        self._gather()
        self._ring.settle()
        self._exchange()
        if self._is_due():
            self._commit()

    def _exchange(self) -> None:
        with self._ring.lock:
            self._keep(self.shared.exchange())

    def _tell_of_shared(self, topic: str, rule: str, text: str) -> None:
        self._event_log.notice_once(topic, text, rule=rule, step=self._step(), warn=True)

    def _commit(self, *, wait: bool = False) -> None:
        # A writer that failed still has to report it.
        if self.writer is not None and not self.writer.closed:
            self.writer.statuses(self._event_log.status(wait=wait))
        for outlet in self._outlets:
            outlet.commit()
        self._tell_failures()
        if wait:
            self._write_state()

    def _write_state(self) -> None:
        self._state_written = time.monotonic()
        writer = self.writer
        if self._state is None or writer is None or writer.closed or _torch.is_capturing():
            return
        try:
            file = io.BytesIO()
            torch.save(self._state(), file)
            writer.state(file.getvalue())
        except Exception as error:  # noqa: BLE001 # a failure here must not stop training
            what = "the state to resume from could not be written, and training goes on"
            self._lose(what, error, warn=True)

    def _lose(self, what: str, error: Exception, *, warn: bool = False) -> None:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        text = f"{what}: {printable(reason)}"
        if text not in self.lost:  # the write may be retried every minute
            self.lost.append(text)
        self._event_log.notice_once(what, text, step=self._step(), warn=warn)

    def _take(self, rows: Sequence[tuple[_Row | PartRow, Tensor]]) -> None:
        packed = []
        for row, values in rows:
            if isinstance(row, PartRow):
                self.shared.take(row, values)
            else:
                packed.append((row, *row.pack(values)))
        self._store(packed)

    def _keep(self, rows: Iterable[WholeRow]) -> None:
        whole = ((_Row(row.key, row.step, row.columns, replace=True), row.values) for row in rows)
        self._store([(row, *row.pack(values)) for row, values in whole])

    def _store(self, packed: Sequence[tuple[_Row, bytes, frozenset[int]]]) -> None:
        # Memory has all rows before the file can fail.
        for store in (self.records, *self._open):
            for row, values, absent in packed:
                store.add(row.key, row.step, values, absent, replace=row.replace)
        if packed and self.records.dropped and self.writer is None:
            self._event_log.notice_once("records", _DROPPED, step=packed[-1][0].step)


@dataclass(frozen=True, slots=True)
class _Row:
    key: Key
    step: int
    columns: Sequence[int]
    replace: bool
    # Kept until the row has arrived: see `pending_statistics`.
    parts: Sequence[object] = ()

    def pack(self, values: Tensor) -> tuple[bytes, frozenset[int]]:
        width = len(self.key.names)
        if len(self.columns) == width:
            return _numbers.to_bytes(values), frozenset()
        # Scripts may set another default dtype or default device.
        whole = torch.zeros(width, dtype=torch.float32, device="cpu")
        whole[torch.tensor(self.columns, device="cpu")] = values
        return _numbers.to_bytes(whole), frozenset(range(width)) - frozenset(self.columns)


def cause_of_end(error: BaseException | None) -> dict[str, Any]:
    """Return the type of the exception that ends a training, with step and rule of a trap; nothing of a clean end."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return {}
    found: dict[str, Any] = {"error": type(error).__name__}
    if isinstance(error, SystemExit):
        # Python prints a text and exits with 1.
        found["status"] = error.code if isinstance(error.code, int) else 1
    if isinstance(error, TrapError):
        found |= {"step": error.step, "rule": error.rule}
    return found


def _exceptions() -> tuple[BaseException | None, BaseException | None]:
    """Return the exception that is being handled, and the last one that Python, or a notebook, has shown."""
    return sys.exc_info()[1], getattr(sys, "last_value", None)


def _close(reference: weakref.ref[Recorder]) -> None:
    if (recorder := reference()) is not None:
        # The interpreter is shutting down, and knows the exception that nobody has caught.
        recorder.close(getattr(sys, "last_value", None))


class CapturedTensors:
    """Copies of tensors per rule, by name, step and call; new copies replace the oldest."""

    def __init__(self, event_log: EventLog) -> None:
        # The rules that have kept a tensor.
        self.rules: dict[str, Rule] = {}
        self._event_log = event_log
        self._kept: dict[str, dict[CaptureKey, Tensor]] = {}
        self._bytes: dict[str, int] = {}
        self._calls: dict[tuple[str, str], tuple[int, int]] = {}

    def keep(self, rule: Rule, name: str, step: int, tensor: Tensor) -> None:
        """Keep a copy: the script or the next layer may later write into the tensor."""
        last, call = self._calls.get((rule.id, name), (-1, -1))
        call = call + 1 if last == step else 0
        self._calls[rule.id, name] = (step, call)
        self.rules[rule.id] = rule
        kept = self._kept.setdefault(rule.id, {})
        kept[name, step, call] = copied = tensor.detach().clone()
        limit: int = getattr(rule, "max_bytes", 0)
        self._bytes[rule.id] = self._bytes.get(rule.id, 0) + _size(copied)
        while self._bytes[rule.id] > limit and kept:
            oldest = next(iter(kept))
            self._bytes[rule.id] -= _size(kept.pop(oldest))
            text = f"the copies exceed {limit:,} bytes: new copies replace the oldest (`max_bytes`)"
            self._event_log.notice_once("captures", text, rule=rule.id, step=step)
        self._event_log.count_fired(rule.id, step)

    def of(self, rule: str) -> dict[CaptureKey, Tensor]:
        return dict(self._kept.get(rule, {}))


def _size(tensor: Tensor) -> int:
    if tensor.is_sparse:
        return _size(tensor._values()) + _size(tensor._indices())  # noqa: SLF001 # uncoalesced
    return tensor.numel() * tensor.element_size()
