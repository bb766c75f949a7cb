"""Plain data that knows where each of its values was written."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass
from typing import Protocol

from gradsurgeon.errors import Place, Problem
from gradsurgeon.source import Path


class Located(Protocol):
    """Plain data that knows where each of its values was written; `source.Document` is one."""

    @property
    def file(self) -> str:
        """Name for messages."""

    @property
    def text(self) -> str:
        """The whole text, empty where there is none."""

    @property
    def data(self) -> object:
        """Plain values."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What was wrong with reading it."""

    @property
    def folder(self) -> pathlib.Path | None:
        """Where the file stands, ``None`` where there is no file."""

    def place(self, path: Path) -> Place:
        """Return the place of a value."""

    def key_place(self, path: Path) -> Place:
        """Return the place of a key."""

    def missing_place(self, path: Path) -> Place:
        """Return where to point for a key that the mapping at ``path`` lacks."""


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
