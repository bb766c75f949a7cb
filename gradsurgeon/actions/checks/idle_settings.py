"""Finds settings that do nothing: attributes that torch does not read, and state dicts that match nothing or are no copy."""

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from gradsurgeon.actions.checks.base import Finding, Findings, Update, owned_ids
from gradsurgeon.common._patching import Patch
from gradsurgeon.tensors import _dist

# Scripts set these on a module, or misspell them on a parameter; `ds_requires_grad` and its like are of libraries.
_ATTRIBUTES = {"requires_grad", "require_grad", "required_grad", "requires_grads", "requires_gard"}

_ATTRIBUTE = (
    "the script sets `{attribute}` of {{names}} to {value}, an attribute that torch does not read: the parameters {state}. "
    "Call `requires_grad_({value})` instead"
)
_STATES = ("still require gradients, and the optimizer updates them", "stay frozen")
_LOADS = (
    "`load_state_dict` at {place} loaded nothing into {{names}}: no name of the dict is a name of the module. Strip or add "
    "a prefix, or pass the dict that is inside of this one",
    "`load_state_dict` at {place} copied {{names}} onto itself: source and target are one object, so neither is a copy of "
    "the other. Make a copy by `copy.deepcopy`, of the module or of its state dict",
)

# Maps each module to the place of its last load that changed nothing, and whether it was its own source.
_idle: weakref.WeakKeyDictionary[nn.Module, tuple[str, bool]] = weakref.WeakKeyDictionary()
# The modules into which a load put something, and the places of such loads.
_loaded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_places: set[str] = set()


_watching: list[Patch] = []


def watch_loads() -> Callable[[], object]:
    _watching.append(Patch(nn.Module, "load_state_dict", _load))
    return lambda: _watching.pop().undo()


def sees_no_load(module: nn.Module | None) -> bool:
    """Tell whether loads are watched, and none has put anything into a module."""
    return bool(_watching) and module not in _loaded


def _load(
    load: Callable[..., Any], module: nn.Module, values: Any, *args: Any, **kwargs: Any
) -> Any:
    own = _addresses(module.parameters())
    result = load(module, values, *args, **kwargs)
    frame = sys._getframe(2)  # noqa: SLF001 # the caller of the replaced function
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    is_copy = bool(own) and own <= _addresses(values.values())
    if is_copy or (result.missing_keys and len(result.unexpected_keys) == len(values) > 0):
        _idle[module] = (place, is_copy)
    elif values:
        _loaded.update(module.modules())
        _places.add(place)
    return result


def _addresses(tensors: Iterable[Any]) -> set[int]:
    """Return where tensors are in memory; a meta tensor is nowhere, and a subclass may refuse to tell."""
    # A distributed checkpoint is read into the tensors of a state dict, which the script loads then.
    if "torch.distributed.checkpoint" in sys.modules:
        return set()
    addresses = set()
    for tensor in tensors:
        if type(tensor) in _dist.PLAIN:
            addresses.add(tensor.data_ptr())
    return addresses - {0}


def idle_loads(root: nn.Module, *, has_updated: bool) -> Findings:
    """Yield the loads into a model that did nothing.

    A fact is what loses nothing: a copy onto itself before the first update, a load after it that matches no name.
    """
    if not _idle:
        return
    for name, module in root.named_modules():
        place, is_copy = _idle.pop(module, ("", False))
        is_loaded = not is_copy and not _loaded.isdisjoint(module.modules())
        # A loop over a population copies its best one onto itself.
        if place and place not in _places and not is_loaded:
            text = _LOADS[is_copy].format(place=place)
            names = (name or type(module).__name__,)
            yield Finding("load", text, names=names, is_fact=is_copy != has_updated)


def idle_attributes(root: nn.Module, update: Update) -> Findings:
    """Yield the attributes that are meant to freeze or to train parameters, and do not."""
    owned = owned_ids(update.optimizer)
    names = defaultdict(list)
    for name, holder in [*root.named_modules(), *root.named_parameters()]:
        if _ATTRIBUTES.isdisjoint(vars(holder)):
            continue
        # A class that sets such an attribute has a use for it.
        code = getattr(type(holder).__init__, "__code__", _load.__code__)
        params = [holder]
        if isinstance(holder, nn.Module):
            params = list(holder.parameters())
        for attribute in _ATTRIBUTES.intersection(vars(holder)).difference(code.co_names):
            value = bool(vars(holder)[attribute])
            is_against = {param.requires_grad for param in params} == {not value}
            matters = value or not owned.isdisjoint(map(id, params))
            if is_against and matters:
                text = _ATTRIBUTE.format(attribute=attribute, value=value, state=_STATES[value])
                names[text].append(name or type(holder).__name__)
    for text, holders in names.items():
        yield Finding("attribute", text, names=tuple(holders))
