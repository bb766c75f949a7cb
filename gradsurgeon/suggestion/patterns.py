"""Patterns that select the parameters of a group and no others."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise

from gradsurgeon._expressions import PatternError
from gradsurgeon.errors import RecordError, printable
from gradsurgeon.match import compile_pattern
from gradsurgeon.planning.table import fold_names
from gradsurgeon.suggestion.groups import NUMBER, template_of


def patterns_of(names: Collection[str], known: Mapping[str, str]) -> list[str]:
    """Return a few patterns that select these parameters and no others.

    Args:
        names: names of the parameters.
        known: the canonical name of each parameter of the model, by each of its names.
    """
    left, chosen = set(names), list[str]()
    for candidates in (_wide, _ranges, _single):
        matched = {text: _matched(text, known) for text in candidates(sorted(left))}
        exact = {text: found for text, found in matched.items() if found <= set(names)}
        while exact and left:
            # `max` takes the first of several that select equally many: the shortest of its sort.
            text = max(exact, key=lambda text: len(exact[text] & left))
            if not exact[text] & left:
                break
            chosen.append(text)
            left -= exact[text]
    if left:
        raise RecordError(f"{printable(min(left)[:80])}...: no pattern can hold this name")
    return chosen


def _matched(text: str, known: Mapping[str, str]) -> set[str]:
    try:
        pattern = compile_pattern(text)
    except PatternError:
        return set()
    return {known[name] for name in filter(pattern.regex.fullmatch, known)}


def _wide(names: Collection[str]) -> Iterator[str]:
    """Yield a star, the names with stars for numbers, and their ends and beginnings."""
    many = Counter(map(template_of, names))
    # A single name keeps its numbers.
    texts = dict.fromkeys(text if many[text := template_of(name)] > 1 else name for name in names)
    yield from ("*", *texts)
    for parts in (text.split(".") for text in texts):
        yield from (f"*.{'.'.join(parts[start:])}" for start in range(len(parts) - 1, 0, -1))
        yield from (f"{'.'.join(parts[:end])}.*" for end in range(1, len(parts)))


def _ranges(names: Collection[str]) -> Iterator[str]:
    """Yield the names with ranges of numbers: first the largest ranges, then ranges without a gap."""
    yield from fold_names(names)
    runs: list[list[str]] = []
    numbered = sorted(
        (template_of(name), [*map(int, NUMBER.findall(name))], name) for name in names
    )
    for before, (template, numbers, name) in pairwise([("", [0], ""), *numbered]):
        steps = template == before[0] and [
            b - a for a, b in zip(before[1], numbers, strict=True) if a != b
        ]
        if steps != [1]:
            runs.append([])
        runs[-1].append(name)
    for run in runs:
        yield from fold_names(run)


def _single(names: Collection[str]) -> Iterator[str]:
    for name in names:
        yield from (name, f"re:{re.escape(name)}")
