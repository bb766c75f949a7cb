"""``# gradsurgeon: ignore[check-id]``: comments that suppress problems, and those that suppress none."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from gradsurgeon.errors import Place, Problem, did_you_mean
from gradsurgeon.schema import Located

CHECK = "unused-suppression"
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_HASH = re.compile(r"(?<!\S)#")
_COMMENT = re.compile(r"#\s*gradsurgeon:\s*ignore\b(?:\[([^\]\n]*)\])?")


@dataclass(slots=True)
class Suppression:
    """One name in one comment.

    Attributes:
        check: the name.
        place: where it is written.
        lines: first and last line for whose problems it counts.
        used: whether there was one.
    """

    check: str
    place: Place
    lines: tuple[int, int]
    used: bool = field(default=False, compare=False)


class Suppressions:
    """All suppressions of some files."""

    def __init__(self, sources: Sequence[Located]) -> None:
        self._by_check: dict[tuple[str, str], list[Suppression]] = {}
        for source in sources:
            if "gradsurgeon:" in source.text:
                for one in _read(source):
                    self._by_check.setdefault((source.file, one.check), []).append(one)

    def take(self, problem: Problem) -> bool:
        """Tell whether a problem is suppressed, and remember by what."""
        if problem.severity == "error":
            return False
        there = self._by_check.get((problem.place.file, problem.check), [])
        hits = [one for one in there if one.lines[0] <= problem.place.line <= one.lines[1]]
        for one in hits:
            one.used = True
        return bool(hits)

    def unused(self, severities: Mapping[str, str], *, checked: bool) -> Iterator[Problem]:
        """Yield a problem for each name that suppresses nothing.

        Args:
            severities: of every check that there is.
            checked: all checks have looked: otherwise nothing is known of those that could not.
        """
        for one in (one for group in self._by_check.values() for one in group):
            why = _why(one, severities, unused=checked and not one.used)
            if why:
                yield Problem(one.place, CHECK, *why, severity="warning")


def _why(
    one: Suppression, severities: Mapping[str, str], *, unused: bool
) -> tuple[str, str] | None:
    """Return message and hint on what is wrong with a suppression, if anything is."""
    shown = one.check[:60]
    if not one.check:
        return "the comment names no check", "write `# gradsurgeon: ignore[check-id]`"
    if one.check not in severities:
        hint = did_you_mean(one.check, severities) or "`gradsurgeon explain` lists all checks"
        return f"there is no check `{shown}`", hint
    if severities[one.check] == "error" or one.check == CHECK:
        why = "" if one.check == CHECK else ": it is an error"
        return f"`{shown}` cannot be suppressed{why}", "remove the comment"
    if unused:
        return f"`{shown}` finds nothing here that could be suppressed", "remove the comment"
    return None


def _read(source: Located) -> Iterator[Suppression]:
    lines = [line.removesuffix("\r") for line in source.text.removeprefix("\ufeff").split("\n")]
    inside = _scalars(source)
    if inside is None:
        return
    rules = _rules(source)
    below = _below(lines)
    for number, line in enumerate(lines, 1):
        if "gradsurgeon:" not in line:
            continue
        begin = _comment(line, number, inside)
        found = None if begin is None else _COMMENT.search(line, begin)
        if found is None or begin is None:
            continue
        alone = not line[:begin].strip()
        scope = (below[number],) * 2 if alone else rules.get(number, (number, number))
        for at, name in _names(found):
            yield Suppression(
                name, Place(source.file, number, at + 1, line, max(1, len(name))), scope
            )


def _names(found: re.Match[str]) -> Iterator[tuple[int, str]]:
    """Yield column and text of every name between the brackets; one empty name where there is none."""
    if found[1] is None or not found[1].strip(" ,\t"):
        yield found.start(), ""
        return
    for part in re.finditer(r"[^,\s][^,]*", found[1]):
        yield found.start(1) + part.start(), part[0].rstrip()


def _below(lines: Sequence[str]) -> list[int]:
    """Return the line that a comment of its own stands above, by line, other comments left aside."""
    below = [0, *range(2, len(lines) + 2)]
    for number in range(len(lines) - 1, 0, -1):
        if lines[number].lstrip().startswith("#"):
            below[number] = below[number + 1]
    return below


def _comment(line: str, number: int, inside: Mapping[int, list[tuple[int, int]]]) -> int | None:
    """Return where the comment of a line begins, ``None`` where it has none."""
    scalars = inside.get(number, [])
    for found in _HASH.finditer(line):
        before = bisect.bisect_right(scalars, found.start(), key=lambda scalar: scalar[0])
        if not before or scalars[before - 1][1] <= found.start():
            return found.start()
    return None


def _scalars(source: Located) -> dict[int, list[tuple[int, int]]] | None:
    """Return the columns inside quoted and block scalars, by line; ``None`` where it is no YAML."""
    found: dict[int, list[tuple[int, int]]] = {}
    try:
        for token in yaml.scan(source.text.removeprefix("\ufeff"), Loader=_LOADER):
            if isinstance(token, yaml.ScalarToken) and token.style:
                start, end = token.start_mark, token.end_mark
                for line in range(start.line, end.line + 1):
                    low = start.column if line == start.line else 0
                    high = end.column if line == end.line else 1 << 30
                    # The line of a block's indicator ends in what may be a comment.
                    if not (token.style in "|>" and line == start.line):
                        found.setdefault(line + 1, []).append((low, high))
    except yaml.YAMLError:
        return None
    return found


def _rules(source: Located) -> dict[int, tuple[int, int]]:
    """Return the lines of each rule by the line of its id."""
    data: Any = source.data
    entries = data.get("rules") if isinstance(data, dict) else None
    if not isinstance(entries, list):
        return {}
    ids: list[tuple[int, int]] = []
    for index, entry in enumerate(entries):
        if isinstance(entry, dict) and entry:
            place = source.key_place(("rules", index, "id"))
            ids.append((source.missing_place(("rules", index)).line, place.line))
    starts = sorted(start for start, _ in ids)
    last = source.text.count("\n") + 1
    found = {}
    for start, line in ids:
        after = bisect.bisect_right(starts, start)
        found[line] = (start, starts[after] - 1 if after < len(starts) else last)
    return found
