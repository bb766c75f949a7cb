"""The random state of torch, Python and numpy, as a call of a model found it."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MT19937_BYTES = 4 * 625


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
        return cls(states, random.getstate(), _state_of_numpy())

    @property
    def nbytes(self) -> int:
        python = 0 if self.python is None else 36 * len(self.python[1])
        numpy = 0 if self.numpy is None else _MT19937_BYTES
        return python + numpy + sum(state.nbytes for state in self.torch.values())

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
