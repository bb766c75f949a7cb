"""One sink of one session: the thread on which it works, and the queue in front of that thread."""

import atexit
import logging
import math
import os
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from statistics import median

from gradsurgeon.common._grouping import grouped
from gradsurgeon.common.events import Event
from gradsurgeon.common.match import compile_pattern, select
from gradsurgeon.errors import reason_of
from gradsurgeon.records.store.files import Outlet
from gradsurgeon.records.store.layout import is_present
from gradsurgeon.records.store.memory import LOSS, Key, RecordedRow
from gradsurgeon.sinks.sink import Sink, patterns_of
from gradsurgeon.tensors.statistics import HISTOGRAM, STATISTICS

_LOGGER = logging.getLogger("gradsurgeon")
_PREFIX = "gradsurgeon"
_ASIDE = "; training does not depend on it"
# Python runs one thread at a time, and a row takes up to two milliseconds. So the thread sends this many rows at once,
# and more only at the beginning and at the end.
_MOST_ROWS = 20
_MORE_ROWS = 200
# So many rows wait for a sink that is slow.
_MOST_WAITING = 4096
# The end of a training waits this many seconds for its sinks.
_PATIENCE = 10.0
# Up to so many tensors each have a curve: losses, or the layers of a small model.
_FEW = 10
NORM = "l2"


class OpenSink:
    """A sink that several sessions may use until the process ends, each with a title, ``None`` before it begins."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink  # while it lives, no other object has its number
        self.lock = threading.Lock()
        self.pid = os.getpid()
        self.titles: dict[object, str | None] = {}


_open: dict[int, OpenSink] = {}
_changing = threading.Lock()


def opened(sink: Sink) -> OpenSink:
    """Return the one object of a sink, which is closed when the process ends."""
    with _changing:
        return _open.setdefault(id(sink), OpenSink(sink))


@atexit.register
def close_all() -> None:
    """Close the sinks that this process has opened and that no session uses. Until then a session may begin."""
    with _changing:
        here = [shared for shared in _open.values() if shared.pid == os.getpid()]
        unused = [shared.sink for shared in here if not shared.titles]
        for sink in unused:
            del _open[id(sink)]
    for sink in unused:
        try:
            if not getattr(sink, "knows_exit", False):
                sink.close()
        except Exception as error:  # noqa: BLE001 # whatever a client raises
            text = "the sink %s could not be closed: %s"
            _LOGGER.error(text, type(sink).__name__, error)  # noqa: TRY400 # of the client


class Delivery(Outlet):
    """Brings rows and events to one sink, from `begin` on. The training's thread only puts them into the queue."""

    # The session wakes the thread so often.
    seconds = 2.0

    def __init__(self, sink: Sink, *, title: str, texts: Mapping[str, str]) -> None:
        super().__init__()
        self.name = f"the sink {type(sink).__name__}"
        self.patterns = patterns_of(sink.names)
        self._sink = sink
        self._title = title
        self._shared = opened(sink)
        self._shared.titles[self] = None
        self._texts = texts
        # Guards what waits.
        self._lock = threading.Condition()
        self._rows: deque[RecordedRow] = deque(maxlen=_MOST_WAITING)
        self._events: list[Event] = []
        self._until = 0.0  # the longest wait at the end
        self._thread = threading.Thread(
            target=self._work, name=f"gradsurgeon {type(sink).__name__}", daemon=True
        )
        # Only the thread uses these.
        self._curves = Curves(self.patterns)
        # The newest row of each series that another pass of its step may replace.
        self._unfinished: dict[Key, RecordedRow] = {}
        self._kinds = Counter[str]()
        self._sent = 0

    def begin(self) -> None:
        """Start sending: the session has begun, and the session that it replaces is over."""
        titles = self._shared.titles
        with _changing:
            number = 1
            # Another session may have the title now.
            while self._title in titles.values():
                number += 1
                self._title = f"model-{number}"
            titles[self] = self._title
        self._thread.start()

    def add_row(self, row: RecordedRow) -> None:
        """Take one row. A row that may be replaced is sent once its step is over."""
        if self.closed:
            return
        with self._lock:
            if len(self._rows) == _MOST_WAITING:
                self._note(f"{self.name} cannot keep up: the oldest rows are left out{_ASIDE}")
            self._rows.append(row)

    def event(self, event: Event) -> None:
        if not self.closed:
            with self._lock:
                self._events.append(event)
        self.commit()

    def commit(self) -> None:
        """Wake the thread."""
        if not self._inherited:  # in a child a thread of the parent may hold the lock for ever
            self._committed = time.monotonic()
            with self._lock:
                self._lock.notify()

    def end(self) -> None:
        """Take nothing more. The thread sends the rest."""
        self._until = time.monotonic() + _PATIENCE
        self._ended = True
        self.commit()

    def close(self) -> None:
        """Wait a while after `end` for the thread to send the rest. A sink that takes longer is left alone."""
        # A forked child has no thread.
        if self._thread.is_alive():
            self._thread.join(max(0.0, self._until - time.monotonic()))
        if self._thread.is_alive() and not self.failed:
            self.failed = f"{self.name} has not ended after {_PATIENCE:g} seconds: it is left alone"
            self._note(f"{self.failed}{_ASIDE}")

    def discard(self) -> None:
        """End without a word: the session did not begin. The sink stays open for the next session."""
        self._ended = True
        self._shared.titles.pop(self, None)

    def _work(self) -> None:
        try:
            with self._shared.lock:
                for name, text in self._texts.items():
                    self._sink.text(0, self._named(name), text)
            more = True
            while more:
                with self._lock:
                    self._lock.wait_for(lambda: self._rows or self._events or self._ended)
                    more = not self._ended
                    rows = list(self._finished(self._rows))
                    self._rows.clear()
                    events = self._events
                    self._events = []
                if not more:
                    rows += self._unfinished.values()
                with self._shared.lock:
                    self._send(events, rows)
        except BaseException as error:  # noqa: BLE001 # whatever a client raises, training goes on
            self.failed = f"{self.name} has failed: {reason_of(error)}"
            self._note(f"{self.failed}{_ASIDE}")
            self._rows.clear()
            self._events.clear()
        finally:
            self._shared.titles.pop(self, None)

    def _finished(self, rows: Iterable[RecordedRow]) -> Iterator[RecordedRow]:
        """Yield the rows that no other pass of their step can replace any more."""
        for row in rows:
            before = self._unfinished.pop(row.key, row)
            if before.step != row.step or not row.replace:
                yield before
            if row.replace:
                self._unfinished[row.key] = row

    def _send(self, events: Sequence[Event], rows: Sequence[RecordedRow]) -> None:
        for event in events:
            self._kinds[event.kind] += 1
            name = self._named(f"events/{event.kind}")
            self._sink.scalars(event.step, {name: float(self._kinds[event.kind])})
            self._sink.text(event.step, f"{name}/message", event.message)
        for row in self._worst(rows):
            scalars = self._curves.scalars(row).items()
            if scalars:
                named = {self._named(name): value for name, value in scalars}
                self._sink.scalars(row.step, named)
        self._sink.flush()

    def _worst(self, rows: Sequence[RecordedRow]) -> Iterator[RecordedRow]:
        """Yield the rows to send. If there are too many, the worst of a few steps represents them."""
        most = _MORE_ROWS
        if not self._ended:
            most = max(_MOST_ROWS, _MORE_ROWS - self._sent)
        self._sent += min(len(rows), most)
        steps = max(1, math.ceil(len(rows) / most))
        for of_key in grouped(rows, attrgetter("key")).values():
            for start in range(0, len(of_key), steps):
                yield max(of_key[start : start + steps], key=weight)

    def _named(self, name: str) -> str:
        parts = (_PREFIX, self._title, name)
        return "/".join(part for part in parts if part)


