"""The thread on which a sink works, and what waits for it."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from gradsurgeon.errors import printable
from gradsurgeon.events import Event
from gradsurgeon.match import compile_pattern
from gradsurgeon.sinks import open_sinks
from gradsurgeon.sinks.client import patterns_of
from gradsurgeon.sinks.parts import Parts
from gradsurgeon.sinks.sink import Sink
from gradsurgeon.sinks.summary import Measured, Summary, summary, weight
from gradsurgeon.store.commit_clock import CommitClock
from gradsurgeon.store.memory import Key

_PREFIX = "gradsurgeon"
# The thread is woken up every two seconds. Python runs one thread at a time, and is to be there for the training:
# so large a share of the time may be spent here, and some seconds besides that are not due yet. Of more rows than
# that allows the worst of several steps stands for all of them; but so many are sent each time in any case, and
# at the end.
_INTERVAL, _SHARE, _ADVANCE = 2.0, 0.01, 0.5
_LEAST_ROWS, _LEAST_AT_THE_END = 2, 200
_MOST_BYTES = 64 * 2**20
# How long the end of a training waits for a sink.
_PATIENCE = 10.0
# The names of the largest norms change; they are written so seldom that they can be read.
_TOP_EVERY = 100


class Delivery:
    """Brings rows and events to one sink. Everything but the work itself is on the thread of the training.

    Nothing is sent before `begin`: the session may be refused, or is to take over from another one.

    Args:
        sink: where they go.
        title: what this model is called in the names of the curves, where there are several.
        texts: by name what is written at the beginning.
    """

    def __init__(
        self, sink: Sink, *, title: str = "", texts: Mapping[str, str] | None = None
    ) -> None:
        self.failed = ""
        self.on_failure: Callable[[str], None] | None = None
        self._sink = sink
        self._texts = dict(texts or {})
        self.name = f"the sink {type(sink).__name__}"
        self.patterns = patterns_of(sink.names)
        self._patterns = [compile_pattern(text) for text in self.patterns]
        self._chosen: dict[tuple[str, ...], frozenset[str]] = {}
        self._rows: deque[Measured] = deque()
        self._events: deque[Event] = deque()
        self._bytes = 0
        self._dropped = ""
        self._lock = threading.Condition()
        self._ending = threading.Event()
        self._told: set[str] = set()
        self._in_hand = 0
        # The rows of the newest step, by rule: another pass of that step replaces them, and another optimizer adds to them.
        self._held: dict[tuple[str, str, str], dict[tuple[str, ...], Measured]] = {}
        self._parts: dict[tuple[str, str, str], Parts] = {}
        self._closed = self._left = False
        self._pid = os.getpid()
        self._clock = CommitClock(_INTERVAL)
        # Seconds that a row takes, as far as is known; seconds that may be spent, and when that was known.
        self._cost, self._left_to_spend, self._at = 0.002, _ADVANCE, time.monotonic()
        self._keys: dict[Key, Key] = {}
        self._kinds: Counter[str] = Counter()
        self._top_written: dict[str, int] = {}
        self._shared = open_sinks.enter(sink)
        self._title, self._prefix = title, _PREFIX
        self._taken: str | None = None
        self._thread = threading.Thread(
            target=self._work, name=f"gradsurgeon {type(sink).__name__}", daemon=True
        )

    def begin(self) -> None:
        """Send what there is, and all that comes: the session has begun, and the one that it replaces is over."""
        self._taken = self._shared.take_title(self._title)
        if self._taken:
            self._prefix = f"{_PREFIX}/{self._taken}"
        try:
            self._thread.start()
        except RuntimeError as error:  # there are too many threads
            self._fail(error)

    @property
    def closed(self) -> bool:
        """Whether nothing is sent any more: closed, failed, or in a child process, which has no such thread."""
        return self._closed or bool(self.failed) or os.getpid() != self._pid

    def add(
        self,
        key: Key,
        step: int,
        values: bytes,
        absent: frozenset[int] = frozenset(),
        *,
        replace: bool = False,
    ) -> None:
        """Take one row, as `Records.add` does; one that may be replaced is sent once its step is over."""
        self._put(Measured(key, step, values, absent, replace))

    def event(self, event: Event) -> None:
        self._put(event)
        self.commit()

    def _put(self, item: Measured | Event) -> None:
        if self.closed:
            return
        with self._lock:
            if isinstance(item, Event):
                self._events.append(item)
            else:
                self._rows.append(item)
            self._bytes += _size(item)
            while self._bytes > _MOST_BYTES and self._waiting > 1:
                # Another row comes in the next step, but an event, and above all the first one, never again.
                self._dropped = "rows" if self._rows else "events"
                oldest = self._rows or self._events
                self._bytes -= _size(oldest.popleft())

    @property
    def _waiting(self) -> int:
        return len(self._rows) + len(self._events)

    def due(self) -> bool:
        """Return whether it is time to wake up the thread, or to tell that it has failed."""
        return self._clock.due() and (not self.closed or self._has_to_tell)

    def ends_step(self) -> bool:
        """Mark the end of a step; return whether its rows would be too old at the end of the next."""
        return self._clock.ends_step() and (not self.closed or self._has_to_tell)

    @property
    def _has_to_tell(self) -> bool:
        return bool(self.failed) and "failed" not in self._told and os.getpid() == self._pid

    def commit(self) -> None:
        """Wake up the thread; tell of its failure, if there is one."""
        if os.getpid() != self._pid:
            return  # the lock may be held by a thread that is not here
        self._clock.restart()
        with self._lock:
            self._lock.notify()
        self._tell()

    def _tell(self) -> None:
        texts = {"failed": self.failed}
        if self._dropped:
            texts[self._dropped] = (
                f"{self.name} cannot keep up: the oldest {self._dropped} are left out"
            )
        for kind, text in texts.items():
            if text and kind not in self._told:
                self._told.add(kind)
                if self.on_failure is not None:
                    self.on_failure(f"{text}; training does not depend on it")

    def end(self) -> None:
        """Let what waits be sent, and nothing come any more."""
        if os.getpid() == self._pid and not self._closed:
            self._closed = True
            self._ending.set()
            with self._lock:
                self._lock.notify()

    def close(self, begin: float | None = None) -> None:
        """Wait for what is being sent, for a while; a sink that takes longer is left alone.

        Args:
            begin: since when it is waited, for several sinks together; on the clock of `time.monotonic`.
        """
        if os.getpid() != self._pid:
            return
        self.end()
        waited = 0.0 if begin is None else time.monotonic() - begin
        if self._thread.ident is not None:
            self._thread.join(max(0.0, _PATIENCE - waited))
        if self._thread.is_alive() and not self.failed:
            self.failed = (
                f"{self.name} has not ended after {_PATIENCE:g} seconds, and is left alone with "
                f"{self._waiting + self._in_hand:,} rows"
            )
        self._tell()

    def discard(self) -> None:
        """End without a word: the session did not begin. The sink stays open for the next one."""
        self._texts.clear()
        self._leave()
        self._closed = True
        self._ending.set()
        with self._lock:
            self._forget()
            self._lock.notify()

    def _forget(self) -> None:
        self._rows.clear()
        self._events.clear()
        self._bytes = 0

    def _work(self) -> None:
        try:
            with self._shared.lock:
                for name, text in self._texts.items():
                    self._sink.text(0, f"{self._prefix}/{name}", text)
            while (batch := self._next()) is not None:
                begin = time.monotonic()
                with self._shared.lock:
                    for item in batch:
                        self._send(item)
                    self._sink.flush()
                self._in_hand = 0
                spent = time.monotonic() - begin
                self._left_to_spend -= spent
                self._cost = (self._cost + spent / max(1, len(batch))) / 2
            self._leave()
        except BaseException as error:  # noqa: BLE001 # whatever a client raises, training goes on
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._leave()
        self._shared.failed = True
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        self.failed = f"{self.name} has failed: {printable(reason)}"
        with self._lock:
            self._forget()

    def _next(self) -> list[Summary | Event] | None:
        """Return what waits, once there is something; ``None`` at the end."""
        with self._lock:
            while not self._waiting and not self._ending.is_set():
                self._lock.wait()
            rows, events = list(self._rows), list(self._events)
            self._in_hand = self._waiting
            self._forget()
        if not rows and not events and not self._held:
            return None
        whole = list(self._complete(rows, last=self._ending.is_set()))
        return [*events, *self._summarised(whole)]

    def _complete(self, rows: Sequence[Measured], *, last: bool) -> Iterator[Measured]:
        """Yield rows of which nothing more can come, those of one rule and step together."""
        for item in rows:
            if not item.replace:
                yield item
                continue
            group = (item.key.rule, item.key.stat, item.key.point)
            held = self._held.setdefault(group, {})
            if any(row.step != item.step for row in held.values()):
                yield from self._named(group)
                held = self._held.setdefault(group, {})
            held[item.key.names] = item
            self._parts.setdefault(group, Parts()).meet(item.key.names)
        if last:
            for group in list(self._held):
                yield from self._named(group)

    def _named(self, group: tuple[str, str, str]) -> Iterator[Measured]:
        for row in self._parts[group].named(list(self._held.pop(group).values())):
            # Rows are told apart by the identity of their keys.
            yield row._replace(key=self._keys.setdefault(row.key, row.key))

    def _summarised(self, rows: Sequence[Measured]) -> Iterator[Summary]:
        now = time.monotonic()
        # After a pause, such as a validation, not all of it is there to be spent at once.
        passed = min(now - self._at, 2 * _INTERVAL)
        self._left_to_spend = min(_ADVANCE, self._left_to_spend + _SHARE * passed)
        self._at = now
        least = _LEAST_AT_THE_END if self._ending.is_set() else _LEAST_ROWS
        most = max(least, int(self._left_to_spend / max(self._cost, 1e-6)))
        many = -(-len(rows) // most)
        # By identity: to hash the names of thousands of tensors takes longer than to sum up their norms.
        waiting: dict[int, list[Measured]] = {}
        for row in rows:
            several = waiting.setdefault(id(row.key), [])
            several.append(row)
            if len(several) >= many:
                yield from self._worst_of(several)
                several.clear()
        for several in waiting.values():
            yield from self._worst_of(several)

    def _worst_of(self, rows: Sequence[Measured]) -> Iterator[Summary]:
        if rows:
            row = rows[0] if len(rows) == 1 else max(rows, key=weight)
            if (found := summary(row, self._of(row.key))) is not None:
                yield found

    def _of(self, key: Key) -> frozenset[str]:
        """Return the tensors of a series that have a curve each."""
        if not self._patterns:
            return frozenset()
        chosen = self._chosen.get(key.names)
        if chosen is None:
            matching = [n for n in key.names if any(one.matches(n) for one in self._patterns)]
            chosen = self._chosen[key.names] = frozenset(matching)
        return chosen

    def _send(self, item: Summary | Event) -> None:
        if isinstance(item, Event):
            self._kinds[item.kind] += 1
            head = f"{self._prefix}/events/{item.kind}"
            self._sink.scalars(item.step, {head: float(self._kinds[item.kind])})
            self._sink.text(item.step, f"{head}/message", item.message)
            return
        scalars = {f"{self._prefix}/{name}": value for name, value in item.scalars.items()}
        self._sink.scalars(item.step, scalars)
        if item.histogram is not None:
            name = f"{self._prefix}/{item.rule}/log10 of the norms"
            self._sink.histogram(item.step, name, *item.histogram)
            self._write_top(f"{self._prefix}/{item.rule}/top/names", item)

    def _write_top(self, name: str, item: Summary) -> None:
        last = self._top_written.get(name)
        if last is None or item.step >= last + _TOP_EVERY:
            self._top_written[name] = item.step
            lines = [
                f"{place}. {one}: {value:.6g}" for place, (one, value) in enumerate(item.top, 1)
            ]
            self._sink.text(item.step, name, "\n".join(lines))

    def _leave(self) -> None:
        """Use the sink no longer."""
        with self._lock:
            left, self._left = self._left, True
        if not left:
            self._shared.leave(self._taken)


def _size(item: Measured | Event) -> int:
    return len(item.values) if isinstance(item, Measured) else len(item.message)
