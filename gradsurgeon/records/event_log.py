"""The event log: the events of a session, the status of each rule, and what the user hears of them."""

import contextlib
import logging
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import RLock
from types import MappingProxyType
from typing import Any

from torch import Tensor

from gradsurgeon.actions import EditRule, Rule
from gradsurgeon.common._script import running_lines
from gradsurgeon.common.events import TRIPS, Event, EventKind, RuleStatus, is_trip
from gradsurgeon.errors import CheckError, TrapError, printable, warn
from gradsurgeon.records.device_queue import DeviceQueue
from gradsurgeon.tensors import _dist, _torch

_LOGGER = logging.getLogger("gradsurgeon")
# A trap with `then: warn` can trip in every step of a long run. The log keeps so many repetitions, and as many
# routine events. A run directory gets no more routine events either.
_MOST_EVENTS = 10_000
_ROUTINE = frozenset({"notice", "scaler-skip", "hook-rearmed"})
# The topic of a kind that can occur in every step, and the level of the log. A trap and the step that it skips are one
# topic.
_TOPICS = {
    **{kind: (kind, logging.WARNING) for kind in TRIPS},
    "check": ("", logging.WARNING),  # tells each finding once
    "skipped-step": ("trap", logging.WARNING),
    "scaler-skip": ("scaler-skip", logging.INFO),
}
# A single step can pass without a gradient in a sound training. Three in a row deserve a warning.
_QUIET_STEPS = 3
# This many flags on the device justify a transfer.
_FLAGS_PER_TRANSFER = 256
# More frames than a thread has: Python names no line then.
_BEYOND = 1000


@dataclass(slots=True)
class Tally:
    matched: int
    fired: int = 0
    # `None` as long as nothing was counted.
    altered: int | None = None
    last_step: int | None = None
    # Until the rule fires: the number of steps in which it was due, the last of them, and why it did not fire.
    quiet: int = 0
    quiet_step: int = -1
    cause: str = ""
    warnings: list[str] = field(default_factory=list)

    def status(self) -> RuleStatus:
        counts = (self.matched, self.fired, self.altered, self.last_step)
        return RuleStatus(*counts, warnings=tuple(self.warnings))


