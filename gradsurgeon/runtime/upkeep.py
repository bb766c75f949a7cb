"""Hooks that got lost: parameters that were replaced, swapped, sharded or removed after `apply`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from gradsurgeon import _dist
from gradsurgeon.errors import printable
from gradsurgeon.events import EventKind
from gradsurgeon.runtime.arming import Arming
from gradsurgeon.runtime.changes import Changes
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.notices import some_of
from gradsurgeon.runtime.state import State


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
        self._swapped: list[int] = []

    def arrived(self, tensors: Sequence[int]) -> None:
        """Note that the hooks of some tensors were called."""
        self._arrived.update(tensors)

    def unowned(self) -> list[int]:
        """Return the tensors that get gradients and that no optimizer owns which has stepped so far."""
        return [tensor for tensor in self._state.clocks.common.tensors if tensor in self._arrived]

    def swapped(self, params: Sequence[Tensor]) -> None:
        """Take notice of parameters whose content was swapped: no hook on them is called any more."""
        for param in params:
            if (tensor := self._arming.revive(param)) is not None:
                self._swapped.append(tensor)

    def look(self, clock: Clock) -> None:
        """Look after the hooks on the tensors of a clock; a step of it is over."""
        self._changes.stepped()
        self.tell_swapped()
        self.rearm()
        silent = set(clock.tensors) - self._arrived
        self._arrived.difference_update(clock.tensors)
        missing = self._arming.missing(sorted(silent))
        for tensor in missing:
            self._arming.rearm(tensor)
        text = "has lost its hooks, which somebody has taken off: they were put on anew"
        self._say("hook-rearmed", missing, lambda name: f"{name} {text}")

    def tell_swapped(self) -> None:
        """Say whose hooks were installed anew."""
        tensors, self._swapped = sorted(set(self._swapped)), []
        text = "got another content by a conversion, which takes no hooks along: they were installed anew"
        self._say("hook-rearmed", tensors, lambda name: f"{name} {text}")

    def find_again(self, *, at_once: bool = False) -> None:
        """Find the parameters of the plan in a model that has changed.

        Args:
            at_once: no forward pass has gone through what has come.
        """
        self._changes.look(at_once=at_once)
        self.rearm()

    def rearm(self) -> list[int]:
        """Put hooks on the parameters that have taken the place of those that carried them.

        Returns:
            The tensors whose parameter was replaced or is gone.

        Raises:
            BindError: a rule cannot act on what took the place.
        """
        if not self._arming.replaced():
            return []
        self._changes.look()  # they may have moved
        replaced = self._arming.replaced()
        params = [self._state.targets.param(tensor) for tensor in replaced]
        if any(one is not None and _dist.is_sharded(one) for one in params):
            self._check()
        there = [tensor for tensor in replaced if self._arming.rearm(tensor)]
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
        self._state.journal.warn(
            text(f"{some_of(names)}: each" if len(names) > 1 else some_of(names))
        )

    def _lost(self, gone: Mapping[int, str]) -> None:
        for tensor, text in gone.items():
            name, step = self._state.program.names[tensor], self._state.clocks.latest
            self._state.journal.emit("hook-lost", text, step=step, name=name)
        if gone:
            others = [self._state.program.names[tensor] for tensor in list(gone)[1:]]
            more = f"; so it is with {some_of(others)}" if others else ""
            self._state.journal.warn(next(iter(gone.values())) + more)
