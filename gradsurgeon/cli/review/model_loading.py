"""Load the model or module of ``--model`` and ``--import``: the only part of a review that runs user code."""

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from operator import attrgetter
from types import TracebackType
from typing import Any

from gradsurgeon.errors import ModelError, printable


def load_model(spec: str, *, with_values: bool = False) -> Any:
    with redirect_stdout(sys.stderr):  # stdout has our answer
        needed = (
            "`--model` needs PyTorch (pip install 'gradsurgeon[torch]'), which cannot be imported"
        )
        with _failing(needed):
            torch = importlib.import_module("torch")
        model = _target(spec)
        if callable(model) and not isinstance(model, torch.nn.Module):
            with _failing(f"cannot build `{printable(spec)}`"):
                model = model() if with_values else _built_without_values(torch, model)
    if not isinstance(model, torch.nn.Module):
        message = f"`{printable(spec)}` must be or give a torch.nn.Module, it gives"
        raise ModelError(f"{message} a value of the type {type(model).__name__}")
    return model


@contextmanager
def _failing(message: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001 # user code raises anything
        lines = traceback.format_exception(type(error), error, _of_user(error))
        trace = "".join(lines).rstrip()
        raise ModelError(f"{message}:\n{trace}") from None


def _of_user(error: BaseException) -> TracebackType | None:
    """Return the traceback of an error without the frames of this file, which come first."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _target(spec: str) -> Any:
    name, _, path = spec.partition(":")
    if not name or not path or name.endswith(".py"):
        example = "write MODULE:NAME, such as train.net:build"
        raise ModelError(f"`--model {printable(spec)}` names no model: {example}")
    module = import_module(name)
    try:
        return attrgetter(path)(module)
    except AttributeError:
        raise ModelError(f"`{printable(name)}` has no `{printable(path)}`") from None


def import_module(name: str) -> Any:
    """Import a module of the user; Python also searches the current folder."""
    here = os.getcwd()  # noqa: PTH109 # an entry of sys.path is a text
    if here not in sys.path:
        sys.path.insert(0, here)
    message = f"cannot import `{printable(name)}`, looked for in {printable(here)} and on sys.path"
    with _failing(message), redirect_stdout(sys.stderr):
        return importlib.import_module(name)


def _built_without_values(torch: Any, build: Any) -> Any:
    try:
        with torch.device("meta"):
            return build()
    except Exception as error:  # noqa: BLE001 # many errors are possible without values
        reason = f"{type(error).__name__}: {printable(str(error).partition(chr(10))[0][:200])}"
    sys.stderr.write(f"cannot build it on the meta device ({reason}): building it with values\n")
    return build()
