"""Leaves the run as it was around a replay: random numbers, attributes of modules, parameters and gradients."""

from __future__ import annotations

import copy
import gc
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradsurgeon.runtime.kept_step import KeptCall

# The tables of a module, which are exchanged by themselves or hold hooks.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
# Structures of attributes are followed so far: one that contains itself has no end.
_DEEPEST = 8


@contextmanager
def undisturbed(module: nn.Module, call: KeptCall) -> Iterator[None]:
    """Have random numbers as they were before a call, and put back afterwards what a replay changes."""
    devices = [torch.device(name) for name in call.random if name != "cpu"]
    before = {"cpu": torch.get_rng_state()}
    for device in devices:
        before[str(device)] = torch.get_device_module(device).get_rng_state(device)
    attributes = [_Attributes(inner) for inner in module.modules()]
    elsewhere = _random_elsewhere()
    _set_random(call.random)
    try:
        yield
    finally:
        _set_random(before)
        for put_back in elsewhere:
            put_back()
        for kept in attributes:
            kept.put_back()


class _Attributes:
    """The attributes of a module that a forward pass may change, and what those of Python and numpy hold."""

    def __init__(self, module: nn.Module) -> None:
        self._table = vars(module)
        self._before = {k: v for k, v in self._table.items() if k not in _OF_TORCH}
        self._contents: list[Callable[[], object]] = []
        self._keep(self._before.values(), _DEEPEST)

    def _keep(self, values: Iterable[Any], deep: int) -> None:
        for value in values:
            if (put_back := _content(value)) is not None:
                self._contents.append(put_back)
            if deep and isinstance(value, Mapping):
                self._keep(value.values(), deep - 1)
            elif deep and isinstance(value, list | tuple | deque):
                self._keep(value, deep - 1)

    def put_back(self) -> None:
        for name in [k for k in self._table if k not in _OF_TORCH and k not in self._before]:
            del self._table[name]
        self._table.update(self._before)
        for put_back in self._contents:
            put_back()


def _content(value: Any) -> Callable[[], object] | None:
    """Return what puts back what an object holds, ``None`` where it is not known to hold anything."""
    kinds: list[tuple[Any, Callable[[], Callable[[], object]]]] = [
        (list, lambda: partial(value.__setitem__, slice(None), value.copy())),
        (deque, lambda: partial(_refill, value, value.copy(), value.extend)),
        ((MutableMapping, set), lambda: partial(_refill, value, copy.copy(value), value.update)),
        (torch.Generator, lambda: partial(value.set_state, value.get_state())),
        (random.Random, lambda: partial(value.setstate, value.getstate())),
    ]
    if (numpy := sys.modules.get("numpy")) is not None:
        kinds += [
            (numpy.ndarray, lambda: partial(value.__setitem__, ..., value.copy())),
            (numpy.random.RandomState, lambda: partial(value.set_state, value.get_state())),
            (numpy.random.Generator, lambda: partial(_set_generator, value, _state_of(value))),
        ]
    return next((keep() for kind, keep in kinds if isinstance(value, kind)), None)


def _state_of(generator: Any) -> Any:
    return copy.deepcopy(generator.bit_generator.state)


def _set_generator(generator: Any, state: Any) -> None:
    generator.bit_generator.state = state


def _refill(container: Any, content: Any, add: Callable[[Any], object]) -> None:
    container.clear()
    add(content)


def _random_elsewhere() -> list[Callable[[], object]]:
    """Return what puts the random numbers of Python and numpy back as they are now."""
    put_back: list[Callable[[], object]] = [partial(random.setstate, random.getstate())]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        put_back.append(partial(numpy.random.set_state, numpy.random.get_state()))
    return put_back


def _set_random(states: Mapping[str, Tensor]) -> None:
    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state)
        else:
            device = torch.device(name)
            torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def exchanged(
    root: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> Iterator[None]:
    """Let a model work on other parameters and buffers, without hooks and with gradients of their own.

    They are exchanged where modules keep them: no hook tells of that, and tied ones stay tied.
    """
    new = {id(param): params[name] for name, param in root.named_parameters()}
    new |= {id(buffer): buffers[name] for name, buffer in root.named_buffers()}
    kept: list[tuple[Any, Any, Any]] = []
    for module in root.modules():
        tables: list[Any] = [module._parameters, module._buffers]  # noqa: SLF001 # where modules keep them
        # Recurrent layers have a list of their own.
        flat = vars(module).get("_flat_weights")
        tables += [flat] if isinstance(flat, list) else []
        for table in tables:
            for key, value in enumerate(table) if isinstance(table, list) else table.items():
                if value is not None and id(value) in new:
                    kept.append((table, key, value))
    for table, key, value in kept:
        table[key] = new[id(value)]
    try:
        yield
    finally:
        for table, key, value in kept:
            table[key] = value


@contextmanager
def grads_kept(ours: Iterable[Tensor]) -> Iterator[None]:
    """Put back the gradients of all other leaves there are: nobody knows which of them a pass reaches."""
    apart = set(map(id, ours))
    leaves = [
        one
        for one in gc.get_objects()
        if issubclass(type(one), Tensor) and one.is_leaf and one.requires_grad
    ]
    kept = [
        (leaf, leaf.grad, None if leaf.grad is None else leaf.grad.detach().clone())
        for leaf in leaves
        if id(leaf) not in apart
    ]
    try:
        yield
    finally:
        for leaf, grad, before in kept:
            leaf.grad = grad
            if grad is not None and before is not None:
                grad.detach().copy_(before)
