"""``# gradsurgeon: ignore[check-id]``: comments that suppress problems, and the useless ones among them."""

import bisect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradsurgeon.errors import Place, Problem, did_you_mean
from gradsurgeon.schema import Located

CHECK = "unused-suppression"
_COMMENT = re.compile(r"(?<!\S)#\s*gradsurgeon:\s*ignore\b(?:\[([^\]\n]*)\])?")


@dataclass(slots=True)
class _Suppression:
    check: str
    place: Place
    lines: tuple[int, int]  # the first and the last line that it applies to
    used: bool = field(default=False, compare=False)


class Suppressions:
    def __init__(self, sources: Sequence[Located]) -> None:
        self._by_check: dict[tuple[str, str], list[_Suppression]] = {}
        for source in sources:
            for suppression in _read(source):
                key = (source.file, suppression.check)
                self._by_check.setdefault(key, []).append(suppression)

    def take(self, problem: Problem) -> bool:
        """Tell whether a comment suppresses a problem, and mark the comment as used."""
        if problem.severity == "error":
            return False
        suppressed = False
        for suppression in self._by_check.get((problem.place.file, problem.check), []):
            first, last = suppression.lines
            if first <= problem.place.line <= last:
                suppression.used = suppressed = True
        return suppressed

    def unused(self, severities: Mapping[str, str], *, checked: bool) -> Iterator[Problem]:
        """Yield a problem for each name in a comment that suppresses nothing.

        If the rules were not ``checked``, only wrong names are problems.
        """
        for group in self._by_check.values():
            for suppression in group:
                unused = checked and not suppression.used
                if reason := _why_useless(suppression.check, severities, unused=unused):
                    yield Problem(suppression.place, CHECK, *reason, severity="warning")


def _why_useless(
    check: str, severities: Mapping[str, str], *, unused: bool
) -> tuple[str, str] | None:
    """Return message and hint for a useless suppression; ``None`` if it is fine."""
    shown = check[:60]
    if not check:
        return "the comment names no check", "write `# gradsurgeon: ignore[check-id]`"
    if check not in severities:
        hint = did_you_mean(check, severities) or "`gradsurgeon explain` lists all checks"
        return f"there is no check `{shown}`", hint
    if severities[check] == "error" or check == CHECK:
        reason = "" if check == CHECK else ": it is an error"
        return f"`{shown}` cannot be suppressed{reason}", "remove the comment"
    if unused:
        return f"`{shown}` finds nothing here to suppress", "remove the comment"
    return None


def _read(source: Located) -> Iterator[_Suppression]:
    lines = [line.removesuffix("\r") for line in source.text.removeprefix("\ufeff").split("\n")]
    rules, below = _lines_of_rules(source), _lines_below(lines)
    for number, line in enumerate(lines, 1):
        comment = _COMMENT.search(line)
        if comment is None:
            continue
        alone = line.lstrip().startswith("#")
        scope = (below[number],) * 2 if alone else rules.get(number, (number, number))
        for column, name in _names(comment):
            place = Place(source.file, number, column + 1, line, max(1, len(name)))
            yield _Suppression(name, place, scope)


def _names(comment: re.Match[str]) -> Iterator[tuple[int, str]]:
    """Yield column and text of each name in the brackets; one empty name if there are none."""
    if not (comment[1] or "").strip(" ,\t"):
        yield comment.start(), ""
        return
    for part in re.finditer(r"[^,\s][^,]*", comment[1]):
        yield comment.start(1) + part.start(), part[0].rstrip()


def _lines_below(lines: Sequence[str]) -> list[int]:
    """Return, for each line, the next line that is more than a comment."""
    below = [0, *range(2, len(lines) + 2)]
    for number in range(len(lines) - 1, 0, -1):
        if lines[number].lstrip().startswith("#"):
            below[number] = below[number + 1]
    return below


def _lines_of_rules(source: Located) -> dict[int, tuple[int, int]]:
    """Return the first and the last line of each rule, by the line of its id."""
    data: Any = source.data
    entries = data.get("rules") if isinstance(data, dict) else None
    if not isinstance(entries, list):
        return {}
    ids = [
        (source.missing_place(("rules", index)).line, source.key_place(("rules", index, "id")).line)
        for index, entry in enumerate(entries)
        if isinstance(entry, dict) and entry
    ]
    starts = sorted(start for start, _ in ids)
    ends = [*(start - 1 for start in starts), source.text.count("\n") + 1]
    return {line: (start, ends[bisect.bisect_right(starts, start)]) for start, line in ids}
