"""Where the files of a rule set come from: the disk, or something that is read like it."""

from __future__ import annotations

import pathlib
from typing import Protocol

from gradsurgeon import packs, source
from gradsurgeon.schema._located import Located


class Files(Protocol):
    """A tree of files in which `include` finds its own: those of a commit do not read the disk."""

    def itself(self, document: Located, folder: pathlib.Path) -> packs.Included:
        """Return a document that stands in ``folder`` the way an entry would name it."""

    def find(self, entry: str, folder: pathlib.Path) -> packs.Included:
        """Return the file that a relative entry of a file in ``folder`` names.

        Raises:
            IncludeError: it names nothing, or something that must not be read.
        """

    def read(self, target: packs.Included) -> Located:
        """Read what `find` has found.

        Raises:
            RuleFileError: it cannot be read.
        """


class _Disk:
    def itself(self, document: Located, folder: pathlib.Path) -> packs.Included:
        path = folder / pathlib.Path(document.file).name
        return packs.Included(document.file, path.resolve(), folder)

    def find(self, entry: str, folder: pathlib.Path) -> packs.Included:
        return packs.file_on_disk(entry, folder)

    def read(self, target: packs.Included) -> Located:
        return source.read(target.path, target.name)


DISK: Files = _Disk()
