"""A script imports torch as it does alone, whatever other finders wait for the same import."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gradsurgeon.integrations.launcher.importing import _Finder

NAME = "waited_for"


class OtherFinder:
    """The same for a module of the tests."""

    def __init__(self, told: list[str]) -> None:
        self._told = told
        self._busy = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        del path, target
        if name != NAME or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy = False
        assert spec is not None
        spec.loader = OtherLoader(spec.loader, self._told)  # type: ignore[assignment]
        return spec


class OtherLoader:
    def __init__(self, loader: Any, told: list[str]) -> None:
        self._loader = loader
        self._told = told

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: Any) -> None:
        # As an import hook does that leaves what it has not put there.
        if module.__loader__ is self:
            module.__loader__ = self._loader
        if module.__spec__.loader is self:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._told.append("other")


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return what is noted of an import, and let a module be there to be imported."""
    found: list[str] = []
    (tmp_path / f"{NAME}.py").write_text("import told\ntold.found.append('executed')\n")
    note = ModuleType("told")
    note.found = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "told", note)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    yield found
    sys.modules.pop(NAME, None)


def wait(told: list[str], *, before: bool) -> _Finder:
    """Put the launcher's finder and the other one at work."""
    finder = _Finder(NAME, lambda: told.append("launcher"))
    finders: list[Any] = [OtherFinder(told), finder]
    for one in finders if before else reversed(finders):
        sys.meta_path.insert(0, one)
    return finder


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_another_finder_that_waits_for_the_module_is_told_once(
    told: list[str], *, before: bool
) -> None:
    finder = wait(told, before=before)
    module = importlib.import_module(NAME)
    assert told == (
        ["executed", "other", "launcher"] if before else ["executed", "launcher", "other"]
    )
    assert finder not in sys.meta_path
    assert module.__spec__ is not None
    assert type(module.__loader__) is type(module.__spec__.loader)
    assert type(module.__loader__).__name__ == "SourceFileLoader"


def test_a_spec_that_nobody_executes_tells_nobody(told: list[str]) -> None:
    wait(told, before=True)
    assert importlib.util.find_spec(NAME) is not None
    assert told == []
    importlib.import_module(NAME)
    assert told == ["executed", "other", "launcher"]
