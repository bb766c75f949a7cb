"""Random states, attributes of modules, parameters and gradients: set for a replay, and restored after it."""

from __future__ import annotations

import copy
import ctypes
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_MT19937_BYTES = 4 * 625
# The tables of a module are exchanged elsewhere, or hold hooks.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
# The depth to which structures are followed: one may contain itself.
_DEEPEST = 8


@dataclass(frozen=True, slots=True)
class RandomState:
    """Random states to be set again.

    Attributes:
        torch: the state of torch by device, ``cpu`` included.
        python: the state of Python.
        numpy: the state of numpy, if the script uses numpy.
    """

    torch: Mapping[str, Tensor]
    python: tuple[Any, ...] | None = None
    numpy: Mapping[str, Any] | None = None

    @classmethod
    def now(cls, devices: Iterable[str] = ()) -> RandomState:
        """Return the state of the host, and of other devices by name."""
        states = {"cpu": torch.get_rng_state()}
        for device in {*devices} - {"cpu"}:
            states[device] = torch.get_device_module(device).get_rng_state(device)
        return cls(states, _state_of_python(), _state_of_numpy())

    @property
    def nbytes(self) -> int:
        python = 0 if self.python is None else 36 * len(self.python[1])
        numpy = 0 if self.numpy is None else _MT19937_BYTES
        return python + numpy + sum([state.nbytes for state in self.torch.values()])

    def set(self) -> None:
        for name, state in self.torch.items():
            if name == "cpu":
                torch.set_rng_state(state)
            else:
                torch.get_device_module(name).set_rng_state(state, torch.device(name))
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None and (numpy := sys.modules.get("numpy.random")) is not None:
            numpy.set_state(self.numpy)


# The words of Python's generator lie behind the header of its object, after their index.
_PYTHON_BYTES = 4 * 625
# The last state of Python, with the memory that it was read from.
_python: tuple[bytes, tuple[Any, ...]] | None = None


def _state_of_python() -> tuple[Any, ...]:
    """Return the random state of Python. Reading it takes long, so it is read again only if it has changed."""
    global _python  # noqa: PLW0603 # Python has one state, too
    place = id(random._inst) + object.__basicsize__  # noqa: SLF001 # the only way to it
    memory = ctypes.string_at(place, _PYTHON_BYTES)
    if _python is not None and _python[0] == memory and _python[1][2] is None:
        return _python[1]
    state = random.getstate()
    # In another release of Python the words may lie elsewhere, and then nothing is remembered.
    is_there = memory[4:] == b"".join(word.to_bytes(4, sys.byteorder) for word in state[1][:-1])
    _python = (memory, state) if is_there else None
    return state


# The last state of numpy, with the memory that it was read from.
_read: tuple[bytes, Mapping[str, Any]] | None = None


def _state_of_numpy() -> Mapping[str, Any] | None:
    """Return the random state of numpy. Reading it takes long, so it is read again only if it has changed."""
    global _read  # noqa: PLW0603 # numpy has one state, too
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    generator: Any = numpy.get_bit_generator() if hasattr(numpy, "get_bit_generator") else None
    if type(generator).__name__ != "MT19937":
        state: Mapping[str, Any] = numpy.get_state(legacy=False)
        return state
    memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    # numpy keeps a second normal number elsewhere, and drawing that changes nothing here.
    if _read is None or _read[0] != memory or _read[1]["has_gauss"]:
        _read = memory, numpy.get_state(legacy=False)
    return _read[1]


@contextmanager
def undisturbed(
    module: nn.Module, prefix: str, arguments: Iterable[Any], then: RandomState
) -> Iterator[list[str]]:
    """Set a random state for a replay; at the end restore everything that a replay may change.

    Args:
        module: the module that is called.
        prefix: the prefix of names inside it.
        arguments: the arguments of the call.
        then: the random state of the call.

    Yields:
        A list that names the objects that could not be restored, once the context has ended.
    """
    now = RandomState.now(then.torch)
    left: list[str] = []
    held = [("the arguments of the call", one) for one in arguments]
    kept: list[tuple[str, Callable[[], object]]] = []
    for name, inner in module.named_modules(prefix=prefix.removesuffix(".")):
        table = vars(inner)
        before = {key: value for key, value in table.items() if key not in _OF_TORCH}
        kept.append((name, partial(_reset, table, before)))
        held += [(f"{name}.{key}" if name else key, value) for key, value in before.items()]
    for name, value in held:
        kept += [(name, put_back) for put_back in _restoring([value], _DEEPEST)]
    try:
        then.set()
        yield left
    finally:
        now.set()
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
