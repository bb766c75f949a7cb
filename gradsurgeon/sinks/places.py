"""Sinks by name, as on the command line: ``tensorboard:runs/today``."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

from gradsurgeon.errors import GradSurgeonError, did_you_mean, printable

if TYPE_CHECKING:
    from gradsurgeon.sinks.sink import Sink

# The class of each kind, and the kind of its place.
_KINDS = {
    "tensorboard": ("TensorBoard", "DIR"),
    "wandb": ("WandB", "PROJECT"),
    "mlflow": ("MLflow", "URI"),
}
FORMS = tuple(f"{kind}:{place}" for kind, (_, place) in _KINDS.items())


def why_no_sink(text: str) -> str:
    """Return why a text names no sink, empty if it names one."""
    kind, _, place = text.partition(":")
    forms = ", ".join(FORMS)
    if kind not in _KINDS:
        meant = f" {hint}" if (hint := did_you_mean(kind, list(_KINDS))) else ""
        return f"`{printable(text)}` is no sink;{meant} there are: {forms}"
    if not place:
        return f"`{printable(text)}` names no place: there are: {forms}"
    if find_spec(kind) is None:
        return f"`{printable(text)}` needs the package {kind}: pip install 'gradsurgeon[{kind}]'"
    return ""


def absolute(text: str) -> str:
    """Return the text with an absolute directory, as the script may change its working directory."""
    kind, _, place = text.partition(":")
    return f"{kind}:{Path(place).absolute()}" if _KINDS[kind][1] == "DIR" else text


def at_place(text: str) -> Sink:
    """Return the sink that a text such as ``tensorboard:runs/today`` names.

    Raises:
        GradSurgeonError: there is no such sink, or its client is missing.
    """
    if reason := why_no_sink(text):
        raise GradSurgeonError(reason)
    kind, _, place = text.partition(":")
    module = import_module(f"{__package__}.{kind}")
    return cast("Sink", getattr(module, _KINDS[kind][0])(place))
