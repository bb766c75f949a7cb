"""Restores random states, attributes of modules, parameters and gradients after a replay."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradsurgeon.forensics.kept_step import KeptCall
from gradsurgeon.forensics.random_state import RandomState

# The tables of a module are exchanged elsewhere, or hold hooks.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
# The depth to which structures are followed: one may contain itself.
_DEEPEST = 8


@contextmanager
def undisturbed(module: nn.Module, call: KeptCall) -> Iterator[list[str]]:
    """Set the random states of a call; at the end restore everything that a replay may change.

    Yields:
        A list that names the objects that could not be restored, once the context has ended.
    """
    states = RandomState.now(call.random.torch)
    left: list[str] = []
    held = [("the arguments of the call", one) for one in (call.args, call.kwargs)]
    kept: list[tuple[str, Callable[[], object]]] = []
    for name, inner in module.named_modules(prefix=call.prefix.removesuffix(".")):
        table = vars(inner)
        before = {key: value for key, value in table.items() if key not in _OF_TORCH}
        kept.append((name, partial(_reset, table, before)))
        held += [(f"{name}.{key}" if name else key, value) for key, value in before.items()]
    for name, value in held:
        kept += [(name, put_back) for put_back in _restoring([value], _DEEPEST)]
    try:
        call.random.set()
        yield left
    finally:
        states.set()
        # Each by itself: one that cannot be written stops no other.
        for name, put_back in kept:
            try:
                put_back()
            except Exception as error:  # noqa: BLE001 # a class of the script may raise anything
                left.append(f"{name} ({type(error).__name__}: {error})")


def _reset(table: dict[str, Any], before: Mapping[str, Any]) -> None:
    for key in table.keys() - before.keys() - _OF_TORCH:
        del table[key]
    table.update(before)


def _restoring(values: Iterable[Any], deep: int) -> Iterator[Callable[[], object]]:
    """Yield functions that restore containers, arrays and generators."""
    for value in values:
        # A class of the script may refuse to be copied or iterated.
        with suppress(Exception):
            if (put_back := _content(value)) is not None:
                yield put_back
            if deep and isinstance(value, Mapping):
                yield from _restoring(value.values(), deep - 1)
            elif deep and isinstance(value, list | tuple | deque):
                yield from _restoring(value, deep - 1)


def _content(value: Any) -> Callable[[], object] | None:
    """Return a function that restores the content of an object, ``None`` for an object of another kind."""
    if isinstance(value, list | deque | set | MutableMapping):
        return partial(_refill, value, copy.copy(value))
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    numpy = sys.modules.get("numpy")
    return None if numpy is None else _content_of_numpy(value, numpy)


def _content_of_numpy(value: Any, numpy: Any) -> Callable[[], object] | None:
    # A read-only array may be a file that is larger than memory.
    if isinstance(value, numpy.ndarray) and value.flags.writeable:
        return partial(value.__setitem__, ..., value.copy())
    if isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, numpy.random.Generator):
        state = copy.deepcopy(value.bit_generator.state)
        return partial(setattr, value.bit_generator, "state", state)
    return None


def _refill(container: Any, before: Any) -> None:
    # An unchanged container may be read-only.
    if _parts(container) != _parts(before):
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(before)


def _parts(container: Any) -> list[int]:
    """Return the identities of the parts of a container, in its order if it has one."""
    if isinstance(container, MutableMapping):
        return [id(part) for pair in container.items() for part in pair]
    found = list(map(id, container))
    return sorted(found) if isinstance(container, set) else found


@contextmanager
def exchanged(
    root: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> Iterator[None]:
    """Put other parameters and buffers into a model, without hooks and with their own gradients.

    They are exchanged in the tables of the modules: that calls no hook, and tied parameters stay tied.
    """
    new = {id(param): params[name] for name, param in root.named_parameters()}
    new |= {id(buffer): buffers[name] for name, buffer in root.named_buffers()}
    kept: list[tuple[Any, Any, Any]] = []
    for module in root.modules():
        tables: list[Any] = [module._parameters, module._buffers]  # noqa: SLF001 # where modules keep them
        # Recurrent layers have a list as well.
        flat = vars(module).get("_flat_weights")
        tables += [flat] if isinstance(flat, list) else []
        for table in tables:
            for key, value in enumerate(table) if isinstance(table, list) else table.items():
                if id(value) in new:
                    kept.append((table, key, value))
    for table, key, value in kept:
        table[key] = new[id(value)]
    try:
        yield
    finally:
        for table, key, value in kept:
            table[key] = value