def weight(row: RecordedRow) -> float:
    """Return the rank of a row among several steps of its series: the worst step, or else the newest, is the largest."""
    stat = row.key.stat
    if stat in STATISTICS or stat == LOSS:
        total = math.hypot(*array("f", row.values))
        if not math.isfinite(total):
            return math.inf
        if stat == NORM:
            return total
    return float(row.step)


class Curves:
    """The scalars that a tracker gets of rows, by name. Tensors whose names match a pattern have a curve each."""

    def __init__(self, names: Sequence[str]) -> None:
        self._patterns = [compile_pattern(name) for name in names]
        # Maps each series to the beginning of the names of numbers over several tensors, and the tensors with a curve.
        self._known: dict[Key, tuple[str, frozenset[str]]] = {}

    def scalars(self, row: RecordedRow) -> dict[str, float]:
        rule, stat, _, names = row.key
        if stat in HISTOGRAM:
            return {}  # a tracker would draw 66 curves
        prefix, with_curves = self._of_series(row.key)
        of_norms = stat == NORM and len(names) > 1
        has_all_curves = not of_norms and len(names) <= _FEW
        # A number between losses is NaN if a loss did not reach the parameters. In a number of one gradient NaN is news.
        skips_nan = stat != LOSS and (stat not in STATISTICS or STATISTICS[stat].of_update)
        values = []
        scalars = {}
        for column, value in enumerate(array("f", row.values)):
            if not is_present(row.absent, column) or (skips_nan and math.isnan(value)):
                continue
            values.append(value)
            name = names[column]
            if has_all_curves or name in with_curves:
                scalars[f"{rule}/{name}/{stat}"] = value
        if has_all_curves or not values:
            return scalars
        if not of_norms:
            prefix = f"{prefix}/{stat}"
        finite = list(filter(math.isfinite, values))
        scalars[f"{prefix}/not finite"] = float(len(values) - len(finite))
        if of_norms:
            scalars[f"{prefix}/total"] = math.hypot(*values)
        if finite:
            scalars[f"{prefix}/median"] = median(finite)
            scalars[f"{prefix}/largest"] = max(finite)
            scalars[f"{prefix}/least"] = min(finite)
        return scalars

    def _of_series(self, key: Key) -> tuple[str, frozenset[str]]:
        if key not in self._known:
            # Each of several optimizers has a part of its own.
            part = sum(other[:3] == key[:3] for other in self._known) + 1
            prefix = key.rule
            if part > 1:
                prefix += f"/part-{part}"
            columns = select(self._patterns, key.names)
            with_curves = frozenset(key.names[column] for column in columns)
            self._known[key] = (prefix, with_curves)
        return self._known[key]
