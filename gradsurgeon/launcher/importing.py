"""Waits for a script to import torch. Until then nothing has been paid for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

from gradsurgeon import _live
from gradsurgeon.launcher import exiting, idle
from gradsurgeon.launcher.settings import STRICT, Settings, from_environment, is_on

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:
    # The import system asks for no base class, and these would import compression, random numbers and more.
    Loader = MetaPathFinder = object


def start() -> None:
    """Arrange for the rules to be there once torch is, if the environment says so."""
    try:
        settings = from_environment(os.environ)
    except ValueError as error:
        idle.busy()
        say(str(error))
        if is_on(os.environ.get(STRICT, "")):
            os._exit(2)  # An exception is a fatal error here: no script has begun.
        return
    if settings is not None:
        chosen = settings
        exiting.start()
        idle.start()
        sys.meta_path.insert(0, _Finder("torch", lambda: _activate(chosen)))


def say(text: str) -> None:
    """Write a line to stderr, in the name of the program."""
    print(f"gradsurgeon: {text}", file=sys.stderr, flush=True)  # noqa: T201 # there is no other channel


def give_way(settings: Settings, error: BaseException) -> None:
    """Say in one line that the launcher cannot do its work; the script runs on, unless strict.

    Raises:
        SystemExit: with ``--strict``.
    """
    idle.busy()
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    say(f"the script runs on without rules: {reason}")
    if settings.strict:
        raise SystemExit(2) from None


def _activate(settings: Settings) -> None:
    idle.leave(idle.TORCH)
    # Only now: this imports the rest of the package, and torch is there already.
    try:
        from gradsurgeon.launcher.watch import activate  # noqa: PLC0415 # as said
    except Exception as error:  # noqa: BLE001 # a script must not die of its debugger
        give_way(settings, error)
    else:
        activate(settings)


class _Finder(MetaPathFinder):
    """Calls back once, when a module has been imported; then it is as if it had never been there."""

    def __init__(self, name: str, imported: Callable[[], None]) -> None:
        self._name = name
        self._imported = imported

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Find the module as all others would, and be told once it has been executed."""
        if fullname != self._name:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)):
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._done)
                return spec
        return None

    def _done(self) -> None:
        sys.meta_path.remove(self)
        self._imported()


class _Loader(Loader):
    """Executes a module by the loader it has, and steps out of the way."""

    def __init__(self, loader: Loader, executed: Callable[[], None]) -> None:
        self._loader = loader
        self._executed = executed

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as its loader does."""
        spec.loader = self._loader
        try:
            return self._loader.create_module(spec)
        finally:
            spec.loader = self

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, and tell."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        # Nothing of what torch and we build here will ever be garbage.
        with _live.uncollected():
            self._loader.exec_module(module)
            self._executed()
