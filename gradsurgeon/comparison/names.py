"""Names that changed between two runs: a file with lines `old: new`."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import NoReturn

from gradsurgeon import source
from gradsurgeon.comparison.order import is_inside
from gradsurgeon.errors import Place, Problem, RuleFileError, did_you_mean

Renamed = str | os.PathLike[str] | Mapping[str, str]
_HINT = (
    "write one line `old: new` for each name that changed, such as `h.0.attn: blocks.0.attention`"
)


def read(renamed: Renamed, old: Collection[str], new: Collection[str]) -> Mapping[str, str]:
    """Return the new name of each old name or prefix.

    Args:
        renamed: the file, or its content.
        old: the names of the reference.
        new: the names of the run.

    Raises:
        RuleFileError: the file is no such mapping, or has names that the runs lack.
    """
    if isinstance(renamed, Mapping):
        document, data = source.parse("", "<names>"), renamed
    else:
        document = source.read(renamed)
        data = document.data if isinstance(document.data, dict) else {}
        if document.problems:
            raise RuleFileError(document.problems)
    if not data:
        _refuse(document.place(()), "the file has no names", _HINT)
    for name, value in dict[str, object](data).items():
        if not isinstance(value, str) or not value:
            _refuse(document.place((name,)), f"the new name of `{name}` is no text", _HINT)
        for where, known, one in (("reference", old, name), ("run", new, value)):
            if not any(is_inside(each, one) for each in known):
                hint = did_you_mean(one, {*known, *(each.rpartition(".")[0] for each in known)})
                message = f"the {where} has no name that is `{one}`, or begins with `{one}.`"
                _refuse(document.key_place((name,)), message, hint)
    return data


def _refuse(place: Place, message: str, hint: str) -> NoReturn:
    raise RuleFileError([Problem(place, "bad-map", message, hint)])


def renaming(names: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that replaces the longest known prefix of a name."""

    def rename(name: str) -> str:
        old = max((old for old in names if is_inside(name, old)), key=len, default="")
        return f"{names[old]}{name[len(old) :]}" if old else name

    return rename
