"""``# gradsurgeon: ignore[check-id]``: comments that suppress problems of their line, and the useless ones."""

import re
from collections.abc import Iterator, Mapping, Sequence

from gradsurgeon.errors import Place, Problem, did_you_mean
from gradsurgeon.schema import Located

CHECK = "unused-suppression"
_COMMENT = re.compile(r"(?<!\S)#\s*gradsurgeon:\s*ignore\b(?:\[([^\]\n]*)\])?")


class Suppressions:
    """The comments of some files. Each suppresses the named problems that are shown at its own line."""

    def __init__(self, sources: Sequence[Located]) -> None:
        # The places of each name in a comment, by file, line and name.
        self._places: dict[tuple[str, int, str], list[Place]] = {}
        self._used: set[tuple[str, int, str]] = set()
        for source in sources:
            for check, place in _read(source):
                self._places.setdefault((place.file, place.line, check), []).append(place)

    def take(self, problem: Problem) -> bool:
        """Tell whether a comment suppresses a problem, and mark the comment as used."""
        key = (problem.place.file, problem.place.line, problem.check)
        if problem.severity == "error" or key not in self._places:
            return False
        self._used.add(key)
        return True

    def unused(self, severities: Mapping[str, str], *, checked: bool) -> Iterator[Problem]:
        """Yield a problem for each name in a comment that suppresses nothing.

        If the rules were not ``checked``, only wrong names are problems.
        """
        for key, places in self._places.items():
            unused = checked and key not in self._used
            if reason := _why_useless(key[2], severities, unused=unused):
                yield from (Problem(one, CHECK, *reason, severity="warning") for one in places)


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
        hint = "remove the comment, or write it at the end of the line of the problem"
        return f"`{shown}` finds nothing on this line", hint
    return None


def _read(source: Located) -> Iterator[tuple[str, Place]]:
    """Yield each name in a comment with its place; an empty name if a comment has none."""
    lines = source.text.removeprefix("\ufeff").split("\n")
    for number, line in enumerate(lines, 1):
        if comment := _COMMENT.search(line):
            parts = list(re.finditer(r"[^,\s][^,]*", comment[1] or ""))
            names = [(comment.start(1) + part.start(), part[0].rstrip()) for part in parts]
            for column, name in names or [(comment.start(), "")]:
                text = line.removesuffix("\r")
                yield name, Place(source.file, number, column + 1, text, max(1, len(name)))
