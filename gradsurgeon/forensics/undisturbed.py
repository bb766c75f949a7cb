"""Random states and attributes of modules: set or copied for a replay, and restored after it."""

import copy
import ctypes
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import stateless

from gradsurgeon.tensors.structure import Copied

# The tables of a module are exchanged elsewhere, or hold hooks.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_MT19937_BYTES = 4 * 625


@dataclass(frozen=True, slots=True)
class RandomState:
    """Random states of torch by device, ``cpu`` included, of Python, and of numpy if the script uses its default."""

    torch: Mapping[str, Tensor]
    python: tuple[Any, ...] | None = None
    numpy: tuple[Any, ...] | None = None

    @classmethod
    def now(cls, devices: Iterable[str] = ()) -> Self:
        states = {"cpu": torch.get_rng_state()}
        for device in {*devices} - {"cpu"}:
            states[device] = torch.get_device_module(device).get_rng_state(device)
        return cls(states, random.getstate(), _state_of_numpy())

    def set(self) -> None:
        for name, state in self.torch.items():
            if name == "cpu":
                torch.set_rng_state(state)
            else:
                torch.get_device_module(name).set_rng_state(state, torch.device(name))
        if self.python is not None:
            random.setstate(self.python)
        numpy = sys.modules.get("numpy.random")
        if self.numpy is not None and numpy is not None:
            numpy.set_state(self.numpy)


# The last state of numpy, with the memory that it was read from: reading the state takes long.
_read: tuple[bytes, tuple[Any, ...]] = (b"", ())


def _state_of_numpy() -> tuple[Any, ...] | None:
    global _read  # noqa: PLW0603 # numpy has one state, too
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    generator = numpy.get_bit_generator()
    if type(generator).__name__ != "MT19937":
        return None
    memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    last_memory, state = _read
    # A second normal number, which the state then holds, lies elsewhere in memory.
    if memory != last_memory or state[3]:
        name, words, *numbers = numpy.get_state()
        state = (name, words.tolist(), *numbers)
        _read = (memory, state)
    return state


@contextmanager
def undisturbed(module: nn.Module, then: RandomState) -> Iterator[None]:
    """Set a random state for a replay, which works on copies of what modules keep in attributes."""
    now = RandomState.now(then.torch)
    tables = []
    kept = []
    own = []
    for part in module.modules():
        table = vars(part)
        attributes = _attributes(table)
        tables.append(table)
        kept.append(attributes)
        own.append(_own_of(attributes))
    copies = Copied(own).value
    try:
        for table, attributes in zip(tables, copies, strict=True):
            table.update(attributes)
        then.set()
        yield
    finally:
        now.set()
        for table, attributes in zip(tables, kept, strict=True):
            for key in _attributes(table).keys() - attributes.keys():
                del table[key]
            table.update(attributes)


def _attributes(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: table[key] for key in table.keys() - _OF_TORCH}


def _own_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _own(value) for key, value in attributes.items()}


def _own(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.clone_state()
    numpy: Any = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (random.Random,)
    if numpy is not None:
        kinds += numpy.random.Generator, numpy.random.RandomState
        # A read-only array may be a file that is larger than memory.
        if isinstance(value, numpy.ndarray) and value.flags.writeable:
            return value.copy()
    if isinstance(value, kinds):
        return copy.deepcopy(value)
    return value


def exchanged(module: nn.Module, tensors: dict[str, Tensor]) -> AbstractContextManager[None]:
    """Put other parameters and buffers into a model, by name: no hook is called, and tied ones stay tied."""
    return stateless._reparametrize_module(module, tensors, tie_weights=True)  # noqa: SLF001 # no public name
