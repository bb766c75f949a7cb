"""The result of a suggestion. Needs no numpy."""

from typing import NamedTuple

# A suggestion begins with this. No other file is written over.
MARK = "# Suggested by `gradsurgeon suggest`"


class Suggestion(NamedTuple):
    """A rule file, its summary in a few words, and the findings that a reader must not overlook."""

    text: str
    summary: str
    findings: list[str]
