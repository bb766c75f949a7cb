"""The names that a person asks for, as names, aliases or patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from gradsurgeon.match import compile_pattern, select, suggest

Name = str | Sequence[str]


def matching(wanted: Name, names: Iterable[str], aliases: Mapping[str, str]) -> list[str]:
    """Return the names that are wanted, by name, alias or pattern, in the order of the model.

    Raises:
        KeyError: a pattern matches nothing; the nearest names are given.
    """
    canonical = {name: name for name in names}
    known = {alias: name for alias, name in aliases.items() if name in canonical} | canonical
    found: set[str] = set()
    for text in [wanted] if isinstance(wanted, str) else wanted:
        # A name may read as a pattern: `lstm[0]` is a tensor of a module that returns several.
        every = list(known)
        places = [every.index(text)] if text in known else select([compile_pattern(text)], every)
        if not places:
            raise KeyError(f'"{text}" is no name of what was recorded; {suggest(text, every)}')
        found.update(known[every[place]] for place in places)
    return [name for name in canonical if name in found]


def shortened(name: str, most: int) -> str:
    """Return a name in at most so many characters, without parts between dots; numbers stay, as they tell layers apart."""
    parts, short = name.split("."), name
    for place in range(len(parts) - 1):
        if len(short) <= most:
            break
        if not parts[place].isdigit():
            parts[place] = "…"
            short = re.sub(r"…(\.…)+", "…", ".".join(parts))
    end = (most - 1) // 2
    return short if len(short) <= most else f"{short[: most - 1 - end]}…{short[len(short) - end :]}"
