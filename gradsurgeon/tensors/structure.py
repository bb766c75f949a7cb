"""Tensors in inputs and outputs of modules: found by path, and replaced without touching the rest."""

import copy
import dataclasses
import inspect
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSet
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

Path = tuple[int | str, ...]
# Deeper than any model nests its outputs; a structure that contains itself must not hang the search.
_DEEPEST = 16
# Most model arguments besides tensors; checked first, because a list may hold very many.
_PLAIN = frozenset((int, float, bool, str, bytes, type(None)))


def tensors_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield every tensor of a structure of tuples, lists, mappings and dataclasses, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif len(path) < _DEEPEST:
        for step, item in _items(value):
            yield from tensors_in(item, (*path, step))


def holds(value: tuple[Any, ...] | dict[str, Any], tensor: Tensor) -> bool:
    """Tell whether a structure contains a tensor, at any place that `tensors_in` visits."""
    if len(value) == 1 and isinstance(value, tuple) and isinstance(value[0], Tensor):
        return value[0] is tensor  # nearly all modules have one argument
    if not value:  # nearly all calls have no keyword arguments
        return False
    return any(inner is tensor for _, inner in tensors_in(value))


def _items(value: Any) -> Iterator[tuple[int | str, Any]]:
    if isinstance(value, Mapping):
        # A Hugging Face `ModelOutput` is both a mapping and a dataclass.
        for key, item in value.items():
            if isinstance(key, str | int):
                yield key, item
    elif isinstance(value, tuple | list):
        yield from enumerate(value)
    elif _is_record(value):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def resolve(value: Any, path: Path) -> Path | None:
    """Return the path as `tensors_in` spells it, or ``None`` if it leads nowhere."""
    # An index into a mapping counts its values, and a field name of a named tuple is an index.
    resolved = []
    for step in path:
        items = dict(_items(value))
        names = getattr(value, "_fields", ())
        if isinstance(step, int) and step not in items and step < len(items):
            step = list(items)[step]  # noqa: PLW2901 # the same step, spelled as the structure has it
        elif isinstance(step, str) and step in names:
            step = names.index(step)  # noqa: PLW2901 # the same
        if step not in items:
            return None
        resolved.append(step)
        value = items[step]
    return tuple(resolved)


def with_tensors(value: Any, new: Mapping[Path, Tensor]) -> Any:
    """Return the structure with some tensors replaced; parts beside their paths are shared."""
    if () in new:
        return new[()]
    steps: dict[int | str, dict[Path, Tensor]] = {}
    for path, tensor in new.items():
        steps.setdefault(path[0], {})[path[1:]] = tensor
    children = dict(_items(value))
    changed = {step: with_tensors(children[step], inner) for step, inner in steps.items()}
    if isinstance(value, tuple):
        return _tuple_like(value, [changed.get(index, item) for index, item in enumerate(value)])
    # Copied rather than constructed: the constructor of a script's class may need any arguments.
    out = copy.copy(value)
    _replace(out, changed)
    return out


def _tuple_like(value: Any, items: list[Any]) -> Any:
    if hasattr(value, "_make"):  # a named tuple
        return value._make(items)
    return type(value)(items)


def _replace(container: Any, items: Mapping[Any, Any]) -> None:
    has_items = isinstance(container, Mapping | list | deque)
    for step, item in items.items():
        if has_items:
            container[step] = item
        else:
            object.__setattr__(container, step, item)


class Copied:
    """A structure whose containers are copies, with the types of the iterators in it, which can be used only once.

    An object that occurs twice occurs twice in the copy. A container that cannot be copied stays as it is.
    """

    def __init__(self, value: Any, of_tensor: Callable[[Tensor], Tensor] | None = None) -> None:
        self.iterators: list[str] = []
        self._of_tensor = of_tensor
        # Each copy with its original, which must stay alive so no other object gets its id.
        self._made: dict[int, tuple[Any, Any]] = {}
        self.value = self._copy(value, 0)

    def _copy(self, value: Any, depth: int) -> Any:
        if type(value) in _PLAIN:
            return value
        if id(value) in self._made:
            _, copied = self._made[id(value)]
            return copied
        if isinstance(value, Tensor):
            if self._of_tensor is None:
                return value
            copied = self._of_tensor(value)
            self._made[id(value)] = (value, copied)
            return copied
        if isinstance(value, Iterator):
            self.iterators.append(type(value).__name__)
        elif depth <= _DEEPEST:
            return self._of_container(value, depth + 1)
        return value

    def _of_container(self, value: Any, depth: int) -> Any:
        if isinstance(value, tuple):
            items = [self._copy(item, depth) for item in value]
            if all(map(operator.is_, items, value)):
                return value
            return _tuple_like(value, items)
        is_container = isinstance(value, list | deque | MutableMapping | MutableSet)
        if not is_container and not _is_record(value):
            return value
        try:
            # Copied rather than constructed: the constructor of a script's class may need any arguments.
            out = copy.copy(value)
            self._made[id(value)] = (value, out)
            children: Iterable[tuple[Any, Any]]
            if isinstance(value, MutableMapping):
                children = value.items()
            elif isinstance(value, deque):
                children = enumerate(value)
            else:
                children = _items(value)
            for step, item in children:
                new = self._copy(item, depth)
                if new is not item:
                    _replace(out, {step: new})
        except Exception:  # noqa: BLE001 # a class of the script may raise anything
            out = value
            self._made[id(value)] = (value, value)
        return out


def describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    steps = []
    for step, _ in _items(value):
        steps.append(f"[{step}]" if isinstance(step, int) else f".{step}")
    content = ", ".join(steps[:8]) if steps else "nothing in it"
    return f"a {type(value).__name__} with {content}"


def parameters_of(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a forward pass without ``self``; it may be a ``torch.jit`` method."""
    if isinstance(forward, torch.ScriptMethod):
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        arguments = forward.schema.arguments[1:]
        return [inspect.Parameter(argument.name, kind) for argument in arguments]
    return list(inspect.signature(forward).parameters.values())


class Arguments:
    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._args = args
        self._kwargs = kwargs
        # An instance may shadow `forward` with a function of any signature; scripted modules only have their own.
        self._forward: Callable[..., Any] = module.forward
        of_class = getattr(type(module), "forward", None)
        if of_class is not None:
            self._forward = MethodType(of_class, module)
        self.named: dict[int | str, Any] = dict(enumerate(args))
        self.named.update(kwargs)

    def path(self, path: Path) -> Path:
        """Return a path with its first step as this call spells it."""
        if not path:
            # A tensor that is the only one has the name of the module.
            paths = [place for place, _ in tensors_in(self.named)]
            return paths[0] if len(paths) == 1 else ()
        names = [parameter.name for parameter in parameters_of(self._forward)]
        first = path[0]
        if isinstance(first, str) and first in names[: len(self._args)]:
            first = names.index(first)
        elif isinstance(first, int) and len(self._args) <= first < len(names):
            first = names[first]
        return (first, *path[1:])

    def exchange(self, new: Mapping[Path, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        whole = with_tensors(self.named, new)
        args = tuple([whole[index] for index in range(len(self._args))])
        kwargs = {key: whole[key] for key in self._kwargs}
        return args, kwargs
