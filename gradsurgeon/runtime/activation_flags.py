"""Flags of non-finite module tensors and tags, kept on the device until the next update decides."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from gradsurgeon.actions import Rule
from gradsurgeon.recording.event_log import EventLog
from gradsurgeon.runtime.due_rules import StepCounter
from gradsurgeon.tensors.measure import read

# Bounds the flags that a long validation between two updates collects.
_MOST = 4096


@dataclass(slots=True)
class Flag:
    """The number of non-finite elements of one tensor when the tensor came into being."""

    rule: Rule
    name: str
    counter: Callable[[], StepCounter]
    # An int if the host could read it without waiting.
    count: Tensor | int
    # Whether the tensor takes part in an update: a gradient always does, a value once a backward pass reaches it.
    fed: bool
    # For a value: an object that lives as long as a backward pass can reach the value.
    graph: weakref.ref[object] | None = None
    # True for a leaf, such as a batch, in a forward pass with gradients. No hook is on a leaf, so the next
    # backward pass decides.
    waits: bool = False

    @property
    def what(self) -> str:
        return str(self.rule.ref)

    @property
    def key(self) -> tuple[str, str]:
        return self.rule.id, self.name

    @property
    def can_feed(self) -> bool:
        """Whether a backward pass can still reach the tensor."""
        return self.waits or (self.graph is not None and self.graph() is not None)


class Flags:
    """All flags since the last update, in the order in which their tensors appeared."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self._flags: list[Flag] = []
        self._most = _MOST
        # The latest flag of a forward pass, by rule and tensor.
        self._last: dict[tuple[str, str], Flag] = {}

    def passed(self) -> None:
        """Note a backward pass: the forward pass before it feeds an update."""
        for flag in self._flags:
            flag.fed |= flag.waits

    def is_known(self, rule: str, name: str) -> bool:
        """Return whether the original run of a recomputed forward pass left a flag that can feed an update."""
        # Reentrant checkpointing runs the forward pass without gradients first: such flags can feed none.
        last = self._last.get((rule, name))
        return last is not None and (last.fed or last.waits or last.graph is not None)

    def add(self, flag: Flag, *, again: bool = False) -> None:
        """Add a flag; ``again`` if a forward pass is run again inside a backward pass."""
        if not again:
            self._last[flag.key] = flag
        if len(self._flags) >= self._most:
            self._compact()
        self._flags.append(flag)

    def _compact(self) -> None:
        kept = [flag for flag in self._flags if flag.fed or flag.can_feed]
        self._mention(_counted(flag for flag in self._flags if not (flag.fed or flag.can_feed)))
        self._flags = kept
        # The bound grows, because a model may have more modules than `_MOST`.
        self._most = max(_MOST, 2 * len(kept))

    def raised(self, counter: StepCounter, common: StepCounter) -> list[tuple[Flag, int]]:
        """Return, with their counts, the flags so far that the next update must judge."""
        return _counted(f for f in self._flags if f.fed and f.counter() in (counter, common))

    def take(self, counter: StepCounter, common: StepCounter) -> list[tuple[Flag, int]]:
        """Remove and return, with their counts, the flags that an update must judge. Reads the device once.

        Modules that no optimizer owns use the ``common`` counter: the next update of any optimizer judges them.
        """
        self._last.clear()
        if not self._flags:
            return []
        counted = _counted(flag for flag in self._flags if flag.counter() in (counter, common))
        self._flags = [flag for flag in self._flags if flag.counter() not in (counter, common)]
        fed = [(flag, count) for flag, count in counted if flag.fed]
        trapped = {flag.key for flag, count in fed if count}
        self._mention((f, c) for f, c in counted if not f.fed and f.key not in trapped)
        return fed

    def forget(self, counter: StepCounter) -> None:
        self._flags = [flag for flag in self._flags if flag.counter() is not counter]

    def close(self) -> None:
        self._mention(_counted(self._flags))
        self._flags = []

    def _mention(self, dropped: Iterable[tuple[Flag, int]]) -> None:
        for flag, count in dropped:
            if count:
                text = (
                    f"the {flag.what} of {flag.name} was non-finite (elements: {count:,}) in a forward pass that fed "
                    "no update: the trap ignored it"
                )
                rule, step = flag.rule.id, flag.counter().step
                self._event_log.emit("notice", text, rule=rule, step=step, name=flag.name)


def _counted(flags: Iterable[Flag]) -> list[tuple[Flag, int]]:
    flags = list(flags)
    unread = [flag.count for flag in flags if isinstance(flag.count, Tensor)]
    counts = iter(read(unread))
    return [(f, next(counts) if isinstance(f.count, Tensor) else f.count) for f in flags]
