"""Numbers and tables as the pages show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table: text to the left in the first column, numbers to the right."""
    line = "|".join(["---", *["--:"] * (len(head) - 1)])
    body = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return f"| {' | '.join(head)} |\n|{line}|\n{body}"


def number(value: float) -> str:
    """Return a number with three digits, as people read it."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def duration(micro: float) -> str:
    """Return a time in the unit that suits it."""
    if abs(micro) >= 1e6:
        return f"{number(micro / 1e6)} s"
    return f"{number(micro / 1e3)} ms" if abs(micro) >= 1e3 else f"{number(micro)} us"


def size(count: float) -> str:
    """Return a number of bytes in the unit that suits it."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= unit:
            return f"{number(count / unit)} {name}"
    return f"{count:.0f} B"


def spread(numbers: Any) -> str:
    """Return a median with its quartiles."""
    return f"{number(numbers['median'])} ({number(numbers['low'])} to {number(numbers['high'])})"


def filled(text: str, begin: str, made: str, end: str, lacking: str) -> str:
    """Return a page with what stands between two lines replaced.

    Raises:
        ValueError: it lacks one of them, which ``lacking`` says.
    """
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(lacking)
    return f"{before}{begin}\n{made}\n{end}{after}"
