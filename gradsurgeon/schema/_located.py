"""Where rules are written: a file, plain Python data, and the tree in which `include` finds its files."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from gradsurgeon import packs, source
from gradsurgeon.errors import Place, Problem
from gradsurgeon.source import Document, Path


@dataclass(frozen=True)
class Built:
    """Rules given as plain Python data: the place of a value is its path."""

    data: object
    file: str = "<dict>"
    text: str = ""
    problems: tuple[Problem, ...] = ()
    folder: pathlib.Path | None = None

    def place(self, path: Path) -> Place:
        """Return the path, such as ``<dict> rules[2].min``, as a place without a line."""
        steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in path]
        return Place(f"{self.file} {''.join(steps).lstrip('.')}".strip(), 0, 0)

    key_place = place
    missing_place = place


# Plain data that knows where each of its values was written.
Located: TypeAlias = Document | Built


class Files(Protocol):
    """A tree of files in which `include` finds its own: those of a commit do not read the disk."""

    def itself(self, document: Located, folder: pathlib.Path) -> packs.Included:
        """Return a document that stands in ``folder`` the way an entry would name it."""

    def find(self, entry: str, folder: pathlib.Path) -> packs.Included:
        """Return the file that a relative entry of a file in ``folder`` names, or raise `IncludeError`."""

    def read(self, target: packs.Included) -> Located:
        """Read what `find` has found, or raise `RuleFileError`."""


class _Disk:
    def itself(self, document: Located, folder: pathlib.Path) -> packs.Included:
        path = folder / pathlib.Path(document.file).name
        return packs.Included(document.file, path.resolve(), folder)

    def find(self, entry: str, folder: pathlib.Path) -> packs.Included:
        return packs.file_on_disk(entry, folder)

    def read(self, target: packs.Included) -> Located:
        return source.read(target.path, target.name)


DISK: Files = _Disk()
