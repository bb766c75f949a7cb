"""Wait for a script to import torch. Until then the launcher imports next to nothing."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

from gradsurgeon.common import _live
from gradsurgeon.integrations.launcher import messages, probing
from gradsurgeon.integrations.launcher.settings import Settings, from_environment

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:
    # The import system needs no base class, and this class imports compression, random numbers and more.
    MetaPathFinder = object


def start() -> None:
    """Put rules on this process once it imports torch, if the environment holds rules."""
    settings = from_environment(os.environ)
    if settings is None:
        return
    if settings.probe:
        probing.tell_writes()
    messages.start(dry_run=bool(settings.dry_run))
    sys.meta_path.insert(0, _Finder("torch", partial(_activate, settings)))


def _activate(settings: Settings) -> None:
    try:
        # Imported late, because this module imports the rest of the package, and torch.
        from gradsurgeon.integrations.launcher.training_detector import activate  # noqa: PLC0415
    except Exception as error:  # noqa: BLE001 # a script must not die of its debugger
        from gradsurgeon.errors import reason_of  # noqa: PLC0415 # as above

        messages.explain()
        messages.say(f"the script runs on without rules: {reason_of(error)}")
    else:
        activate(settings)


class _Finder(MetaPathFinder):
    """Calls back once a module is imported, and then removes itself from the path."""

    def __init__(self, name: str, imported: Callable[[], None]) -> None:
        self._name = name
        self._imported = imported
        # The search for other finders meets this one again.
        self._is_searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != self._name or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            # A method of this loader alone, until the loader executes the module.
            vars(spec.loader)["exec_module"] = partial(self._execute, spec.loader)
        return spec

    def _execute(self, loader: Loader, module: ModuleType) -> None:
        del vars(loader)["exec_module"]
        # Nothing that torch and gradsurgeon build here ever becomes garbage.
        with _live.uncollected():
            loader.exec_module(module)
            self._imported()
        if self in sys.meta_path:
            sys.meta_path.remove(self)
