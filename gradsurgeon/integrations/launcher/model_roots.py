"""The models that an optimizer trains, found among all live modules."""

import gc
from collections import defaultdict
from collections.abc import Sequence

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
    # Modules hold nothing else. A script may build an optimizer of other tensors, as of an input, in every step.
    if not any(isinstance(param, nn.Parameter) for param in params):
        return []
    trained = set(map(id, params))
    # An unreachable module that the collector has not yet freed must not pass for a model.
    gc.collect()
    modules = _live.instances(nn.Module)
    parents = _trained_parents(modules, trained)
    waiting = []
    for module in modules:
        # `parameters` of modules hides shared ones.
        own_params = module._parameters.values()  # noqa: SLF001
        if not trained.isdisjoint(map(id, own_params)):
            waiting.append(module)
    seen = dict[int, nn.Module]()
    for module in waiting:
        if id(module) not in seen:
            seen[id(module)] = module
            waiting += parents[id(module)]
    outermost = [module for module in seen.values() if not parents[id(module)]]
    roots = _without_repetition(outermost, trained)
    return [planning.unwrapped(root) for root in roots]


def _trained_parents(
    modules: Sequence[nn.Module], trained: set[int]
) -> defaultdict[int, list[nn.Module]]:
    """Return the modules that hold each module, by its id; a module that only keeps copies of a model is no parent."""
    parents = defaultdict(list)
    for module in modules:
        if not _is_loss(module):  # a loss that holds a model is no parent
            for child in module._modules.values():  # noqa: SLF001 # `children` hides shared ones
                parents[id(child)].append(module)
    for child_id, holders in parents.items():
        kept = []
        for holder in holders:
            has_parents = bool(parents.get(id(holder)))
            # A module that only keeps a model and frozen copies of it is not trained.
            if has_parents or not _keeps_copies(holder, child_id, trained):
                kept.append(holder)
        parents[child_id] = kept
    return parents


def _is_loss(module: nn.Module) -> bool:
    losses = nn.modules.loss._Loss  # noqa: SLF001 # the base of all of torch's
    name = type(module).__name__
    if name.endswith("WithLoss"):
        return False  # a model that computes its loss itself
    return isinstance(module, losses) or name.endswith(("Loss", "Criterion"))


def _keeps_copies(keeper: nn.Module, child: int, trained: set[int]) -> bool:
    # A container may hold equal layers of which one is trained.
    if isinstance(keeper, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return False
    if any(True for _ in keeper.parameters(recurse=False)):
        return False
    children = {id(module): module for module in keeper.children()}
    model = children.pop(child, None)
    if model is None:
        return False  # an empty place for a module
    copies = [module for module in children.values() if param_ids(module)]
    others = trained | param_ids(model)
    for copy in copies:
        is_trained = any(param.requires_grad for param in copy.parameters())
        if is_trained or not others.isdisjoint(param_ids(copy)) or not _equal(copy, model):
            return False
    return bool(copies)


def _equal(copy: nn.Module, model: nn.Module) -> bool:
    ours = dict(copy.named_parameters())
    theirs = dict(model.named_parameters())
    if ours.keys() != theirs.keys():
        return False
    for param, other_param in zip(ours.values(), theirs.values(), strict=True):
        value = readable(param)
        other = readable(other_param)
        if value is None or other is None or not torch.equal(value, other.to(value)):
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
