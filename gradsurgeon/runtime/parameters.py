"""The tensors a session acts on, found by name each time, so that no hook holds a parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from gradsurgeon.planning import slots


class Parameters:
    """Parameters by index, looked up where their owner keeps them.

    It holds the ``_parameters`` dictionaries of the owners, not the modules: the session reaches the
    model weakly, and a dictionary look-up sees a parameter that was replaced.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        by_name: dict[str, tuple[dict[str, Any], str]] = {}
        for slot in slots(model):
            by_name.setdefault(slot.name, (slot.owner._parameters, slot.key))  # noqa: SLF001
        self._places = [by_name[name] for name in names]
        self.names = tuple(names)
        self._identities: dict[int, tuple[TensorWeakRef, int]] = {}
        self.identify(range(len(names)))

    def __len__(self) -> int:
        return len(self._places)

    def param(self, tensor: int) -> Tensor | None:
        """Return the parameter that now stands under the name, if any."""
        owner, key = self._places[tensor]
        found: Tensor | None = owner.get(key)
        return found

    def places_of(self, tensors: Iterable[int]) -> list[tuple[dict[str, Any], str]]:
        """Return where some tensors are kept: the dictionary of the owner, and the key."""
        return list(map(self._places.__getitem__, tensors))

    def params(self) -> list[Tensor | None]:
        """Return all parameters, ``None`` where the name is gone."""
        return [owner.get(key) for owner, key in self._places]

    def ids(self) -> list[int]:
        """Return the ids of all parameters, to compare them while they are alive."""
        return [id(owner.get(key)) for owner, key in self._places]

    def grads(self, tensors: Iterable[int]) -> tuple[list[int], list[Tensor]]:
        """Return the tensors that have a gradient now, and these gradients."""
        wanted = list(tensors)
        params = [owner.get(key) for owner, key in self.places_of(wanted)]
        # A parameter that is gone has no gradient either.
        grads = [None if param is None else param.grad for param in params]
        if type(None) not in map(type, grads):
            return wanted, cast("list[Tensor]", grads)
        having = [tensor for tensor, grad in zip(wanted, grads, strict=True) if grad is not None]
        return having, [grad for grad in grads if grad is not None]

    def identify(self, tensors: Iterable[int]) -> None:
        """Know parameters again from now on, under whatever name, as long as they live."""
        for tensor in tensors:
            if (param := self.param(tensor)) is not None:
                self._identities[id(param)] = TensorWeakRef(param), tensor

    def tensor_of(self, param: Tensor) -> int | None:
        """Return which tensor a parameter was when it was identified."""
        reference, tensor = self._identities.get(id(param), (None, None))
        return tensor if reference is not None and reference() is param else None

    @contextmanager
    def without_references(self, params: Sequence[Tensor]) -> Iterator[list[int]]:
        """Have no weak references to parameters for a while: torch swaps nothing that has some.

        Yields:
            Which tensors they are.
        """
        tensors = [tensor for param in params if (tensor := self.tensor_of(param)) is not None]
        for param in params:
            self._identities.pop(id(param), None)
        try:
            yield tensors
        finally:
            self.identify(tensors)

    def owned(self, params: Iterable[Tensor]) -> list[int]:
        """Return the tensors that are among ``params``."""
        wanted = {id(param) for param in params}
        return [tensor for tensor, param in enumerate(self.params()) if id(param) in wanted]

    def owned_in_order(self, params: Iterable[Tensor]) -> list[int]:
        """Return the tensors that ``params`` are, in their order."""
        by_id = {id(param): tensor for tensor, param in enumerate(self.params())}
        return [by_id[id(param)] for param in params if id(param) in by_id]

    def move(self, places: Mapping[int, tuple[dict[str, Any], str]]) -> None:
        """Look tensors up elsewhere from now on; those that are not named are gone."""
        self._places = [
            places.get(tensor, ({}, key)) for tensor, (_, key) in enumerate(self._places)
        ]
        self._identities.clear()
        self.identify(range(len(self._places)))

    def forget(self) -> None:
        """Let go of everything, once the model is gone or the session removed."""
        self._places = [({}, key) for _, key in self._places]
        self._identities.clear()
