"""The order in which the tensors of a step came about: forward, backward, gradients, update."""

from collections.abc import Iterator, Mapping, Sequence

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
    """Return the names in the order of the chains, and others after those that are before them in the model.

    Chains may have other names, which count for nothing.
    """
    known = set(names)
    ordered: list[str] = []
    for chain in [*sorted(chains, key=len, reverse=True), names]:
        place = 0
        for name in chain:
            if name not in known:
                continue
            if name not in ordered:
                ordered.insert(place, name)
            place = ordered.index(name) + 1
    return ordered


def _walk(names: Sequence[str]) -> Iterator[tuple[bool, str]]:
    """Yield inputs and outputs of modules in pre-order: an output comes after everything inside the module."""
    stack: list[str] = []
    for name in names:
        while stack and not name.startswith(f"{stack[-1]}."):
            yield True, stack.pop()
        yield False, name
        stack.append(name)
    while stack:
        yield True, stack.pop()


def forward_order(
    order: Sequence[str], calls: Mapping[str, int], numbers: Mapping[Event, Numbers]
) -> dict[Event, int]:
    """Return the place of each input and output in a forward pass, by the modules' first calls and nesting.

    A module that runs several times in one pass, such as an activation that layers share, has its place after the
    output whose numbers equal those of its input.
    """
    keys: dict[Event, _Key] = {}
    once = [name for name in order if calls[name] == 1]
    for place, (is_output, name) in enumerate(_walk(once)):
        keys[is_output, name, 0] = (place,)
    for number, root in enumerate(order):
        count = calls[root]
        parent = parent_of(root, calls)
        if count == 1 or calls.get(parent) == count:
            continue  # it has its place, or goes with the module around it
        inside = [name for name in order if calls[name] == count and is_inside(name, root)]
        walk = list(_walk(inside))
        last: _Key = (-1,)
        for call in range(count):
            start = _anchor(root, call, keys, numbers) or _usual(root, call, order, keys)
            last = max(start, last)
            for place, (is_output, name) in enumerate(walk):
                keys[is_output, name, call] = (*last, 1, number, call, place)
            last = keys[True, root, call]
    events = sorted(keys, key=keys.__getitem__)
    return {event: place for place, event in enumerate(events)}


def _usual(root: str, call: int, order: Sequence[str], keys: Mapping[Event, _Key]) -> _Key:
    """Return a likely place: after the module before it, or at the end of the module around it."""
    start: _Key = (-1,)
    if call == 0:
        place = order.index(root)
        if place == 0:
            return start
        before = order[place - 1]
        return keys.get((not is_inside(root, before), before, 0), start)
    parent = parent_of(root, dict.fromkeys(order))
    end = keys.get((True, parent, 0), (float("inf"),))
    return max([start, *[key for key in keys.values() if key < end]])


def _anchor(
    root: str, call: int, keys: Mapping[Event, _Key], numbers: Mapping[Event, Numbers]
) -> _Key | None:
    """Return the key of the output that a call takes, by its numbers; `None` if they equal no others."""
    of_input = numbers.get((False, root, call), (0.0,))
    if not of_input[0]:
        return None
    anchors = []
    for event, key in keys.items():
        is_output = event[0]
        if is_output and numbers.get(event) == of_input:
            anchors.append(key)
    return max(anchors, default=None)
