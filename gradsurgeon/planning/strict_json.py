"""JSON from strangers: bounded in size and depth, and every key once. Needs the standard library only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NoReturn

from gradsurgeon.errors import ManifestError, Place, Problem

# A model of 100,000 tensors takes 40 MB.
MAX_BYTES = 100_000_000
# What one byte of JSON can cost in memory is bounded by the values: these take half a gigabyte.
_MAX_VALUES = 6_000_000
_KINDS = "names come from params.json, *.safetensors, or *.index.json beside the weights"


class Object(dict[str, object]):
    """An object of JSON that remembers the keys that stood in it more than once."""

    repeated: tuple[str, ...] = ()


def refuse(file: str, message: str, hint: str = "", check: str = "bad-manifest") -> NoReturn:
    """Raise the one problem that keeps a file from being looked into."""
    raise ManifestError([Problem(Place(file, 0, 0), check, message, hint)])


def read(path: str | os.PathLike[str]) -> object:
    """Return the content of a JSON file; objects are `Object`.

    Raises:
        ManifestError: it cannot be read, is too large, or is no JSON.
    """
    file = os.fspath(path)
    try:
        with Path(file).open("rb") as stream:
            # One read with an end, whatever the path leads to.
            raw = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        refuse(file, f"cannot read the file: {_cause(error)}", _KINDS, "unreadable-file")
    return parse(raw, file)


def parse(raw: bytes, file: str) -> object:
    """Return what the text says.

    Raises:
        ManifestError: it is too large, or no JSON.
    """
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
    except ValueError as error:  # a constant, or a number of thousands of digits
        cause = str(error).partition(";")[0]
    refuse(file, f"not JSON: {cause}", _KINDS)


def _object(pairs: list[tuple[str, object]]) -> Object:
    found = Object(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        again = [key for key, _ in pairs if key in seen or seen.add(key)]  # type: ignore[func-returns-value]
        found.repeated = tuple(dict.fromkeys(again))
    return found


def _constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no value of JSON")


def _cause(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
