"""The order in which the tensors of a step came about: forward, backward, gradients, update."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

# Whether it is the output of a module, and not its input; the name of the module; the call within a pass.
Event = tuple[bool, str, int]
# Sorts events. Longer keys lie between shorter ones.
_Key = tuple[float, ...]
# The norm and the projections of one call.
Numbers = tuple[float, ...]


def is_inside(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")


def parent_of(name: str, known: Mapping[str, object]) -> str:
    while "." in name:
        name = name.rpartition(".")[0]
        if name in known:
            return name
    return ""


def merged(chains: Sequence[Sequence[str]], names: Sequence[str]) -> list[str]:
    """Return the names in an order that respects all chains and nesting; the model's order breaks ties."""
    places = {name: place for place, name in enumerate(names)}
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for name in names:
        above = parent_of(name, places)
        sorter.add(name, *filter(None, [above]))
    for chain in chains:
        for first, second in pairwise(chain):
            sorter.add(second, first)
    with suppress(CycleError):
        sorter.prepare()
    found: dict[str, None] = {}
    ready: list[int] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(ready, places[name])
        name = names[heapq.heappop(ready)]
        found[name] = None
        sorter.done(name)
    # Chains of different steps can contradict each other.
    return list(found | dict.fromkeys(names))


def _walk(names: Sequence[str]) -> Iterator[tuple[bool, str]]:
    """Yield inputs and outputs of modules in pre-order: an output comes after everything inside the module."""
    stack: list[str] = []
    for name in names:
        while stack and not name.startswith(f"{stack[-1]}."):
            yield True, stack.pop()
        yield False, name
        stack.append(name)
    yield from ((True, name) for name in reversed(stack))


def forward_order(
    order: Sequence[str], calls: Mapping[str, int], numbers: Mapping[Event, Numbers]
) -> dict[Event, int]:
    """Return the place of each input and output in a forward pass, by the modules' first calls and nesting.

    A module that runs several times in one pass, such as an activation that layers share, has its place after the
    output whose numbers equal those of its input.
    """
    keys: dict[Event, _Key] = {}
    for place, (is_output, name) in enumerate(_walk([name for name in order if calls[name] == 1])):
        keys[is_output, name, 0] = (place,)
    for number, root in enumerate(order):
        count = calls[root]
        if count == 1 or calls.get(parent_of(root, calls)) == count:
            continue  # it has its place, or goes with the module around it
        inside = [name for name in order if calls[name] == count and is_inside(name, root)]
        last: _Key = (-1,)
        for call in range(count):
            start = _anchor(root, call, keys, numbers) or _usual(root, call, order, keys)
            last = max(start, last)
            for place, (is_output, name) in enumerate(_walk(inside)):
                keys[is_output, name, call] = (*last, 1, number, call, place)
            last = keys[True, root, call]
    return {event: place for place, event in enumerate(sorted(keys, key=keys.__getitem__))}


def _usual(root: str, call: int, order: Sequence[str], keys: Mapping[Event, _Key]) -> _Key:
    """Return a likely place: after the module before it, or at the end of the module around it."""
    if call == 0:
        place = order.index(root)
        before = order[place - 1] if place else ""
        return keys.get((not is_inside(root, before), before, 0), (-1,))
    end = keys.get((True, parent_of(root, dict.fromkeys(order)), 0), (float("inf"),))
    return max((key for key in keys.values() if key < end), default=(-1,))


def _anchor(
    root: str, call: int, keys: Mapping[Event, _Key], numbers: Mapping[Event, Numbers]
) -> _Key | None:
    """Return the key of the output that a call takes, by its numbers; `None` if they equal no others."""
    came = numbers.get((False, root, call), (0.0,))
    if not came[0]:
        return None
    after = [key for event, key in keys.items() if event[0] and numbers.get(event) == came]
    return max(after, default=None)
