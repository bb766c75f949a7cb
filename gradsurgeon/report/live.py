"""A run as it is right now, read again and again while it is being written. No torch.

Each reading opens the files anew and lets go of them, so that ranks may join, and so that the writer
finds nobody there when it ends the run. It reads the newest rows, whatever the length of the run.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter
from pathlib import Path

from gradsurgeon.events import Event, RuleStatus, is_trip
from gradsurgeon.report.losses import OfLosses
from gradsurgeon.report.newest_rows import NewestRows, TotalNorm, newest_of_losses
from gradsurgeon.report.norms import POINTS, NormRow, norm_rows, noun_of
from gradsurgeon.report.rules_and_events import RuleInfo, edits_of
from gradsurgeon.report.sources import rule_infos, title_of
from gradsurgeon.store.run import Run, closed_at, events_after, open_run

RUNNING, FINISHED, STOPPED = "running", "finished", "stopped"

_WORST = 10
# Traps come first, but must not hide everything else.
_TRAPS, _OTHERS = 5, 5
# A run is written once in a second: between two readings in less, no step may have arrived, or many.
_PACE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment, in plain values.

    Attributes:
        title: what is run.
        states: by rank ``running``, ``finished`` or ``stopped``.
        step: the newest step of which anything is recorded, ``None`` before the first.
        pace: steps per second in the last seconds of watching, ``None`` where it is not known.
        elapsed: seconds since the run began, until its end if that is known.
        kinds: how many events there are of each kind; what several ranks note of a step counts once.
        events: the newest traps and the newest of the others, each with the newest first.
        newest: the newest of all, ``None`` where there is none.
        worst: the tensors whose norms look worst, the worst first.
        measured: how many tensors have norms in view, and what to call one of them.
        span: the first and the last step in view.
        total: the norm of all of them together, ``None`` where no rule records l2 norms.
        rules: every rule by id, in file order.
        statuses: what each rule did.
        of_losses: what the newest calls say of several losses.
    """

    title: str
    states: Mapping[int, str]
    step: int | None
    pace: float | None
    elapsed: float | None
    kinds: Mapping[str, int]
    events: Sequence[Event]
    newest: Event | None
    worst: Sequence[NormRow]
    measured: tuple[int, str]
    span: tuple[int, int] | None
    total: TotalNorm | None
    rules: Mapping[str, RuleInfo]
    statuses: Mapping[str, RuleStatus]
    of_losses: OfLosses = field(default_factory=OfLosses)

    @property
    def state(self) -> str:
        """``running`` while any rank is, then ``finished`` if all ranks are, else ``stopped``."""
        found = set(self.states.values())
        if RUNNING in found:
            return RUNNING
        return FINISHED if found == {FINISHED} else STOPPED


