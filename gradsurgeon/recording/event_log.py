"""The event log: what happened, and what each rule has done.

Each event is told once, in one of three ways:

* as an exception, where a trap stops the training;
* as a `GradSurgeonWarning`, where the caller should change something: a rule that never fired, a
  parameter that is gone, a set-up that cannot honour a rule, and a trap with ``then: warn``;
* to the logger ``gradsurgeon``: a trap that lets the training go on and a skipped step at WARNING,
  which Python prints to stderr where nobody has configured logging; all else at INFO.

What happens again and again, a trap or a step that the scaler skips, is told in full the first time,
and then counted and told in a line: the 10th, the 100th, the 1,000th time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from operator import itemgetter
from pathlib import Path
from threading import RLock

import torch
from torch import Tensor

from gradsurgeon import _dist, _torch
from gradsurgeon.actions import Rule
from gradsurgeon.errors import printable, warn
from gradsurgeon.events import TRIPS, Event, EventKind, RuleStatus, is_trip
from gradsurgeon.recording.device_queue import DeviceQueue

_LOGGER = logging.getLogger("gradsurgeon")
# A trap with `then: warn` can trip in every step of a long run. So many of what repeats others are kept,
# and as many innocent ones, of which no more are written to a run.
_MOST_EVENTS = 10_000
_INNOCENT = frozenset({"notice", "scaler-skip", "hook-rearmed"})
# What can happen in every step, with how it is logged; a trap and the step that it skips are one thing.
_REPEATED = {
    **{kind: (kind, logging.WARNING) for kind in TRIPS},
    "skipped-step": ("trap", logging.WARNING),
    "scaler-skip": ("scaler-skip", logging.INFO),
}
# One step can pass without a gradient for innocent reasons; three in a row are worth a warning.
_QUIET_STEPS = 3
# Flags wait on the device until so many of them are worth a transfer.
_FLAGS_PER_TRANSFER = 256

_NOT_THE_SCRIPT = (
    *(f"{package}{os.sep}" for package in (Path(__file__).parents[1], Path(torch.__file__).parent)),
    weakref.__file__,  # which tells that a model is gone
    contextlib.__file__,  # through which what is left of a session is closed
)


def _level_of_the_script() -> int:
    level, frame = 1, sys._getframe(1)  # noqa: SLF001 # documented
    # In a thread of autograd no line of the script is there.
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_SCRIPT):
        level, frame = level + 1, frame.f_back
    return level


@dataclass(slots=True)
class Tally:
    """What one rule has done; ``counters`` hold what devices have altered and the host does not know."""

    matched: int
    fired: int = 0
    altered: int = 0
    counters: dict[torch.device, Tensor] = field(default_factory=dict)
    last_step: int | None = None
    # As long as it has not fired: the steps in which it was due, the last of them, and why it did not fire.
    quiet: int = 0
    quiet_step: int = -1
    cause: str = ""
    warnings: list[str] = field(default_factory=list)

    def status(self) -> RuleStatus:
        return RuleStatus(
            matched=self.matched,
            fired=self.fired,
            changed=self.altered / self.fired if self.fired else 0.0,
            last_step=self.last_step,
            warnings=tuple(self.warnings),
        )


class EventLog:
    """Events in order, and one tally per rule. Several threads may write to it."""

    def __init__(
        self,
        rules: Sequence[Rule],
        matched: Sequence[int],
        on_event: Callable[[Event], object] | None = None,
    ) -> None:
        # Is called with each event that is noted.
        self.sink: Callable[[Event], None] | None = None
        # So is this one, which is the script's, and may raise.
        self._on_event = on_event
        self._raised: list[BaseException] = []
        if on_event is not None:
            # Nothing may ever ask, where the script ends without another step.
            weakref.finalize(self, _log_raised, self._raised)
        # Numbered, to be put in order: the first of each kind, and what repeats it, by whether innocent.
        self._numbers = count()
        self._first: dict[tuple[str, str, str], tuple[int, Event]] = {}
        self._later: dict[bool, deque[tuple[int, Event]]] = {
            innocent: deque(maxlen=_MOST_EVENTS) for innocent in (False, True)
        }
        self.edits = {rule.id for rule in rules if rule.edits}
        # The rules that have not fired yet.
        self.silent = {rule.id for rule in rules}
        self._tallies = {
            rule.id: Tally(number) for rule, number in zip(rules, matched, strict=True)
        }
        # Of tags nobody knows beforehand whether there are any.
        self._optional = {rule.id for rule in rules if rule.optional and rule.target == "tensors"}
        self._noticed: set[tuple[str, str]] = set()
        # How often something has happened, and in which step last.
        self._repeated: dict[tuple[str, str], tuple[int, int | None]] = {}
        self._flags: DeviceQueue[Callable[[Tensor], None]] = DeviceQueue(self._read)
        # Never held while something else is called: the recorder has a lock of its own, and calls back.
        self._lock = RLock()

    @property
    def events(self) -> list[Event]:
        with self._lock:
            numbered = [*self._first.values(), *self._later[False], *self._later[True]]
        return [event for _, event in sorted(numbered, key=itemgetter(0))]

    def emit(
        self,
        kind: EventKind,
        message: str,
        *,
        rule: str = "",
        step: int = 0,
        name: str = "",
        warn: bool = False,
        quiet: bool = False,
    ) -> None:
        """Note an event, and tell of it; quietly where something else, such as an exception, tells of it."""
        self._note(Event(kind, rule, step, _dist.rank(), name, message))
        text, level = message, logging.INFO
        if kind in _REPEATED:
            topic, level = _REPEATED[kind]
            text = self._news((topic, rule), step, message)
        if not text:
            return
        if warn:
            self.warn(text, rule=rule)
        else:
            lines = "\n".join(map(printable, _with_rule(text, rule).split("\n")))
            _log(logging.INFO if quiet else level, lines)

    def _news(self, topic: tuple[str, str], step: int, message: str) -> str:
        """Return what to tell of something that happens again and again, empty for nothing."""
        with self._lock:
            times, last = self._repeated.get(topic, (0, None))
            if last == step:
                return ""  # The same has been told in other words.
            times += 1
            self._repeated[topic] = times, step
        if times == 1:
            return message
        if times != 10 ** (len(str(times)) - 1):
            return ""
        return f"{'; '.join(message.split(chr(10))[:2])} ({times:,} times so far)"

    def warn(self, message: str, *, rule: str = "") -> None:
        if rule:
            with self._lock:
                self._tallies[rule].warnings.append(message)
        warn(_with_rule(message, rule), _level_of_the_script())

    def _note(self, event: Event) -> None:
        innocent = event.kind in _INNOCENT or (
            event.kind in TRIPS and not is_trip(event, self.edits)
        )
        with self._lock:
            numbered = next(self._numbers), event
            later = self._later[innocent]
            is_first = (
                self._first.setdefault((event.kind, event.rule, event.name), numbered) is numbered
            )
            full = not is_first and len(later) == later.maxlen
            if not is_first:
                later.append(numbered)
        if self.sink is not None and not (innocent and full):
            self.sink(event)
        if self._on_event is not None:
            self._call_back(self._on_event, event)
        if full:
            text = f"more than {_MOST_EVENTS:,} events: of those that repeat others the oldest are not kept"
            self.notice_once("events", text, step=event.step)

    def _call_back(self, on_event: Callable[[Event], object], event: Event) -> None:
        """Let the script see an event; what it raises waits until the step can be left as it is.

        Here ranks may be about to meet, and gradients may be hidden.
        """
        try:
            on_event(event)
        except BaseException as error:  # noqa: BLE001 # it is raised, at the next place where that can be
            with self._lock:
                self._raised.append(error)

    def raised(self) -> BaseException | None:
        """Return what `on_event` has raised since this was asked last; of several the first, the others are logged."""
        if not self._raised:
            return None
        with self._lock:
            first = self._raised.pop(0) if self._raised else None
            _log_raised(self._raised)
        return first

    def raise_raised(self) -> None:
        if (error := self.raised()) is not None:
            raise error

    def log_raised(self) -> None:
        """Show what `on_event` has raised where something else is being raised."""
        with self._lock:
            _log_raised(self._raised)

    def notice_once(
        self, topic: str, message: str, *, rule: str = "", step: int = 0, warn: bool = False
    ) -> None:
        with self._lock:
            if (topic, rule) in self._noticed:
                return
            self._noticed.add((topic, rule))
        self.emit("notice", message, rule=rule, step=step, warn=warn)

    def is_noticed(self, topic: str, rule: str = "") -> bool:
        return (topic, rule) in self._noticed

    def has_fired(self, rule: str) -> bool:
        return bool(self._tallies[rule].fired)

    def count_fired(self, rule: str, step: int, count: int = 1) -> None:
        tally = self._tallies[rule]
        with self._lock:
            if not tally.fired:
                self.silent.discard(rule)
            tally.fired += count
            # Each optimizer counts its own steps, and what one has reached stays reached.
            tally.last_step = max(step, tally.last_step or 0)

    def count_changed(self, rule: str, count: Tensor | int) -> None:
        """Count firings that altered something, on a device without reading it."""
        tally = self._tallies[rule]
        if not isinstance(count, Tensor) or _torch.is_host(count):
            self._add(tally, int(count))
        elif not _torch.is_capturing():  # Every replay would begin to count from zero.
            # What is made in inference mode, where validation may come first, is no use outside.
            with self._lock, torch.inference_mode(mode=False), torch.no_grad():
                if (counter := tally.counters.get(count.device)) is None:
                    counter = torch.zeros((), dtype=torch.int64, device=count.device)
                    tally.counters[count.device] = counter
                counter.add_(count)

    def _add_counter(self, tally: Tally, counter: Tensor) -> None:
        self._add(tally, int(counter))

    def _add(self, tally: Tally, count: int) -> None:
        with self._lock:
            tally.altered += count

    def emit_if(
        self, flag: Tensor, message: str, *, rule: str = "", step: int, kind: EventKind = "notice"
    ) -> None:
        """Note an event if ``flag`` is set, once that can be read without waiting."""
        if _torch.is_capturing():
            return  # The flag has no value yet, and belongs to the graph.

        def note(value: Tensor) -> None:
            if value:
                self.emit(kind, message, rule=rule, step=step)

        self.when_read(flag, note)

    def when_read(self, values: Tensor, act: Callable[[Tensor], None]) -> None:
        """Call ``act`` with numbers, float32 on the host, once they can be read without waiting."""
        if _torch.is_capturing():
            return  # They have no value yet, and belong to the graph.
        if _torch.is_host(values):
            act(values)
            return
        self._flags.put(act, values)
        if len(self._flags) >= _FLAGS_PER_TRANSFER:
            self._flags.send()

    @staticmethod
    def _read(arrived: Sequence[tuple[Callable[[Tensor], None], Tensor]]) -> None:
        for act, values in arrived:
            act(values)

    def settle(self, *, wait: bool = True) -> None:
        """Note what devices know. Without waiting, what they have told so far; the rest comes later."""
        if _torch.is_capturing():
            return  # What is on the device has no value then.
        # Counters travel with the flags, and begin anew.
        for tally in self._tallies.values():
            with self._lock:
                counters, tally.counters = tally.counters, {}
            for counter in counters.values():
                self._flags.put(partial(self._add_counter, tally), counter)
        if wait:
            self._flags.settle()
        else:
            self._flags.send()

    def note_due(self, rule: str, step: int, cause: Callable[[], str]) -> None:
        """Say early that a rule does not fire; only the end tells whether it never did.

        Several optimizers come to a step of the same number, which counts once.
        """
        tally = self._tallies[rule]
        with self._lock:
            if tally.fired or step <= tally.quiet_step:
                return
            tally.quiet, tally.quiet_step = tally.quiet + 1, step
            news = tally.quiet == _QUIET_STEPS and self._has_to_fire(rule)
        if news:
            tally.cause = cause()
            text = f"was due in {_QUIET_STEPS} steps and has not fired yet: {tally.cause}"
            self.emit("notice", text, rule=rule, step=step, warn=True)

    def note_cause(self, rule: str, cause: str) -> None:
        """Keep why a rule does not fire, for the end."""
        self._tallies[rule].cause = cause

    def cause(self, rule: str) -> str:
        """Return why a rule has not fired, empty if that has not been asked, or if it has fired."""
        tally = self._tallies[rule]
        return "" if tally.fired else tally.cause

    def never_fired(self) -> list[tuple[str, int, str]]:
        """Return the rules that bound to something and never fired, in how many steps they were due, and the cause.

        The cause is empty for a rule that was due in too few steps to ask.
        """
        tallies = self._tallies.items()
        return [
            (rule, tally.quiet, tally.cause)
            for rule, tally in tallies
            if tally.matched and not tally.fired and self._has_to_fire(rule)
        ]

    def _has_to_fire(self, rule: str) -> bool:
        """Tell whether it is worth a word that a rule never fires: not if nothing may ever have its tag."""
        return rule not in self._optional

    def status(self, *, wait: bool = True) -> dict[str, RuleStatus]:
        """Return what each rule has done. Without waiting, what devices have counted is a moment old."""
        self.settle(wait=wait)
        return {rule: tally.status() for rule, tally in self._tallies.items()}


def _log_raised(errors: list[BaseException]) -> None:
    while errors:
        _log(logging.ERROR, "on_event has raised, too late to stop anything", errors.pop(0))


def _log(level: int, text: str, error: BaseException | None = None) -> None:
    """Log; what a handler or a filter of the script raises goes to stderr, as from handlers of Python itself.

    A server of logs that is gone is no reason to leave a step that a rule has decided about half done.
    """
    try:
        _LOGGER.log(level, "%s", text, exc_info=error)
    except Exception:  # noqa: BLE001 # whatever a handler raises
        if logging.raiseExceptions and sys.stderr is not None:
            with contextlib.suppress(Exception):  # stderr may raise as well
                traceback.print_exc(file=sys.stderr)


def _with_rule(message: str, rule: str) -> str:
    # The message of a trap, which is raised as well, names the rule by itself.
    return message if not rule or f"rule {rule}" in message else f"rule {rule}: {message}"
