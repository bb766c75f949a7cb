"""Hooks that got lost: parameters that were replaced, swapped, sharded or removed after `apply`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gradsurgeon import _dist
from gradsurgeon.errors import printable
from gradsurgeon.events import EventKind
from gradsurgeon.runtime.arming import Arming
from gradsurgeon.runtime.changes import Changes
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.state import State

_SHOWN = 3


class Upkeep:
    """Notices lost hooks once per step, brings them back, and says so.

    Args:
        state: what the parts of a session share.
        arming: the hooks.
        changes: what has become of the model.
        check: raises where the rules cannot act on the model as it is now.
    """

    def __init__(
        self, state: State, arming: Arming, changes: Changes, check: Callable[[], None]
    ) -> None:
        self._state = state
        self._arming = arming
        self._changes = changes
        self._check = check
        self._arrived: set[int] = set()
        self._revived: set[int] = set()

    def arrived(self, tensors: Sequence[int]) -> None:
        """Note that the hooks of some tensors were called."""
        self._arrived.update(tensors)

    def look(self, clock: Clock, *, idle: bool) -> None:
        """Look after the hooks on the tensors of a clock; a step of it is over.

        Args:
            clock: whose step it was.
            idle: there were no hooks to look after.
        """
        if idle:
            self._changes.stepped()
            return
        seen = self._state.looks.get(clock)
        bypassed = self._arming.bypassed(self._arrived, clock, seen)
        if self._state.ranks.filling_in:
            bypassed = []
        self._changes.stepped()
        if set(bypassed) - self._revived:
            # They may belong to a part of the model that was exchanged.
            self._changes.look()
        replaced = self.rearm(clock)
        self._arrived.difference_update(clock.tensors)
        lost = [tensor for tensor in bypassed if tensor not in replaced]
        for tensor in lost:
            self._arming.revive(tensor)
        fresh = [tensor for tensor in lost if tensor not in self._revived]
        self._revived.update(fresh)
        text = (
            "got a gradient that did not pass through its hooks: its content was swapped by a "
            "conversion, or the script assigned the gradient; the hooks were installed anew"
        )
        self._say("hook-rearmed", fresh, lambda name: f"{name} {text}")

    def find_again(self) -> None:
        """Find the parameters of the plan in a model that has changed."""
        self._changes.look()
        self.rearm(None)

    def rearm(self, clock: Clock | None) -> list[int]:
        """Put hooks on the parameters that have taken the place of those that carried them.

        Args:
            clock: whose tensors are looked at; ``None`` for all.

        Returns:
            The tensors whose parameter was replaced or is gone.

        Raises:
            BindError: a rule cannot act on what took the place.
        """
        if not self._arming.replaced(clock):
            return []
        self._changes.look()  # they may have moved
        replaced = self._arming.replaced(clock)
        params = [self._state.targets.param(tensor) for tensor in replaced]
        if any(one is not None and _dist.is_sharded(one) for one in params):
            self._check()
        there = [tensor for tensor in replaced if self._arming.rearm(tensor)]
        # What they have now got did not pass through hooks, and that has just been said.
        self._arrived.update(there)
        text = "was replaced by another parameter: its hooks were put on the new one"
        self._say("hook-rearmed", there, lambda name: f"{name} {text}")
        gone = {
            tensor: self._changes.why_gone(tensor) for tensor in replaced if tensor not in there
        }
        self._lost(gone)
        return replaced

    def _say(self, kind: EventKind, tensors: Sequence[int], text: Callable[[str], str]) -> None:
        """Note an event for every tensor, and warn once for all: a conversion concerns many."""
        if not tensors:
            return
        names = [self._state.program.names[tensor] for tensor in tensors]
        for name in names:
            step = self._state.clocks.latest
            self._state.journal.emit(kind, text(printable(name)), step=step, name=name)
        self._state.journal.warn(text(f"{_some(names)}: each" if len(names) > 1 else _some(names)))

    def _lost(self, gone: Mapping[int, str]) -> None:
        for tensor, text in gone.items():
            name, step = self._state.program.names[tensor], self._state.clocks.latest
            self._state.journal.emit("hook-lost", text, step=step, name=name)
        if gone:
            others = [self._state.program.names[tensor] for tensor in list(gone)[1:]]
            more = f"; so it is with {_some(others)}" if others else ""
            self._state.journal.warn(next(iter(gone.values())) + more)


def _some(names: Sequence[str]) -> str:
    """Return the first few of some names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(printable(name) for name in names[:_SHOWN]) + more
