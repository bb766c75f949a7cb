"""Load the model or module of ``--model`` and ``--import``: the only part of a review that runs user code."""

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from operator import attrgetter
from typing import Any

from gradsurgeon.errors import ModelError, printable, reason_of


def load_model(spec: str, *, with_values: bool = False) -> Any:
    with redirect_stdout(sys.stderr):  # stdout has our answer
        with _failing(
            "`--model` needs PyTorch (pip install 'gradsurgeon[torch]'), which cannot be imported"
        ):
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
        trace = error.__traceback__
        # The frames of this file come first.
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        lines = "".join(traceback.format_exception(type(error), error, trace))
        raise ModelError(f"{message}:\n{lines.rstrip()}") from None


class _TrainsError(BaseException):
    """A module of the user trains while it is imported. Its handlers of an ``Exception`` let this through."""


def _target(spec: str) -> Any:
    name, _, path = spec.partition(":")
    if not name or not path or name.endswith(".py"):
        raise ModelError(
            f"`--model {printable(spec)}` names no model: write MODULE:NAME, such as train.net:build"
        )
    from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: PLC0415 # needs torch

    # A script without a main guard would train again, and write over its files.
    hook = register_optimizer_step_pre_hook(partial(_stop, name, path))
    try:
        module = import_module(name)
    except _TrainsError as stopped:
        sys.stderr.write(
            f"`{printable(name)}` trains when it is imported: stopped before its first update\n"
        )
        module = stopped.args[0]
    finally:
        hook.remove()
    try:
        return attrgetter(path)(module)
    except AttributeError:
        raise ModelError(f"`{printable(name)}` has no `{printable(path)}`") from None


def _stop(name: str, path: str, *_: object) -> None:
    module = sys.modules[name]
    # A script may define its models after a training.
    with suppress(AttributeError):
        attrgetter(path)(module)
        raise _TrainsError(module)


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
        reason = f"{type(error).__name__}: {reason_of(error)[:200]}"
    sys.stderr.write(f"cannot build it on the meta device ({reason}): building it with values\n")
    return build()
