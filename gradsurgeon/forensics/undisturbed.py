"""Leaves the run as it was around a replay: random numbers, attributes of modules, parameters and gradients."""

from __future__ import annotations

import copy
import gc
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradsurgeon.forensics.kept_step import HostRandom, KeptCall
from gradsurgeon.planning import ROOT

# The tables of a module, which are exchanged by themselves or hold hooks.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
# Structures of attributes are followed so far: one that contains itself has no end.
_DEEPEST = 8


@contextmanager
def undisturbed(module: nn.Module, call: KeptCall) -> Iterator[list[str]]:
    """Have random numbers as they were before a call, and put back afterwards what a replay changes.

    Yields:
        What could not be put back, complete once the context has ended.
    """
    devices = [torch.device(name) for name in call.random if name != "cpu"]
    before = {"cpu": torch.get_rng_state()}
    for device in devices:
        before[str(device)] = torch.get_device_module(device).get_rng_state(device)
    prefix = "" if call.name == ROOT else call.name
    attributes = [_Attributes(name, inner) for name, inner in module.named_modules(prefix=prefix)]
    given = _Contents("the arguments of the call", [call.args, call.kwargs])
    host = HostRandom.now()
    left: list[str] = []
    try:
        _set_random(call.random)
        call.host.set()
        yield left
    finally:
        _set_random(before)
        host.set()
        for kept in attributes:
            kept.put_back(left)
        given.put_back(left)


class _Contents:
    """What some values hold that a forward pass may change, and what those of Python and numpy hold."""

    def __init__(self, name: str, values: Iterable[Any]) -> None:
        self._name = name
        self._kept: list[Callable[[], object]] = []
        self._keep(values, _DEEPEST)

    def _keep(self, values: Iterable[Any], deep: int) -> None:
        for value in values:
            # A class of the script's may refuse to be copied or looked through.
            with suppress(Exception):
                if (put_back := _content(value)) is not None:
                    self._kept.append(put_back)
                if deep and isinstance(value, Mapping):
                    self._keep(value.values(), deep - 1)
                elif deep and isinstance(value, list | tuple | deque):
                    self._keep(value, deep - 1)

    def put_back(self, left: list[str]) -> None:
        """Put back what has changed, each by itself; add to ``left`` what cannot be."""
        for put_back in self._kept:
            try:
                put_back()
            except Exception as error:  # noqa: BLE001 # whatever a class of the script's raises
                left.append(f"{self._name} ({type(error).__name__}: {error})")


class _Attributes:
    """The attributes of a module that a forward pass may change."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._table = vars(module)
        self._before = {k: v for k, v in self._table.items() if k not in _OF_TORCH}
        self._contents = [
            _Contents(f"{name}.{key}" if name else key, [value])
            for key, value in self._before.items()
        ]

    def put_back(self, left: list[str]) -> None:
        for name in [k for k in self._table if k not in _OF_TORCH and k not in self._before]:
            del self._table[name]
        self._table.update(self._before)
        for contents in self._contents:
            contents.put_back(left)


def _content(value: Any) -> Callable[[], object] | None:
    """Return what puts back what an object holds, ``None`` where it is not known to hold anything."""
    kinds: list[tuple[Any, Callable[[], Callable[[], object]]]] = [
        (list, lambda: partial(_refill, value, value.copy(), _in_order, value.extend)),
        (deque, lambda: partial(_refill, value, value.copy(), _in_order, value.extend)),
        (
            MutableMapping,
            lambda: partial(_refill, value, copy.copy(value), _pairs, value.update),
        ),
        (set, lambda: partial(_refill, value, value.copy(), _members, value.update)),
        (torch.Generator, lambda: partial(value.set_state, value.get_state())),
        (random.Random, lambda: partial(value.setstate, value.getstate())),
    ]
    if (numpy := sys.modules.get("numpy")) is not None:
        if isinstance(value, numpy.ndarray) and not value.flags.writeable:
            return None  # It may be a file, larger than the memory.
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


def _in_order(container: Iterable[Any]) -> list[int]:
    return [id(one) for one in container]


def _pairs(mapping: Mapping[Any, Any]) -> list[int]:
    return [id(part) for pair in mapping.items() for part in pair]


def _members(members: set[Any]) -> list[int]:
    return sorted(map(id, members))


def _refill(
    container: Any, before: Any, parts: Callable[[Any], list[int]], add: Callable[[Any], object]
) -> None:
    # One that has not changed may be read-only.
    if parts(container) != parts(before):
        container.clear()
        add(before)


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
