"""The fields of a manifest: what each may hold, and every value that it may not, with its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gradsurgeon.actions import found
from gradsurgeon.errors import ManifestError, Problem, did_you_mean
from gradsurgeon.schema import Built

Path = tuple[str | int, ...]

_MAX_PROBLEMS = 200
_MAX_NAME, _MAX_SIZE, _MAX_NDIM = 1000, 1 << 63, 64


@dataclass(frozen=True, slots=True)
class Field:
    """What a key may hold.

    Attributes:
        expected: in words.
        fits: tells whether a value, or each item of a list, will do.
        many: it is a list of such values.
        nullable: nothing will do as well.
        optional: the key may be left out.
        longest: how many items a list may have.
    """

    expected: str
    fits: Callable[[object], bool]
    many: bool = False
    nullable: bool = False
    optional: bool = False
    longest: int = 1_000_000


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_NAME


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_SIZE


def _is_dtype(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[a-z][a-z0-9_]{0,40}", value) is not None


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"sha256:[0-9a-f]{64}", value) is not None


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_sharding(value: object) -> bool:
    return value in ("fully_shard", "FullyShardedDataParallel", "tensor parallel")


_A_NAME = f"a text of 1 to {_MAX_NAME} characters"
NAME = Field(_A_NAME, _is_name)
NAMES = Field(_A_NAME, _is_name, many=True)
SHAPE = Field("a whole number, 0 or more", _is_size, many=True, nullable=True, longest=_MAX_NDIM)
DTYPE = Field("a dtype, such as float32", _is_dtype)
FLAG = Field("true or false", _is_flag)
HASH = Field("`sha256:` and 64 hexadecimal digits", _is_hash)
SHARDING = Field("the name of a way to shard", _is_sharding, optional=True)
SOME_NAMES = Field(_A_NAME, _is_name, many=True, optional=True)
SOME_FLAG = Field("true or false", _is_flag, optional=True)


class Checked:
    """Collects what is wrong with one file."""

    def __init__(self, file: str) -> None:
        self._source = Built(None, file=file)
        self.problems: list[Problem] = []

    def note(self, path: Path, message: str, hint: str = "") -> None:
        """Note a problem of the value at ``path``.

        Raises:
            ManifestError: there have been so many that nobody would read on.
        """
        place = self._source.place(
            tuple(str(step)[:60] if isinstance(step, str) else step for step in path)
        )
        self.problems.append(Problem(place, "bad-manifest", message, hint))
        if len(self.problems) == _MAX_PROBLEMS:
            more = f"over {_MAX_PROBLEMS} problems, not read on"
            self.problems.append(Problem(self._source.place(()), "too-large", more))
            raise ManifestError(self.problems)

    def done(self) -> None:
        """Raise `ManifestError` if anything was wrong."""
        if self.problems:
            raise ManifestError(self.problems)

    def fields(self, data: object, path: Path, known: Mapping[str, Field]) -> dict[str, Any] | None:
        """Return the values of an object, lists as tuples; ``None`` where anything is wrong with it."""
        before = len(self.problems)
        if not isinstance(data, dict):
            keys = ", ".join(f"`{key}`" for key, one in known.items() if not one.optional)
            self.note(path, f"expected an object with {keys}, found {found(data)}")
            return None
        for key in getattr(data, "repeated", ()):
            self.note((*path, key), f"the key `{key[:60]}` stands twice", "remove one of the two")
        for key in data:
            if key not in known:
                missing = [one for one in known if one not in data]
                hint = did_you_mean(str(key)[:60], missing) or f"known: {', '.join(known)}"
                self.note((*path, str(key)), f"unknown key `{str(key)[:60]}`", hint)
        values: dict[str, Any] = {}
        for key, field in known.items():
            if key in data:
                values[key] = self._value(data[key], (*path, key), field)
            elif not field.optional:
                self.note(
                    path, f"missing key `{key}`", "write the file again: `gradsurgeon params`"
                )
        return values if len(self.problems) == before else None

    def _value(self, value: object, path: Path, field: Field) -> object:
        if value is None and field.nullable:
            return None
        if not field.many:
            if not field.fits(value):
                self.note(path, f"expected {field.expected}, found {_shown(value)}")
            return value
        if not isinstance(value, list | tuple):
            self.note(path, f"expected a list, found {_shown(value)}")
            return ()
        if len(value) > field.longest:
            self.note(path, f"{len(value)} items, at most {field.longest} are read")
        for index, item in enumerate(value[: field.longest]):
            if not field.fits(item):
                self.note((*path, index), f"expected {field.expected}, found {_shown(item)}")
        return tuple(value)

    def items(self, data: object, path: Path) -> list[Any]:
        """Return a list, an empty one where there is none."""
        if isinstance(data, list | tuple):
            return list(data)
        self.note(path, f"expected a list, found {_shown(data)}")
        return []

    def distinct(self, names: Iterable[tuple[Path, str]], noun: str) -> None:
        """Note every name that stands twice."""
        first: dict[str, Path] = {}
        for path, name in names:
            where = first.setdefault(name, path)
            if where is not path:
                at = str(self._source.place(where)).removeprefix(self._source.file).strip()
                message = f"the {noun} `{name[:60]}` stands twice, first at {at}"
                self.note(path, message, "names of a model are unique: write the file again")


def _shown(value: object) -> str:
    text = found(value)
    return text if len(text) <= 80 else f"{text[:77]}..."  # noqa: PLR2004 # one line
