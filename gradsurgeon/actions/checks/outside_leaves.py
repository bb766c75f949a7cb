"""Finds trained tensors outside of the model that no optimizer owns."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurgeon.actions.checks.base import Finding, Pass, owned_ids
from gradsurgeon.common import _live
from gradsurgeon.common._script import variable_of
from gradsurgeon.tensors import _dist
from gradsurgeon.tensors.readable import readable
from gradsurgeon.tensors.sampling import sample

# The passes between two looks at modules, and half of those that a lone tensor is given.
WINDOW = 10
_OUTSIDE = (
    "{names} gets gradients in each backward pass and never moved: it belongs to no module and no optimizer. "
    "Register it as an attribute of a module (`nn.ParameterList` in the place of a list)"
)
_UNOWNED = (
    "{{names}}, {number} of {all} parameters of {module}, get gradients and never moved: no optimizer owns them. Give them "
    "to an optimizer, or set requires_grad to False"
)


@dataclass(slots=True)
class _Leaf:
    """A trained tensor that is no parameter of the model: its first sample, and the passes that reached it since."""

    tensor: Tensor
    first: Tensor
    later_passes: int = 0


class OutsideLeaves:
    """Looks at the tensors that the first passes reach besides the parameters of the model."""

    def __init__(self) -> None:
        # By id. Each leaf is held, so that no other leaf gets its id.
        self._lone: dict[int, _Leaf] = {}
        self._in_modules: dict[int, _Leaf] = {}
        self._passes = 0

    def after_pass(self, done: Pass) -> Iterator[Finding]:
        self._passes += 1
        if self._passes > 3 * WINDOW:
            return
        leaves = _readable_leaves(done)
        if self._passes == WINDOW:
            for leaf, values in leaves:
                self._in_modules[id(leaf)] = _Leaf(leaf, sample(values))
        for leaf, values in leaves:
            if self._has_rested(leaf, values) and _is_lone(leaf):
                yield Finding("outside", _OUTSIDE, names=(f"a tensor of shape {list(leaf.shape)}",))
        if self._passes == 3 * WINDOW:
            yield from _unowned_modules(self._still(leaves))
            self._lone.clear()
            self._in_modules.clear()

    def _has_rested(self, leaf: Tensor, values: Tensor) -> bool:
        """Count a pass that reached a leaf; tell whether the leaf has not moved in two windows."""
        known = self._lone.get(id(leaf))
        if known is None or known.tensor is not leaf:
            if len(self._lone) > WINDOW:
                self._lone.clear()
            self._lone[id(leaf)] = _Leaf(leaf, sample(values))
            return False
        known.later_passes += 1
        return known.later_passes == 2 * WINDOW and torch.equal(sample(values), known.first)

    def _still(self, leaves: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return the leaves that no optimizer owns, and that have not moved since the first look."""
        known = [(leaf, values) for leaf, values in leaves if id(leaf) in self._in_modules]
        if not known:
            return []
        owned = _owned_ids()
        still = []
        for leaf, values in known:
            if id(leaf) in owned or _dist.is_flattened(leaf):
                continue
            if torch.equal(sample(values), self._in_modules[id(leaf)].first):
                still.append(leaf)
        return still


def _readable_leaves(done: Pass) -> list[tuple[Tensor, Tensor]]:
    leaves = []
    for leaf in done.unregistered():
        values = readable(leaf)
        if values is not None:
            leaves.append((leaf, values))
    return leaves


def _is_lone(leaf: Tensor) -> bool:
    """Tell whether no module and no optimizer has a leaf."""
    # `FullyShardedDataParallel` shows modules and optimizers views of its flat parameter.
    if _dist.is_flattened(leaf):
        return False
    for module in _live.instances(nn.Module):
        if _has_any(module, {id(leaf)}):
            return False
    return id(leaf) not in _owned_ids()


def _owned_ids() -> set[int]:
    """Return the ids of the parameters of all optimizers."""
    ids: set[int] = set()
    for optimizer in _live.instances(Optimizer):
        ids |= owned_ids(optimizer)
    return ids


def _has_any(module: nn.Module, ids: Collection[int]) -> bool:
    return any(id(param) in ids for param in module.parameters(recurse=False))


def _unowned_modules(leaves: Sequence[Tensor]) -> Iterator[Finding]:
    """Yield a finding for each model outside that trains, and has some of these parameters."""
    if not leaves:
        return
    ids = set(map(id, leaves))
    for root in _roots(ids):
        names = []
        for module_name, module in root.named_modules():
            # A network inside the loss is in evaluation mode, and not meant to train.
            if module.training:
                names += _names_in(module, module_name, ids)
        if not names:
            continue
        variable = _variable(root)
        shown = variable
        if not variable:
            shown = f"a {type(root).__name__}"
        number = len(names)
        total = len(list(root.parameters()))
        text = _UNOWNED.format(number=number, all=total, module=shown)
        if variable:
            names = [f"{variable}.{name}" for name in names]
        yield Finding("unowned-module", text, names=tuple(names))


def _names_in(module: nn.Module, module_name: str, ids: Collection[int]) -> list[str]:
    prefix = ""
    if module_name:
        prefix = f"{module_name}."
    params = module.named_parameters(recurse=False)
    return [f"{prefix}{name}" for name, param in params if id(param) in ids]


def _roots(ids: set[int]) -> list[nn.Module]:
    """Return the outermost modules that have some parameters."""
    modules = _live.instances(nn.Module)
    above = [module for module in modules if not ids.isdisjoint(map(id, module.parameters()))]
    inside: set[int] = set()
    for module in above:
        inside.update(map(id, module.children()))
    return [module for module in above if id(module) not in inside]


def _variable(root: nn.Module) -> str:
    def is_root(value: object) -> bool:
        return value is root

    return variable_of(is_root)
