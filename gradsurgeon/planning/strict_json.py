"""JSON from strangers: bounded in size, depth and number of problems, with every key once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from gradsurgeon.actions import described
from gradsurgeon.errors import ManifestError, Place, Problem
from gradsurgeon.schema import Built

# A model of 100,000 tensors takes 40 MB.
MAX_BYTES = 100_000_000
# What one byte of JSON can cost in memory is bounded by the values: these take half a gigabyte.
_MAX_VALUES = 6_000_000
_MAX_PROBLEMS = 200
_KINDS = "names come from params.json, *.safetensors, or *.index.json beside the weights"

_WRITE_AGAIN = "write the file again: `gradsurgeon params`"

_Path = tuple[str | int, ...]
_Value = TypeVar("_Value")


def refuse(file: str, message: str, hint: str = "", check: str = "bad-manifest") -> NoReturn:
    """Raise the one problem that keeps a file from being looked into."""
    raise ManifestError([Problem(Place(file, 0, 0), check, message, hint)])


def read(path: str | os.PathLike[str]) -> object:
    """Return the content of a JSON file.

    Raises:
        ManifestError: it cannot be read, is too large, is no JSON, or holds a key twice.
    """
    file = os.fspath(path)
    try:
        with Path(file).open("rb") as stream:
            # One read with an end, whatever the path leads to.
            raw = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        cause = getattr(error, "strerror", None) or str(error)
        refuse(file, f"cannot read the file: {cause}", _KINDS, "unreadable-file")
    return parse(raw, file)


def parse(raw: bytes, file: str) -> object:
    """Return what the text says; raises as `read` does."""
    if len(raw) > MAX_BYTES:
        refuse(file, f"more than {MAX_BYTES // 1_000_000} MB of JSON are not read", _KINDS)
    if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > _MAX_VALUES:
        refuse(file, f"more than {_MAX_VALUES:,} values are not read", _KINDS)
    try:
        text = raw.decode("utf-8-sig")
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        cause = "it is nested too deeply"
    except UnicodeDecodeError as error:
        cause = f"byte {error.start + 1} is not UTF-8 text"
    except json.JSONDecodeError as error:
        cause = f"{error.msg} at line {error.lineno}, column {error.colno}"
    except _RepeatedKeyError as error:
        refuse(file, str(error), "remove one of the two")
    except ValueError as error:  # a constant, or a number of thousands of digits
        cause = str(error).partition(";")[0]
    refuse(file, f"not JSON: {cause}", _KINDS)


class _RepeatedKeyError(ValueError):
    pass


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        first, value = pairs[0]
        where = (
            "" if first == key else f", in the object whose `{first[:60]}` is {described(value)}"
        )
        raise _RepeatedKeyError(f"the key `{key[:60]}` stands twice{where}")
    return values


def _constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no value of JSON")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


class ProblemList:
    """Collects what is wrong with the values of one file."""

    def __init__(self, file: str) -> None:
        self._source = Built(None, file=file)
        self._problems: list[Problem] = []

    def add(self, path: _Path, message: str, hint: str = "") -> None:
        """Add a problem of the value at ``path``.

        Raises:
            ManifestError: there have been so many that nobody would read on.
        """
        steps = tuple(step[:60] if isinstance(step, str) else step for step in path)
        self._problems.append(Problem(self._source.place(steps), "bad-manifest", message, hint))
        if len(self._problems) == _MAX_PROBLEMS:
            more = f"over {_MAX_PROBLEMS} problems, not read on"
            self._problems.append(Problem(self._source.place(()), "too-large", more))
            raise ManifestError(self._problems)

    def done(self) -> None:
        """Raise `ManifestError` if anything was wrong."""
        if self._problems:
            raise ManifestError(self._problems)

    def checked(self, kind: type[_Value], value: object, path: _Path) -> _Value | None:
        """Return ``value`` as a ``kind``; ``None`` where it is none, after adding the reasons."""
        try:
            adapter = _adapter(kind)  # type: ignore[arg-type] # a class has the hash of a class
            valid: _Value = adapter.validate_python(value)
        except ValidationError as errors:
            for error in errors.errors(include_url=False):
                self._add_error((*path, *error["loc"]), error)
            return None
        return valid

    def each(self, kind: type[_Value], values: object, path: _Path) -> dict[int, _Value]:
        """Return those items of a list that are of a ``kind``, by their index."""
        if not isinstance(values, list | tuple):
            self.add(path, f"expected a list, found {_shown(values)}")
            return {}
        items = (
            (place, self.checked(kind, one, (*path, place))) for place, one in enumerate(values)
        )
        return {place: item for place, item in items if item is not None}

    def _add_error(self, path: _Path, error: Any) -> None:
        kind, context, key = error["type"], error.get("ctx", {}), str(path[-1])[:60] if path else ""
        if kind == "missing":
            self.add(path[:-1], f"missing key `{key}`", _WRITE_AGAIN)
        elif kind == "unexpected_keyword_argument":
            self.add(path, f"unknown key `{key}`", _WRITE_AGAIN)
        elif kind == "too_long":
            length, most = context["actual_length"], context["max_length"]
            self.add(path, f"{length} items, at most {most} are read")
        else:
            message = error["msg"].replace("Input should be", "expected", 1)
            message = message.replace("valid tuple", "list")
            message = f"{message[:1].lower()}{message[1:]}, found {_shown(error['input'])}"
            self.add(path, message)

    def distinct(self, names: Iterable[tuple[_Path, str]], noun: str) -> None:
        """Add a problem for every name that stands twice."""
        first: dict[str, _Path] = {}
        for path, name in names:
            where = first.setdefault(name, path)
            if where is not path:
                at = str(self._source.place(where)).removeprefix(self._source.file).strip()
                message = f"the {noun} `{name[:60]}` stands twice, first at {at}"
                self.add(path, message, "names of a model are unique: write the file again")


def _shown(value: object) -> str:
    text = described(value)
    return text if len(text) <= 80 else f"{text[:77]}..."  # noqa: PLR2004 # one line
