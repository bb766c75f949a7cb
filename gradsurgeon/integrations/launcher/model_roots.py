"""The models that an optimizer trains, found among all live modules."""

import gc
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from gradsurgeon.common import _live
from gradsurgeon.common._script import variable_of
from gradsurgeon.language import planning
from gradsurgeon.tensors.readable import readable


def param_ids(module: nn.Module) -> set[int]:
    return {id(param) for param in module.parameters()}


def module_ids(root: nn.Module) -> set[int]:
    return {id(module) for module in root.modules()}


def name_of(root: nn.Module) -> str:
    """Return the variable of the script that holds a model, in a wrapper or not; empty if none does."""

    def holds_root(value: object) -> bool:
        # A proxy claims the class of the object that it wraps.
        return issubclass(type(value), nn.Module) and planning.unwrapped(value) is root

    return variable_of(holds_root)


def roots_of(params: Sequence[Tensor]) -> list[nn.Module]:
    """Return the models that have some parameters; a script may replace a wrapper around one of them."""
    return [planning.unwrapped(root) for root in _outermost(params)]


def _outermost(params: Sequence[Tensor]) -> list[nn.Module]:
    trained = {id(param) for param in params}
    # An unreachable module that the collector has not yet freed must not pass for a model.
    gc.collect()
    modules = _live.instances(nn.Module)
    parents = _parents_by_child(modules)
    _pass_over_keepers(parents, trained)
    roots: list[nn.Module] = []
    seen: set[int] = set()
    for module in modules:
        if not _owns_any(module, trained):
            continue
        waiting = [module]
        while waiting:
            current = waiting.pop()
            if id(current) in seen:
                continue
            seen.add(id(current))
            above = parents.get(id(current), [])
            waiting += above
            if not above:
                roots.append(current)
    return _without_repetition(roots, trained)


def _parents_by_child(modules: Iterable[nn.Module]) -> dict[int, list[nn.Module]]:
    """Return the parents of each module by its id. A loss that holds a model is no parent."""
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        if not _is_loss(module):
            for child in module._modules.values():  # noqa: SLF001 # `children` hides shared ones
                parents.setdefault(id(child), []).append(module)
    return parents


def _is_loss(module: nn.Module) -> bool:
    losses = nn.modules.loss._Loss  # noqa: SLF001 # the base of all of torch's
    name = type(module).__name__
    if name.endswith("WithLoss"):
        return False  # a model that computes its loss itself
    return isinstance(module, losses) or name.endswith(("Loss", "Criterion"))


def _owns_any(module: nn.Module, ids: set[int]) -> bool:
    return any(id(param) in ids for param in module._parameters.values())  # noqa: SLF001 # `parameters` hides shared ones


def _pass_over_keepers(parents: dict[int, list[nn.Module]], trained: set[int]) -> None:
    """Remove parents that only keep a model and frozen copies of it: such a whole is not trained."""
    for child, above in parents.items():
        kept = []
        for keeper in above:
            has_parents = bool(parents.get(id(keeper)))
            if has_parents or not _keeps_copies(keeper, child, trained):
                kept.append(keeper)
        parents[child] = kept


def _keeps_copies(keeper: nn.Module, child: int, trained: set[int]) -> bool:
    # A container may hold equal layers of which one is trained.
    if isinstance(keeper, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return False
    own_params = keeper._parameters.values()  # noqa: SLF001 # `parameters` hides shared ones
    if any(param is not None for param in own_params):
        return False
    children = {id(module): module for module in keeper.children()}
    model = children.pop(child, None)
    if model is None:
        return False  # an empty place for a module
    copies = [module for module in children.values() if param_ids(module)]
    unlike_copies = trained | param_ids(model)
    for copy in copies:
        if not _is_frozen(copy, unlike_copies) or not _equal(copy, model):
            return False
    return bool(copies)


def _is_frozen(copy: nn.Module, others: set[int]) -> bool:
    """Tell whether no parameter of a copy is trained, or belongs to others."""
    if any(param.requires_grad for param in copy.parameters()):
        return False
    return others.isdisjoint(param_ids(copy))


def _equal(copy: nn.Module, model: nn.Module) -> bool:
    ours = dict(copy.named_parameters())
    theirs = dict(model.named_parameters())
    if ours.keys() != theirs.keys():
        return False
    for param, other in zip(ours.values(), theirs.values(), strict=True):
        value = readable(param)
        other_value = readable(other)
        if value is None or other_value is None:
            return False
        if not torch.equal(value, other_value.to(value)):
            return False
    return True


def _without_repetition(roots: list[nn.Module], trained: set[int]) -> list[nn.Module]:
    """Drop roots whose trained parameters all belong to other roots: no gradient is edited twice."""

    def most_trained_then_of_script(root: nn.Module) -> tuple[int, bool, int]:
        params = param_ids(root)
        # Beside the script's own model, torch's containers and compiled parts hold some of it for other uses.
        is_of_torch = type(planning.unwrapped(root)).__module__.startswith("torch.")
        return -len(params & trained), is_of_torch, len(params)

    chosen: list[nn.Module] = []
    covered: set[int] = set()
    for root in sorted(roots, key=most_trained_then_of_script):
        params = param_ids(root)
        if not (params & trained) <= covered:
            chosen.append(root)
            covered |= params
    return chosen
