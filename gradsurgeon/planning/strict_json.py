"""JSON from strangers: bounded in size, and checked by pydantic."""

import os
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from gradsurgeon.actions import described
from gradsurgeon.errors import ManifestError, Place, Problem
from gradsurgeon.schema import Built

# A model of 100,000 tensors takes 40 MB.
MAX_BYTES = 100_000_000
# What one byte of JSON can cost in memory is bounded by the values: these take half a gigabyte.
_MAX_VALUES = 6_000_000
_MAX_PROBLEMS = 100
_KINDS = "names come from params.json, *.safetensors, or *.index.json beside the weights"

WRITE_AGAIN = "write the file again: `gradsurgeon params`"

_Value = TypeVar("_Value")


def refuse(file: str, message: str, hint: str = "", check: str = "bad-manifest") -> NoReturn:
    raise ManifestError([Problem(Place(file, 0, 0), check, message, hint)])


def unreadable(file: str, error: Exception) -> NoReturn:
    cause = getattr(error, "strerror", None) or str(error)
    refuse(file, f"cannot read the file: {cause}", _KINDS, "unreadable-file")


def read(path: str | os.PathLike[str]) -> object:
    file = os.fspath(path)
    try:
        with Path(file).open("rb") as stream:
            # One read with an end, whatever the path leads to.
            raw = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        unreadable(file, error)
    return parse(raw, file)


def parse(raw: bytes, file: str) -> object:
    if len(raw) > MAX_BYTES:
        refuse(file, f"more than {MAX_BYTES // 1_000_000} MB of JSON are not read", _KINDS)
    if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > _MAX_VALUES:
        refuse(file, f"more than {_MAX_VALUES:,} values are not read", _KINDS)
    try:
        return from_json(raw.removeprefix(b"\xef\xbb\xbf"), allow_inf_nan=False)
    except ValueError as error:
        refuse(file, f"not JSON: {error}", _KINDS)


def checked(kind: type[_Value], value: object, file: str) -> _Value:
    try:
        valid: _Value = TypeAdapter(kind).validate_python(value)
    except ValidationError as errors:
        if (count := errors.error_count()) > _MAX_PROBLEMS:
            refuse(file, f"{count} problems: this is no file of names", _KINDS)
        source = Built(None, file=file)
        raise ManifestError(
            [_problem(source, error) for error in errors.errors(include_url=False)]
        ) from None
    return valid


def _problem(source: Built, error: Any) -> Problem:
    path = tuple(step[:60] if isinstance(step, str) else step for step in error["loc"])
    kind, hint = error["type"], WRITE_AGAIN
    if kind == "missing":
        path, message = path[:-1], f"missing key `{path[-1]}`"
    elif kind == "unexpected_keyword_argument":
        message = f"unknown key `{path[-1]}`"
    else:
        message, hint = error["msg"].replace("Input should be", "expected", 1), ""
        message = message.replace("valid tuple", "list")
        message = f"{message[:1].lower()}{message[1:]}, found {described(error['input'])}"
    return Problem(source.place(path), "bad-manifest", message, hint)
