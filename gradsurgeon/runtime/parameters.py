"""The tensors that a session acts on, looked up by name each time, so no hook holds a parameter."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from threading import RLock
from typing import Any

from torch import Tensor, nn

from gradsurgeon.distributed.deepspeed_engine import Engine
from gradsurgeon.language.planning import slots
from gradsurgeon.tensors import _dist

_grad: Callable[[Any], Any] = attrgetter("grad")
# The dictionary of the owner and the key in it.
Place = tuple[dict[str, Any], str]


def held(place: Place) -> Tensor | None:
    """Return the tensor at a place, or ``None`` if the name is gone."""
    table, key = place
    # The tables of scripted modules have no `get`.
    return table[key] if key in table else None  # noqa: SIM401


class Parameters:
    """Parameters by index, looked up in the ``_parameters`` of their owners: the session reaches the model weakly."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        # Held while threads compare parameters with the model, and while copies replace them: this session also
        # sees optimizers of other threads.
        self.lock = RLock()
        self._places: list[Place] = [({}, name) for name in names]
        self._names = names
        self._count = len(names)
        self._all = range(self._count)
        # The engine of DeepSpeed that keeps final gradients, and the weights that it updates; ``None`` if the model has them.
        self.elsewhere: Engine | None = None
        self.look_up(model)

    def look_up(self, model: nn.Module) -> None:
        """Take the parameters that the model has now under the names; a wrapper may have given others new names."""
        by_name: dict[str, Place] = {}
        for slot in slots(model):
            by_name.setdefault(slot.name, (slot.owner._parameters, slot.key))  # noqa: SLF001
        # This rank's shards of parameters. The dict holds the tensors themselves, since torch refuses to swap a tensor
        # that has weak references.
        shards: dict[int, Tensor] = {}
        places = []
        for index, name in enumerate(self._names):
            place = by_name.get(name, self._places[index])
            places.append(place)
            param = held(place)
            if param is not None and _dist.is_sharded(param):
                shards[index] = param
        # Replaced at once: another thread may be looking parameters up.
        self._places = places
        self._shards = shards
        # The parameters that the rules were bound to.
        self._bound = self.ids()

    def param(self, index: int) -> Tensor | None:
        return self._own_shard(index, held(self._places[index]))

    def _own_shard(self, index: int, param: Tensor | None) -> Tensor | None:
        """Return this rank's shard, which the optimizer owns, where `fully_shard` shows the whole parameter."""
        if param is None or index not in self._shards or _dist.is_sharded(param):
            return param
        return self._shards[index]

    def params(self, indices: Iterable[int] | None = None) -> list[Tensor | None]:
        """Return all or some parameters, with ``None`` for names that are gone."""
        wanted: Sequence[int] = self._all
        places = self._places
        if indices is not None:
            wanted = list(indices)
            places = [places[index] for index in wanted]
        params: list[Tensor | None]
        try:
            params = [owner[key] for owner, key in places]
        except KeyError:  # some names are gone
            params = [held(place) for place in places]
        if not self._shards:
            return params
        return list(map(self._own_shard, wanted, params))

    def present(self, indices: Iterable[int] | None = None) -> list[Tensor]:
        """Return all or some parameters, without names that are gone."""
        return [param for param in self.params(indices) if param is not None]

    def present_by_index(self, indices: Sequence[int]) -> list[tuple[int, Tensor]]:
        """Return some parameters with their indices, without names that are gone."""
        pairs = zip(indices, self.params(indices), strict=True)
        return [(index, param) for index, param in pairs if param is not None]

    def weights_by_index(self, indices: Sequence[int]) -> list[tuple[int, Tensor]]:
        """Return `weights` with their indices, without names that are gone."""
        pairs = zip(indices, self.weights(indices), strict=True)
        return [(index, weight) for index, weight in pairs if weight is not None]

    def ids(self) -> list[int]:
        return list(map(id, self.params()))  # no loop in Python: asked in every step

    def groups_of(self, param: Tensor) -> _dist.Groups:
        """Return the process groups over which a parameter is divided."""
        if self.elsewhere is None:
            return _dist.mesh_groups(param)
        return self.elsewhere.groups_of(param)

    def weights(self, indices: Iterable[int] | None = None) -> list[Tensor | None]:
        """Return all or some parameters, or the copies that an engine updates."""
        params = self.params(indices)
        if self.elsewhere is None:
            return params
        return list(map(self.elsewhere.weight_of, params))

    def grads(self, indices: Iterable[int] | None = None) -> tuple[list[int], list[Tensor]]:
        """Return the tensors that have a final gradient now, among all or some in ascending order, and these gradients."""
        if self.elsewhere is None:
            return self.own_grads(indices)
        wanted = self._all if indices is None else indices
        grads = {}
        for index in wanted:
            grad = self.elsewhere.grad_of(self.param(index))
            if grad is not None:
                grads[index] = grad
        return [*grads], [*grads.values()]

    def own_grads(self, indices: Iterable[int] | None = None) -> tuple[list[int], list[Tensor]]:
        """Return `grads` of what autograd leaves in `.grad`."""
        wanted = list(self._all if indices is None else indices)
        params = self.params() if len(wanted) == self._count else self.params(wanted)
        try:
            grads: list[Any] = list(map(_grad, params))
        except AttributeError:  # some names are gone
            # A parameter that is gone has no gradient.
            grads = [getattr(param, "grad", None) for param in params]
        if type(None) not in map(type, grads):
            return wanted, grads
        having = []
        present = []
        for index, grad in zip(wanted, grads, strict=True):
            if grad is not None:
                having.append(index)
                present.append(grad)
        return having, present

    def owned(self, params: Iterable[Tensor]) -> list[int]:
        wanted = set(map(id, params))
        return [index for index, identity in enumerate(self.ids()) if identity in wanted]

    def tensor_at(self) -> dict[tuple[int, str], int]:
        """Return the tensors by the id of the dictionary and the key where they are looked up."""
        return {(id(table), key): index for index, (table, key) in enumerate(self._places)}

    def replaced(self) -> list[int]:
        """Return the tensors that have another parameter now than the rules were bound to, or none."""
        now = self.ids()
        if now == self._bound:
            return []
        return [index for index, param in enumerate(now) if param != self._bound[index]]

    def drop(self, indices: Iterable[int]) -> None:
        """Take parameters for gone from now on."""
        for index in indices:
            self._places[index] = ({}, self._places[index][1])
            self._shards.pop(index, None)
            self._bound[index] = id(None)

    def forget(self) -> None:
        self.drop(range(len(self._places)))
