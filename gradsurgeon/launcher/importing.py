"""Waits for a script to import torch. Until then nothing has been paid for."""

from __future__ import annotations

import importlib.util
import os
import sys
from _thread import get_ident
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

from gradsurgeon import _live
from gradsurgeon.launcher import launch_status
from gradsurgeon.launcher.settings import PREFIX, Settings, from_environment

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:
    # The import system asks for no base class, and these would import compression, random numbers and more.
    Loader = MetaPathFinder = object


def start() -> None:
    """Arrange for the rules to be there once torch is, if the environment says so."""
    settings = from_environment(os.environ)
    if settings is None:
        return
    # Another Python on the way, such as that of a tool, is left alone unless it may train something.
    ours = os.environ.get(PREFIX, sys.prefix)
    if sys.prefix == ours:
        launch_status.start()
        waiting = partial(_activate, settings)
    else:
        reason = (
            f"this is the Python of {sys.prefix}, gradsurgeon is installed in {ours}: install it in the "
            "former, and use that one"
        )
        waiting = partial(launch_status.run_without_rules, settings, reason)
    sys.meta_path.insert(0, _Finder("torch", waiting))


def _activate(settings: Settings) -> None:
    launch_status.note(launch_status.TORCH_IMPORTED)
    # Only now: this imports the rest of the package, and torch is there already.
    try:
        from gradsurgeon.launcher.training_detector import activate  # noqa: PLC0415 # as said
    except Exception as error:  # noqa: BLE001 # a script must not die of its debugger
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        launch_status.run_without_rules(settings, reason)
    else:
        activate(settings)


class _Finder(MetaPathFinder):
    """Calls back once a module has been imported, and then takes itself off the path."""

    def __init__(self, name: str, imported: Callable[[], None]) -> None:
        self._name = name
        self._imported = imported
        # Threads that search through this finder: to them it has nothing to add.
        self._searching: set[int] = set()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        del path, target
        thread = get_ident()
        if fullname != self._name or thread in self._searching:
            return None
        self._searching.add(thread)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.remove(thread)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._done)
        return spec

    def _done(self) -> None:
        self._imported()
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader(Loader):
    """Executes a module by the loader it has, and calls back."""

    def __init__(self, loader: Loader, executed: Callable[[], None]) -> None:
        self._loader = loader
        self._executed = executed

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Only what is ours is put back: another loader around this one may have put itself there.
        if module.__spec__ is not None and module.__spec__.loader is self:
            module.__spec__.loader = self._loader
        if module.__loader__ is self:
            module.__loader__ = self._loader
        # Nothing of what torch and we build here will ever be garbage.
        with _live.uncollected():
            self._loader.exec_module(module)
            self._executed()
