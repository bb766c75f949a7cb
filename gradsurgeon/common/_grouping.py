"""Things with something in common, together."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Thing = TypeVar("Thing")
Key = TypeVar("Key")


def grouped(things: Iterable[Thing], key: Callable[[Thing], Key]) -> dict[Key, list[Thing]]:
    """Return the things of each key, in the order in which they come.

    >>> grouped(["a.w", "b.w", "a.b"], lambda name: name[0])
    {'a': ['a.w', 'a.b'], 'b': ['b.w']}
    """
    groups: dict[Key, list[Thing]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return groups


def names_of(things: Iterable[Any]) -> list[str]:
    return [thing.name for thing in things]
