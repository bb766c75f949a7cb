"""What a session has to tell: events, and what each rule has done.

Each thing is said once, in one of three ways:

* as an exception, where a trap stops the training;
* as a `GradSurgeonWarning`, where the one who called should change something: a rule that never fired,
  a hook that got lost, a set-up that cannot honour a rule, and a trap with ``then: warn``;
* to the logger ``gradsurgeon``: a trap that lets the training go on and a skipped step at WARNING,
  which Python prints to stderr where nobody has configured logging; all else at INFO.

What happens again and again, a trap or a step that the scaler skips, is told in full the first time,
and then counted and told in a line: the 10th, the 100th, the 1,000th time, and once a minute.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock

import torch
from torch import Tensor

from gradsurgeon import _dist, _torch
from gradsurgeon.actions import Rule
from gradsurgeon.errors import GradSurgeonWarning, printable
from gradsurgeon.events import Event, EventKind, RuleStatus
from gradsurgeon.runtime.ring import Ring

_LOGGER = logging.getLogger("gradsurgeon")
# A trap with `then: warn` can trip in every step of a long run.
_MOST_EVENTS = 10_000
# Of these the repetitions make room first, and so many of them are written to a run at most.
_INNOCENT = frozenset({"notice", "scaler-skip", "hook-rearmed"})
# What can happen in every step, with how it is logged; a trap and the step that it skips are one thing.
_REPEATED = {
    "trap": ("trap", logging.WARNING),
    "skipped-step": ("trap", logging.WARNING),
    "scaler-skip": ("scaler-skip", logging.INFO),
}
_MINUTE = 60.0
# One step can pass without a gradient for innocent reasons, three in a row are worth a word.
_QUIET_STEPS = 3
# Flags wait on the device until so many of them are worth one look.
_DOUBTS = 256


_NOT_THE_SCRIPT = (
    *(f"{package}{os.sep}" for package in (Path(__file__).parents[1], Path(torch.__file__).parent)),
    weakref.__file__,  # which tells that a model is gone
)


def _level_of_the_script() -> int:
    """Return the stack level, for a warning of the caller, of the line of the script that led to it."""
    level, frame = 1, sys._getframe(1)  # noqa: SLF001 # documented
    while frame.f_code.co_filename.startswith(_NOT_THE_SCRIPT):
        level += 1
        if frame.f_back is None:
            break  # a thread of autograd: no line of the script is there
        frame = frame.f_back
    return level


@dataclass(slots=True)
class Tally:
    """What one rule has done.

    ``altered`` counts on the device, to be read when asked for; ``known`` what the host knows anyway.
    """

    matched: int
    fired: int = 0
    last_step: int | None = None
    quiet: int = 0
    due: bool = False
    altered: dict[torch.device, Tensor] = field(default_factory=dict)
    # The counts of `altered` as they were a moment ago.
    arrived: dict[torch.device, int] = field(default_factory=dict)
    known: int = 0
    warnings: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Repeated:
    """How often something has happened, in which step last, and when it was last told."""

    times: int = 0
    step: int | None = None
    told: float = 0.0


class Journal:
    """Events in order, and one tally per rule. Several threads may write to it.

    Args:
        rules: every rule, in file order.
        matched: how many tensors each matches.
        sink: told of each event that is noted.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        matched: Sequence[int],
        *,
        sink: Callable[[Event], None] | None = None,
    ) -> None:
        self.events: list[Event] = []
        self.sink = sink
        self._tallies = {rule.id: Tally(count) for rule, count in zip(rules, matched, strict=True)}
        self._said: set[tuple[str, str]] = set()
        self._repeated: dict[tuple[str, str], _Repeated] = {}
        self._innocent = 0
        self._doubts: Ring[tuple[EventKind, str, str, int]] = Ring(self._answer)
        self._counts: Ring[tuple[Tally, torch.device]] = Ring(self._counted)
        # Never held while something else is called: the recorder has a lock of its own, and calls back.
        self._lock = RLock()

    def emit(
        self,
        kind: EventKind,
        message: str,
        *,
        rule: str = "",
        step: int = 0,
        name: str = "",
        warn: bool = False,
        raised: bool = False,
    ) -> None:
        """Note an event, and tell of it.

        Args:
            kind: what sort of thing it is.
            message: what happened; its first line stands for itself.
            rule: the rule concerned.
            step: the clock concerned.
            name: the tensor concerned.
            warn: warn the caller, who ought to see it at once.
            raised: an exception is about to tell it.
        """
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
            _LOGGER.log(logging.INFO if raised else level, "%s", lines)

    def _news(self, topic: tuple[str, str], step: int, message: str) -> str:
        """Return what to tell of something that happens again and again, empty for nothing."""
        now = time.monotonic()
        with self._lock:
            seen = self._repeated.setdefault(topic, _Repeated())
            if seen.step == step:
                return ""  # in other words
            seen.step = step
            seen.times += 1
            times = seen.times
            round_number = times == 10 ** (len(str(times)) - 1)
            if not round_number and now - seen.told < _MINUTE:
                return ""
            seen.told = now
        if times == 1:
            return message
        return f"{'; '.join(message.split(chr(10))[:2])} ({times:,} times so far)"

    def warn(self, message: str, *, rule: str = "") -> None:
        """Warn the caller."""
        if rule:
            with self._lock:
                self._tallies[rule].warnings.append(message)
        warnings.warn(_with_rule(message, rule), GradSurgeonWarning, _level_of_the_script())

    def _note(self, event: Event) -> None:
        innocent = event.kind in _INNOCENT
        with self._lock:
            self.events.append(event)
            self._innocent += innocent
            written = not innocent or self._innocent <= _MOST_EVENTS
            full = len(self.events) > _MOST_EVENTS
            if full:
                self._make_room()
        if self.sink is not None and written:
            self.sink(event)
        if full:
            text = f"more than {_MOST_EVENTS:,} events: of those that repeat others the oldest are not kept"
            self.once("events", text, step=event.step)

    def _make_room(self) -> None:
        """Let go of a tenth of the events: repetitions first, those of what is innocent before others."""
        seen: set[tuple[str, str, str]] = set()
        ranked = []
        for place, event in enumerate(self.events):
            what = (event.kind, event.rule, event.name)
            ranked.append((what not in seen, event.kind not in _INNOCENT, place))
            seen.add(what)
        gone = {place for _, _, place in sorted(ranked)[: _MOST_EVENTS // 10]}
        self.events = [event for place, event in enumerate(self.events) if place not in gone]

    def once(
        self, topic: str, message: str, *, rule: str = "", step: int = 0, warn: bool = False
    ) -> None:
        """Note a notice the first time the topic comes up."""
        with self._lock:
            if (topic, rule) in self._said:
                return
            self._said.add((topic, rule))
        self.emit("notice", message, rule=rule, step=step, warn=warn)

    def records_dropped(self, step: int) -> None:
        """Note that records in memory have begun to make room."""
        text = (
            "records in memory have reached their bound: from here on the oldest make room for new ones; "
            "a run directory (record=) keeps all of them"
        )
        self.once("records", text, step=step)

    def said(self, topic: str, rule: str = "") -> bool:
        """Tell whether the topic has come up."""
        return (topic, rule) in self._said

    def has_fired(self, rule: str) -> bool:
        """Tell whether a rule has fired."""
        return bool(self._tallies[rule].fired)

    def later(
        self, flag: Tensor, message: str, *, rule: str = "", step: int, kind: EventKind = "notice"
    ) -> None:
        """Note an event if ``flag`` is set, which is read at once only where that waits for nothing."""
        if _torch.is_capturing():
            return  # The flag has no value yet, and belongs to the graph.
        if _torch.is_host(flag):
            self._answer([((kind, message, rule, step), flag)])
            return
        self._doubts.put((kind, message, rule, step), flag)
        if len(self._doubts) >= _DOUBTS:
            self._doubts.send()
            self._doubts.collect()

    def settle(self) -> None:
        """Read the flags that wait. Waits for the device."""
        self._doubts.settle()

    def _answer(self, doubts: Sequence[tuple[tuple[EventKind, str, str, int], Tensor]]) -> None:
        for (kind, message, rule, step), flag in doubts:
            if bool(flag):
                self.emit(kind, message, rule=rule, step=step)

    def fired(self, rule: str, step: int, count: int = 1) -> None:
        """Count firings of a rule."""
        tally = self._tallies[rule]
        with self._lock:
            tally.fired += count
            tally.last_step = step

    def altered(self, rule: str, flag: Tensor | int) -> None:
        """Count firings that altered something, without reading a flag."""
        tally = self._tallies[rule]
        if not isinstance(flag, Tensor):
            with self._lock:
                tally.known += flag
            return
        if _torch.is_capturing():
            return  # Every replay would begin to count from zero.
        with self._lock, torch.no_grad():
            counter = tally.altered.get(flag.device)
            if counter is None:
                # What is made in inference mode, where validation may come first, is no use outside.
                with torch.inference_mode(mode=False):
                    counter = torch.zeros((), dtype=torch.int64, device=flag.device)
                tally.altered[flag.device] = counter
            counter.add_(flag)

    def passed(self, rule: str, step: int, cause: Callable[[], str]) -> None:
        """Note that a step in which a rule was due is over; say so where it never fires."""
        tally = self._tallies[rule]
        with self._lock:
            tally.due = True
            tally.quiet += not tally.fired
            news = not tally.fired and tally.quiet == _QUIET_STEPS
        if news:
            text = f"was due in {_QUIET_STEPS} steps and never fired: {cause()}"
            self.emit("never-fired", text, rule=rule, step=step, warn=True)

    def never_fired(self) -> list[tuple[str, bool]]:
        """Return the rules that bound to something and never fired, and whether they were due."""
        tallies = self._tallies.items()
        return [(rule, tally.due) for rule, tally in tallies if tally.matched and not tally.fired]

    def status(self, *, wait: bool = True) -> dict[str, RuleStatus]:
        """Return what each rule has done.

        Args:
            wait: for devices. Otherwise what they have counted is a moment old.
        """
        if wait:
            self.settle()
        else:
            self._refresh()
        found: dict[str, RuleStatus] = {}
        for rule, tally in self._tallies.items():
            counts = map(int, tally.altered.values()) if wait else tally.arrived.values()
            altered = tally.known + sum(counts)
            found[rule] = RuleStatus(
                matched=tally.matched,
                fired=tally.fired,
                changed=altered / tally.fired if tally.fired else 0.0,
                last_step=tally.last_step,
                warnings=tuple(tally.warnings),
            )
        return found

    def _refresh(self) -> None:
        """Let flags and counters travel to the host, and take what has arrived."""
        if _torch.is_capturing():
            return  # Nothing can be read until the graph is complete.
        self._doubts.send()
        self._doubts.collect()
        self._counts.collect()
        if self._counts.under_way:
            return
        for tally in self._tallies.values():
            for device, counter in list(tally.altered.items()):
                if _torch.is_host(counter):
                    tally.arrived[device] = int(counter)
                else:
                    self._counts.put((tally, device), counter)
        self._counts.send()

    @staticmethod
    def _counted(found: Sequence[tuple[tuple[Tally, torch.device], Tensor]]) -> None:
        for (tally, device), count in found:
            tally.arrived[device] = int(count)


def _with_rule(message: str, rule: str) -> str:
    """Return a message that names its rule; that of a trap, which is raised as well, does so itself."""
    return message if not rule or f"rule {rule}" in message else f"rule {rule}: {message}"
