"""Names that changed between two runs: a file with lines `old: new`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from gradsurgeon import source
from gradsurgeon.errors import Place, Problem, RuleFileError, did_you_mean

_HINT = "write one line `old: new` for each name that changed, such as `h.0.attn: blocks.0.attention`"

Renamed = str | os.PathLike[str] | Mapping[str, str] | None


def check(
    renamed: Renamed, old: Iterable[str], new: Iterable[str]
) -> Mapping[str, str]:
    """Return the new name of each old name or prefix.

    Args:
        renamed: the file, or its content.
        old: the names of the reference.
        new: the names of the run.

    Raises:
        RuleFileError: the file is no such mapping, or has names that the runs lack.
    """
    if renamed is None:
        return {}
    if isinstance(renamed, Mapping):
        document = source.parse("", "the names passed")
        data: object = dict(renamed)
    else:
        document = source.read(Path(renamed))
        data = document.data
    if document.problems and not isinstance(renamed, Mapping):
        raise RuleFileError(document.problems)
    if not isinstance(data, dict):
        _refuse(document.place(()), "the file holds no names", _HINT)
    known = (("reference", sorted(old)), ("run", sorted(new)))
    for name, value in data.items():
        place = document.key_place((name,))
        if not isinstance(value, str) or not value:
            _refuse(document.place((name,)), f"the new name of `{name}` is no text", _HINT)
        for (where, names), one in zip(known, (name, value), strict=True):
            if not any(is_inside(each, one) for each in names):
                hint = did_you_mean(one, {*names, *(each.rpartition(".")[0] for each in names)})
                message = f"the {where} has no name that is `{one}` or begins with `{one}.`"
                _refuse(place, message, hint or f"its names are such as `{names[0]}`")
    return data


def _refuse(place: Place, message: str, hint: str) -> None:
    raise RuleFileError([Problem(place, "bad-map", message, hint)])


def is_inside(name: str, prefix: str) -> bool:
    return f"{name}.".startswith(f"{prefix}.")


def renaming(names: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that replaces the longest known prefix of a name."""
    longest = sorted(names, key=len, reverse=True)

    def rename(name: str) -> str:
        for old in longest:
            if is_inside(name, old):
                return f"{names[old]}{name[len(old):]}"
        return name

    return rename
