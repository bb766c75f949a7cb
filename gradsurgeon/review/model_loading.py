"""Load the model or module of ``--model`` and ``--import``: the only part of a review that runs user code."""

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from gradsurgeon.errors import ModelError, printable


def load_model(spec: str, *, with_values: bool = False) -> Any:
    """Return the model that a spec names.

    Args:
        spec: ``MODULE:NAME`` of the model, or of a function that builds it.
        with_values: build the model with values; otherwise on the meta device, which is enough for names.
    """
    with _stdout_to_stderr():
        torch = _torch()
        target = _target(spec)
        model = (
            target
            if isinstance(target, torch.nn.Module)
            else _build(torch, spec, target, with_values=with_values)
        )
    if not isinstance(model, torch.nn.Module):
        message = f"`{printable(spec)}` must give a torch.nn.Module, it gives"
        raise ModelError(f"{message} a value of the type {type(model).__name__}")
    return model


def import_module(name: str) -> Any:
    """Import a module of the user; Python also searches the current folder."""
    with _stdout_to_stderr():
        return _imported(name)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send the output of the user's code to stderr, also from compiled parts and child processes."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        # Python's own prints, too: buffered, they would appear after the rest.
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a build for another machine
        what = (
            "`--model` needs PyTorch (pip install 'gradsurgeon[torch]'), which cannot be imported"
        )
        raise ModelError(_failure(what, error)) from None


def _target(spec: str) -> Any:
    name, _, path = spec.partition(":")
    if not name or not path:
        example = "write MODULE:NAME, such as train.net:build"
        raise ModelError(f"`--model {printable(spec)}` names no model: {example}")
    target = _imported(name)
    for step in path.split("."):
        if not hasattr(target, step):
            raise ModelError(f"`{printable(name)}` has no `{printable(path)}`")
        target = getattr(target, step)
    return target


def _imported(name: str) -> Any:
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 # an entry of sys.path is a text
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 # user code raises anything
        what = f"cannot import `{printable(name)}`, looked for in {printable(here)} and on sys.path"
        raise ModelError(_failure(what, error)) from None


def _build(torch: Any, spec: str, build: Any, *, with_values: bool) -> Any:
    if not callable(build):
        kind = type(build).__name__
        message = f"`{printable(spec)}` is neither a module nor something that builds one"
        raise ModelError(f"{message}, but a value of the type {kind}")
    try:
        if with_values:
            return build()
        try:
            with torch.device("meta"):
                return build()
        except Exception as error:  # noqa: BLE001 # many errors are possible without values
            reason = f"{type(error).__name__}: {printable(str(error).partition(chr(10))[0][:200])}"
        sys.stderr.write(
            f"cannot build it on the meta device ({reason}): building it with values\n"
        )
        return build()
    except (Exception, SystemExit) as error:  # noqa: BLE001 # user code raises anything
        raise ModelError(_failure(f"cannot build `{printable(spec)}`", error)) from None


def _failure(what: str, error: BaseException) -> str:
    return f"{what}:\n{''.join(traceback.format_exception(error)).rstrip()}"
