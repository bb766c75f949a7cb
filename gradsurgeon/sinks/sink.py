"""What a tracker has to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

_METHODS = ("names", "scalars", "histogram", "text", "flush", "close")


class Sink(Protocol):
    """Where the aggregates of a run go: those of this package, or a class of your own with these methods.

    All calls come from one thread at a time, which is not that of the training. What a method raises ends the
    sink, and is told as an event.
    """

    @property
    def names(self) -> Sequence[str]:
        """Patterns, as in rule files, of tensors that get a curve each besides; nothing for none."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take numbers of one update, NaN and infinity among them, by name: ``gradsurgeon/norms/total``."""

    def histogram(
        self, step: int, name: str, edges: Sequence[float], counts: Sequence[int]
    ) -> None:
        """Take how many values lie between each of the edges, of which there is one more, and the next."""

    def text(self, step: int, name: str, text: str) -> None:
        """Take a text of several lines: the rules, an event, the diagnosis of a trap."""

    def flush(self) -> None:
        """Let everything that was taken be seen; called after each batch."""

    def close(self) -> None:
        """End it: called when the process ends, so that session after session can have it; or call it yourself.

        A class that also has a method ``close_at_exit(error)`` gets that called when the process ends, in place
        of this one, with the exception that has ended it, or ``None``.
        """


def check_sinks(sinks: object) -> None:
    """Raise a `TypeError` that says what is wrong unless it is a list of sinks."""
    if isinstance(sinks, str) or not isinstance(sinks, Sequence):
        raise TypeError(
            f"sinks= takes a list of sinks, such as [TensorBoard(...)], not {type(sinks).__name__}"
        )
    for sink in sinks:
        if lacking := [name for name in _METHODS if not hasattr(sink, name)]:
            raise TypeError(
                f"{type(sink).__name__} is no sink: it has no {', '.join(lacking)}; see gradsurgeon.sinks.Sink"
            )