class EventLog:
    """Events in order, and a tally per rule. Several threads may write to it."""

    def __init__(
        self,
        rules: Sequence[Rule],
        matched: Sequence[int],
        on_event: Callable[[Event], object] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._listener: Callable[[Event], object] = bool
        self._on_event = on_event or bool
        # Returns the step of an event that names none.
        self.now: Callable[[], int] = int
        # The launcher shows lines by itself: a script may silence warnings and logging, or turn warnings into errors.
        self._say = say
        self._said = set[str]()
        # Errors until the update, where nothing is half done.
        self.raised: list[BaseException] = []
        # The events by identity, and the identities of repetitions by whether they are routine.
        self._events: dict[int, Event] = {}
        self._later = defaultdict[bool, deque[int]](deque)
        self._known = set[tuple[str, str, str]]()
        self.edits = {rule.id for rule in rules if rule.edits}
        self._tallies: dict[str, Tally] = {}
        for rule, number in zip(rules, matched, strict=True):
            altered = None if isinstance(rule, EditRule) else 0
            self._tallies[rule.id] = Tally(number, altered=altered)
        # The rules that have not fired yet, for no reason that the user knows. An optional rule on tags may match
        # nothing: whether there are tags is unknown beforehand.
        optional = [rule.id for rule in rules if rule.optional and rule.target == "tensors"]
        self.silent = dict.fromkeys(rule for rule in self._tallies if rule not in optional)
        self._noticed = set[tuple[str, str]]()
        # How often each topic has occurred, and its last step.
        self._repeated: dict[tuple[str, str], tuple[int, int | None]] = {}
        self.flags: DeviceQueue[Callable[[Tensor], None]] = DeviceQueue(_read)
        # Never held during a call of another object: the recorder has a lock of its own, and calls back.
        self._lock = RLock()

    def listen(self, listener: Callable[[Event], object]) -> None:
        self._listener = listener

    @property
    def events(self) -> list[Event]:
        with self._lock:
            return list(self._events.values())

    def emit(
        self,
        kind: EventKind,
        message: str,
        *,
        rule: str = "",
        step: int | None = None,
        name: str = "",
        warn: bool = False,
        quiet: bool = False,
        loud: bool = False,
        facts: Mapping[str, Any] = MappingProxyType({}),
        shown: str = "",
    ) -> None:
        """Record an event and report it once: by the warning if the caller should change something, else by the log.

        A trap that stops the training is reported by its exception alone: ``quiet`` logs at INFO, ``loud`` at WARNING.
        ``facts`` are further keys of the event. The launcher shows ``shown`` instead of the message.
        """
        if step is None:
            step = self.now()
        self._note(Event(kind, rule, step, _dist.rank(), name, message, **facts))
        topic, level = _TOPICS.get(kind, ("", logging.INFO))
        if topic:
            news = self._news((topic, rule), step, message)
            if news != message:
                shown = ""
            message = news
        if not message:
            return
        if warn:
            self.warn(message, rule=rule, shown=shown)
            return
        if quiet:
            level = logging.INFO
        elif loud:
            level = logging.WARNING
        is_said = self._say is not None and level >= logging.WARNING
        if self._say is not None and is_said:
            self._say(_lines(shown or message, rule))
        _log(level, _lines(message, rule), is_said=is_said)

    def _news(self, topic: tuple[str, str], step: int, message: str) -> str:
        """Return the text to report of an event that may repeat: all, the 10th, the 100th time a line, else nothing."""
        with self._lock:
            times, last = self._repeated.get(topic, (0, None))
            if last == step:
                return ""  # another event of this step has reported it
            times += 1
            self._repeated[topic] = times, step
        if times == 1:
            return message
        if times != 10 ** (len(str(times)) - 1):
            return ""
        line = "; ".join(message.split("\n")[:2])
        return f"{line} ({times:,} times so far)"

    def warn(self, message: str, *, rule: str = "", shown: str = "") -> None:
        if rule:
            with self._lock:
                self._tallies[rule].warnings.append(message)
        # There is none in a thread of autograd.
        place, level = next(running_lines(), ("", _BEYOND))
        if self._say is None:
            warn(_with_rule(message, rule), level)
            return
        lines = _lines(shown or message, rule)
        # The line of a step would be the one of its update.
        if place and not lines.startswith("step "):
            lines = f"{printable(place)}: {lines}"
        # Each step may bring the same news.
        if lines not in self._said:
            self._said.add(lines)
            self._say(lines)

    def _note(self, event: Event) -> None:
        routine = event.kind in _ROUTINE or (event.kind in TRIPS and not is_trip(event, self.edits))
        topic = (event.kind, event.rule, event.name)
        full = False
        with self._lock:
            self._events[id(event)] = event
            if topic in self._known:
                later = self._later[routine]
                later.append(id(event))
                full = len(later) > _MOST_EVENTS
                if full:
                    del self._events[later.popleft()]
            self._known.add(topic)
        if not (routine and full):
            self._listener(event)
        try:
            self._on_event(event)
        except Exception as error:  # noqa: BLE001 # ranks may be about to meet, and gradients may be hidden
            _log(logging.ERROR, "on_event raised an error, and training goes on", error)
        if full:
            text = (
                f"more than {_MOST_EVENTS:,} events repeat others: the oldest of them are not kept"
            )
            self.notice_once("events", text, step=event.step)

    def raise_raised(self) -> None:
        """Raise the first error that was kept since the last call, if there is one."""
        if self.raised:
            del self.raised[1:]
            # No frame of the traceback refers to the error, or the two would keep all that the frames refer to alive.
            raise self.raised.pop()

    @property
    def last_trap(self) -> TrapError | None:
        """The kept error of a trap that stopped the last update."""
        for error in self.raised:
            if isinstance(error, TrapError) and not isinstance(error, CheckError):
                return error
        return None

    def take_raised(self) -> list[BaseException]:
        """Return the errors that were kept, for a caller that cannot raise them."""
        errors = self.raised
        self.raised = []
        return errors

    def notice_once(
        self, topic: str, message: str, *, rule: str = "", step: int | None = None, **options: Any
    ) -> None:
        """Emit a notice unless one of this topic and rule was emitted; ``options`` are those of `emit`."""
        with self._lock:
            if (topic, rule) in self._noticed:
                return
            self._noticed.add((topic, rule))
        self.emit("notice", message, rule=rule, step=step, **options)

    def is_noticed(self, topic: str, rule: str = "") -> bool:
        return (topic, rule) in self._noticed

    def count_fired(self, rule: str, step: int, count: int = 1) -> None:
        tally = self._tallies[rule]
        with self._lock:
            if not tally.fired:
                self.silent.pop(rule, None)
            tally.fired += count
            # Each optimizer counts its own steps. The largest count stays.
            if tally.last_step is None or step > tally.last_step:
                tally.last_step = step

    def count_changed(self, rule: str, count: Tensor | int) -> None:
        """Count firings that changed something. A count on a device is read later, without a wait."""
        if isinstance(count, Tensor):
            self.when_read(count, lambda arrived: self.count_changed(rule, int(arrived)))
            return
        tally = self._tallies[rule]
        with self._lock:
            if tally.altered is None:
                tally.altered = 0
            tally.altered += count

    def emit_if(self, flag: Tensor, message: str, *, rule: str, step: int) -> None:
        """Record a notice if ``flag`` is set, once the flag can be read without waiting."""

        def note(value: Tensor) -> None:
            if value:
                self.emit("notice", message, rule=rule, step=step)

        self.when_read(flag, note)

    def when_read(self, values: Tensor, act: Callable[[Tensor], None]) -> None:
        """Call ``act`` with the values, float32 on the host, once they can be read without waiting."""
        if _torch.is_host(values):
            act(values)
            return
        if _torch.is_capturing():
            return  # they have no value yet, and belong to the graph
        if self.flags.put(act, values) >= _FLAGS_PER_TRANSFER:
            self.flags.send()

    def read_devices(self, *, wait: bool = True) -> None:
        """Read the counts and flags of all devices. Without ``wait`` read only those that have arrived."""
        self.flags.send(wait=wait)

    def note_due(self, rule: str, step: int, cause: Callable[[], str]) -> None:
        """Report early that a rule does not fire. Only the end shows whether it never did."""
        tally = self._tallies[rule]
        with self._lock:
            if tally.fired or step <= tally.quiet_step:
                return
            tally.quiet += 1
            tally.quiet_step = step
            is_suspect = tally.quiet == _QUIET_STEPS and rule in self.silent
        if is_suspect:
            tally.cause = cause()
            text = f"was due in {_QUIET_STEPS} steps and has not fired yet: {tally.cause}"
            self.emit("notice", text, rule=rule, step=step, warn=True)

    def cause(self, rule: str) -> str:
        """Return why a rule has not fired, empty if that is unknown or if the rule has fired."""
        tally = self._tallies[rule]
        return "" if tally.fired else tally.cause

    def never_fired(self) -> list[tuple[str, int, str]]:
        """Return each rule that matched and never fired, the number of steps in which it was due, and the cause, if known."""
        never = []
        for rule in self.silent:
            tally = self._tallies[rule]
            if tally.matched:
                never.append((rule, tally.quiet, tally.cause))
        return never

    def status(self, *, wait: bool = True) -> dict[str, RuleStatus]:
        """Return the status of each rule. Without ``wait`` the counts of devices are a moment old."""
        self.read_devices(wait=wait)
        return {rule: tally.status() for rule, tally in self._tallies.items()}


def _read(arrived: Sequence[tuple[Callable[[Tensor], None], Tensor]]) -> None:
    for act, values in arrived:
        act(values)


def _log(
    level: int, text: str, error: BaseException | None = None, *, is_said: bool = False
) -> None:
    """Log. A handler that raises, such as a log server that is gone, must not leave a step half done."""
    try:
        _LOGGER.log(level, "%s", text, exc_info=error, extra={"is_said": is_said})
    except Exception:  # noqa: BLE001 # whatever a handler raises
        with contextlib.suppress(Exception):  # stderr may raise also
            traceback.print_exc()


def _lines(message: str, rule: str) -> str:
    lines = _with_rule(message, rule).split("\n")
    return "\n".join(map(printable, lines))


def _with_rule(message: str, rule: str) -> str:
    # A trap and its exception share one message, which names the rule already.
    if not rule or f"rule {rule}" in message:
        return message
    return f"rule {rule}: {message}"
