"""What a session has to tell: events, and what each rule has done."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from gradsurgeon import _dist, _torch
from gradsurgeon.actions import Rule
from gradsurgeon.errors import GradSurgeonWarning
from gradsurgeon.events import Event, EventKind, RuleStatus
from gradsurgeon.runtime.ring import Ring

# A trap with `then: warn` can trip in every step of a long run.
_MOST_EVENTS = 10_000
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
    known: int = 0
    warnings: list[str] = field(default_factory=list)


class Journal:
    """Events in order, and one tally per rule.

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
        self._doubts: Ring[tuple[str, str, int]] = Ring(self._answer, rows=_DOUBTS)

    def emit(
        self,
        kind: EventKind,
        message: str,
        *,
        rule: str = "",
        step: int = 0,
        name: str = "",
        warn: bool = False,
    ) -> None:
        """Note an event, and warn the caller as well where he ought to see it at once."""
        if len(self.events) < _MOST_EVENTS:
            self._note(Event(kind, rule, step, _dist.rank(), name, message))
        elif len(self.events) == _MOST_EVENTS:
            text = f"{_MOST_EVENTS:,} events noted; further ones are not kept"
            self._note(Event("notice", "", step, _dist.rank(), "", text))
        if warn:
            self.warn(message, rule=rule)

    def warn(self, message: str, *, rule: str = "") -> None:
        """Warn the caller."""
        if rule:
            self._tallies[rule].warnings.append(message)
        text = f"{f'rule {rule}: ' if rule else ''}{message}"
        warnings.warn(text, GradSurgeonWarning, _level_of_the_script())

    def _note(self, event: Event) -> None:
        self.events.append(event)
        if self.sink is not None:
            self.sink(event)

    def once(
        self, topic: str, message: str, *, rule: str = "", step: int = 0, warn: bool = False
    ) -> None:
        """Note a notice the first time the topic comes up."""
        if (topic, rule) not in self._said:
            self._said.add((topic, rule))
            self.emit("notice", message, rule=rule, step=step, warn=warn)

    def said(self, topic: str, rule: str = "") -> bool:
        """Tell whether the topic has come up."""
        return (topic, rule) in self._said

    def later(self, flag: Tensor, message: str, *, rule: str, step: int) -> None:
        """Note a notice if ``flag`` is set, which is read at once only where that waits for nothing."""
        if _torch.is_capturing():
            return  # The flag has no value yet, and belongs to the graph.
        if _torch.is_host(flag):
            self._answer([((message, rule, step), flag)])
            return
        self._doubts.put((message, rule, step), flag)
        if len(self._doubts) >= _DOUBTS:
            self._doubts.send()
            self._doubts.collect()

    def settle(self) -> None:
        """Read the flags that wait. Waits for the device."""
        self._doubts.settle()

    def _answer(self, doubts: Sequence[tuple[tuple[str, str, int], Tensor]]) -> None:
        for (message, rule, step), flag in doubts:
            if bool(flag):
                self.emit("notice", message, rule=rule, step=step)

    def fired(self, rule: str, step: int, count: int = 1) -> None:
        """Count firings of a rule."""
        tally = self._tallies[rule]
        tally.fired += count
        tally.last_step = step

    def altered(self, rule: str, flag: Tensor | int) -> None:
        """Count firings that altered something, without reading a flag."""
        if not isinstance(flag, Tensor):
            self._tallies[rule].known += flag
            return
        if _torch.is_capturing():
            return  # Every replay would begin to count from zero.
        counts = self._tallies[rule].altered
        counter = counts.get(flag.device)
        if counter is None:
            # What is made in inference mode, where validation may come first, is no use outside.
            with torch.inference_mode(mode=False):
                counter = torch.zeros((), dtype=torch.int64, device=flag.device)
            counts[flag.device] = counter
        with torch.no_grad():
            counter.add_(flag)

    def passed(self, rule: str, step: int, cause: Callable[[], str]) -> None:
        """Note that a step in which a rule was due is over; say so where it never fires."""
        tally = self._tallies[rule]
        tally.due = True
        if tally.fired:
            return
        tally.quiet += 1
        if tally.quiet == _QUIET_STEPS:
            text = f"was due in {_QUIET_STEPS} steps and never fired: {cause()}"
            self.emit("never-fired", text, rule=rule, step=step, warn=True)

    def never_fired(self) -> list[tuple[str, bool]]:
        """Return the rules that bound to something and never fired, and whether they were due."""
        tallies = self._tallies.items()
        return [(rule, tally.due) for rule, tally in tallies if tally.matched and not tally.fired]

    def status(self) -> dict[str, RuleStatus]:
        """Return what each rule has done. Waits for the device."""
        self.settle()
        found: dict[str, RuleStatus] = {}
        for rule, tally in self._tallies.items():
            altered = tally.known + sum(int(counter) for counter in tally.altered.values())
            found[rule] = RuleStatus(
                matched=tally.matched,
                fired=tally.fired,
                changed=altered / tally.fired if tally.fired else 0.0,
                last_step=tally.last_step,
                warnings=tuple(tally.warnings),
            )
        return found
