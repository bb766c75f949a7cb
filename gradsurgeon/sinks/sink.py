"""What a sink has to do, what the sinks of this package share, and sinks by name, as ``tensorboard:runs/today``."""

import os
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

from gradsurgeon.common._libraries import library
from gradsurgeon.errors import printable

_METHODS = ("names", "scalars", "text", "flush", "close")
# Launchers of several ranks tell each process its rank in these, before there is a process group.
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
# The class of each kind, and the kind of its place.
_KINDS = {
    "tensorboard": ("TensorBoard", "DIR"),
    "wandb": ("WandB", "PROJECT"),
    "mlflow": ("MLflow", "URI"),
}
FORMS = tuple(f"{kind}:{place}" for kind, (_, place) in _KINDS.items())


class Sink(Protocol):
    """Where the aggregates of a run go: a sink of this package, or a class of your own with these methods.

    One thread at a time calls them, and it is not the training's thread. An exception in a method ends the
    sink, and becomes an event.
    """

    @property
    def names(self) -> Sequence[str]:
        """Patterns, as in rule files, of tensors that get a curve each; empty for none."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take numbers of one update, NaN and infinity included, by name: ``gradsurgeon/norms/total``."""

    def text(self, step: int, name: str, text: str) -> None:
        """Take a text of several lines: the rules, an event, the diagnosis of a trap."""

    def flush(self) -> None:
        """Make everything visible that was taken. Called after each batch."""

    def close(self) -> None:
        """Close the sink. Called when the process ends, so that sessions can share a sink; or call it yourself."""


class Client:
    """The client of a tracker. The first rank opens it at once, so that a mistake shows early; others when they use it."""

    def __init__(self, names: Sequence[str], module: str, extra: str) -> None:
        self.names = patterns_of(names)
        # The clients ship no types.
        self._library: Any = library(module, extra, f"the sink {type(self).__name__}")

    def _open(self) -> Any:
        raise NotImplementedError

    def _open_first(self) -> None:
        """Open the client on the first rank. A sink calls this last when it is made."""
        if _is_first_rank():
            _ = self._client

    @cached_property
    def _client(self) -> Any:
        return self._open()

    @property
    def _is_open(self) -> bool:
        return "_client" in vars(self)


def patterns_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return patterns as a tuple. A text is one pattern, and not one for each of its letters."""
    return (names,) if isinstance(names, str) else tuple(names)


def _is_first_rank() -> bool:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    return all(os.environ.get(name, "0") == "0" for name in _RANKS)


def check_sinks(sinks: object) -> None:
    """Raise a `TypeError` unless it is a list of sinks."""
    for sink in sinks if isinstance(sinks, Sequence) else [sinks]:
        if lacking := [name for name in _METHODS if not hasattr(sink, name)]:
            raise TypeError(
                f"sinks= takes a list of sinks, such as [TensorBoard(...)]: {type(sink).__name__} has no "
                f"{', '.join(lacking)}; see gradsurgeon.sinks.Sink"
            )


def why_no_sink(text: str) -> str:
    """Return why a text names no sink, empty if it names one."""
    kind, _, place = text.partition(":")
    if kind not in _KINDS or not place:
        return f"`{printable(text)}` is no sink: there are {', '.join(FORMS)}"
    if find_spec(kind) is None:
        return f"`{printable(text)}` needs the package {kind}: pip install 'gradsurgeon[{kind}]'"
    return ""


def absolute(text: str) -> str:
    """Return the text with an absolute directory, as the script may change its working directory."""
    kind, _, place = text.partition(":")
    return f"{kind}:{Path(place).absolute()}" if _KINDS[kind][1] == "DIR" else text


def at_place(text: str) -> Sink:
    """Return the sink that a text such as ``tensorboard:runs/today`` names. Raises `GradSurgeonError` without its client."""
    kind, _, place = text.partition(":")
    module = import_module(f"{__package__}.{kind}")
    return cast("Sink", getattr(module, _KINDS[kind][0])(place))
