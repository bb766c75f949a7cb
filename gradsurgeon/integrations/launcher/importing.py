"""Wait for a script to import torch. Until then the launcher imports next to nothing."""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

from gradsurgeon.common import _live
from gradsurgeon.integrations.launcher import messages
from gradsurgeon.integrations.launcher.settings import Settings, from_environment

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:
    # The import system needs no base class, and these classes import compression, random numbers and more.
    Loader = MetaPathFinder = object


def start() -> None:
    """Put rules on this process once it imports torch, if the environment holds rules."""
    settings = from_environment(os.environ)
    if settings is None:
        return
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
            spec.loader = _Loader(spec.loader, self._done)
        return spec

    def _done(self) -> None:
        self._imported()
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader(Loader):
    def __init__(self, loader: Loader, executed: Callable[[], None]) -> None:
        self._loader = loader
        self._executed = executed

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Put back only our own entries: another loader may have wrapped this one.
        if module.__spec__ is not None and module.__spec__.loader is self:
            module.__spec__.loader = self._loader
        if module.__loader__ is self:
            module.__loader__ = self._loader
        # Nothing that torch and gradsurgeon build here ever becomes garbage.
        with _live.uncollected():
            self._loader.exec_module(module)
            self._executed()
