"""Hooks that got lost: parameters that were replaced, swapped, sharded or removed after `apply`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradsurgeon import _dist
from gradsurgeon.errors import printable
from gradsurgeon.events import EventKind
from gradsurgeon.runtime.arming import Arming
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.state import State

_SHOWN = 3


class Upkeep:
    """Notices lost hooks once per step, brings them back, and says so.

    Args:
        state: what the parts of a session share.
        arming: the hooks.
        check: raises where the rules cannot act on the model as it is now.
    """

    def __init__(self, state: State, arming: Arming, check: Callable[[], None]) -> None:
        self._state = state
        self._arming = arming
        self._check = check
        self._arrived: set[int] = set()
        self._revived: set[int] = set()

    def arrived(self, tensors: Sequence[int]) -> None:
        """Note that the hooks of some tensors were called."""
        self._arrived.update(tensors)

    def look(self, clock: Clock) -> None:
        """Look after the hooks on the tensors of a clock; a step of it is over."""
        bypassed = self._arming.bypassed(self._arrived, clock)
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
        self._say("hook-rearmed", fresh, text, clock)

    def rearm(self, clock: Clock) -> list[int]:
        """Put hooks on the parameters that have taken the place of those that carried them.

        Returns:
            The tensors whose parameter was replaced or is gone.

        Raises:
            BindError: a rule cannot act on what took the place.
        """
        replaced = self._arming.replaced(clock)
        if not replaced:
            return []
        params = [self._state.targets.param(tensor) for tensor in replaced]
        if any(one is not None and _dist.is_sharded(one) for one in params):
            self._check()
        there = [tensor for tensor in replaced if self._arming.rearm(tensor)]
        # What they have now got did not pass through hooks, and that has just been said.
        self._arrived.update(there)
        text = "was replaced by another parameter: its hooks were put on the new one"
        self._say("hook-rearmed", there, text, clock)
        gone = [tensor for tensor in replaced if tensor not in there]
        text = (
            "is gone from its module: rules on it no longer act; apply them again after the model has "
            "its final form"
        )
        self._say("hook-lost", gone, text, clock)
        return replaced

    def _say(self, kind: EventKind, tensors: Sequence[int], text: str, clock: Clock) -> None:
        """Note an event for every tensor, and warn once for all: a conversion concerns many."""
        if not tensors:
            return
        names = [self._state.program.names[tensor] for tensor in tensors]
        for name in names:
            message = f"{printable(name)} {text}"
            self._state.journal.emit(kind, message, step=clock.step, name=name)
        more = len(names) - _SHOWN
        what = ", ".join(printable(name) for name in names[:_SHOWN])
        what += f" and {more} more" if more > 0 else ""
        self._state.journal.warn(f"{what}: each {text}" if len(names) > 1 else f"{what} {text}")