class LiveRun:
    """A run directory to be read again and again.

    Args:
        path: the directory.
        clock: returns seconds that never run backwards, to measure the pace by.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._events = _Events()
        self._steps: deque[tuple[float, int]] = deque()
        self._elapsed: float | None = None

    def read(self) -> Snapshot:
        """Return the run as it is now.

        Raises:
            RecordError: it is not there, is damaged, or its files are just being made.
        """
        with open_run(self._path) as run:
            states = run.states  # first: what a run has written when it ends is read after that
            rules = rule_infos(run)
            self._events.read(run, edits_of(rules))
            rows = NewestRows(run)
            statuses = run.status()
            tensors = norm_rows(rows, run.params, list(rules))
            steps = [
                status.last_step for status in statuses.values() if status.last_step is not None
            ]
            span = rows.span()
            step = max((*steps, *(span or ())), default=None)
            return Snapshot(
                title=title_of(run),
                states=states,
                step=step,
                pace=self._pace(step) if RUNNING in states.values() else None,
                elapsed=self._since_begin(run, states),
                kinds=dict(self._events.kinds),
                events=self._events.latest(),
                newest=self._events.newest(),
                worst=sorted(tensors, key=_badness)[:_WORST],
                measured=(len(tensors), noun_of(tensors, run.params)),
                span=span,
                total=_total(rows, run.params, list(rules)),
                rules=rules,
                statuses=statuses,
                of_losses=newest_of_losses(run, rules),
            )

    def _pace(self, step: int | None) -> float | None:
        if step is None:
            return None
        now = self._clock()
        self._steps.append((now, step))
        while len(self._steps) > 2 and now - self._steps[1][0] >= _PACE_SECONDS:  # noqa: PLR2004 # two
            self._steps.popleft()
        begin, first = self._steps[0]
        return (step - first) / (now - begin) if now > begin else None

    def _since_begin(self, run: Run, states: Mapping[int, str]) -> float | None:
        ended = closed_at(run)
        if ended is not None or RUNNING in states.values():
            created = run.meta.get("created")
            try:
                begin = datetime.fromisoformat(str(created)).timestamp()
            except (ValueError, OverflowError, OSError):
                return None
            self._elapsed = (time.time() if ended is None else ended) - begin
        # When a run stopped that was not closed is only known to who has seen it running.
        return self._elapsed


class _Events:
    """What has happened, counted, and the newest of it. Each event is read once."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self._read: dict[int, int] = {}
        self._of_rank: Counter[tuple[int, str, str, int]] = Counter()
        self._most: Counter[tuple[str, str, int]] = Counter()
        self._traps: list[tuple[float, Event]] = []
        self._others: list[tuple[float, Event]] = []

    def read(self, run: Run, edits: Container[str]) -> None:
        for rank, number, at, event in events_after(run, self._read):
            self._read[rank] = number
            moment = event.kind, event.rule, event.step
            self._of_rank[rank, *moment] += 1
            if self._of_rank[rank, *moment] > self._most[moment]:  # else another rank has noted it
                self._most[moment] += 1
                self.kinds[event.kind] += 1
                trips = is_trip(event, edits)
                self._keep(
                    at, event, *((self._traps, _TRAPS) if trips else (self._others, _OTHERS))
                )

    def _keep(self, at: float, event: Event, kept: list[tuple[float, Event]], most: int) -> None:
        kept.append((at, event))
        # The ranks are read one after the other, and each has its own times.
        kept.sort(key=lambda pair: -pair[0])
        del kept[most:]

    def latest(self) -> list[Event]:
        return [event for _, event in (*self._traps, *self._others)]

    def newest(self) -> Event | None:
        first = max((*self._traps, *self._others), key=itemgetter(0), default=None)
        return None if first is None else first[1]


def _badness(row: NormRow) -> tuple[bool, int, float, float]:
    """Return what sorts the worst norms first: not finite, a spike, far from their usual size."""
    history = row.history
    # Where all turn into NaN at once, the spike that came before tells more than the order.
    return not history.nonfinite, history.nonfinite_step, -row.times, -abs(drift(row))


def drift(row: NormRow) -> float:
    """Return how many decades the last norm is above the median, below 0 for below it."""
    last, usual = row.history.last, row.history.median
    if not (math.isfinite(last) and math.isfinite(usual)) or last == usual:
        return 0.0
    if last <= 0 or usual <= 0:
        return math.inf if last > usual else -math.inf
    return math.log10(last / usual)


def _total(rows: NewestRows, params: Sequence[str], order: Sequence[str]) -> TotalNorm | None:
    """Return the total norm nearest to what the optimizer acts on, by the rule that measures most."""
    sources, known = rows.sources(), set(params)

    def preference(source: tuple[str, str]) -> tuple[bool, int, int, int]:
        rule, point = source
        names, points, rules = sources[source], [*POINTS, point], [*order, rule]
        return not names <= known, points.index(point), -len(names), rules.index(rule)

    return rows.total(*min(sources, key=preference)) if sources else None
