"""Finds trained tensors outside of the model that no optimizer owns."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurgeon.actions.checks.base import Check, Finding, Pass, owned_ids, param_ids
from gradsurgeon.common import _live
from gradsurgeon.common._script import variable_of
from gradsurgeon.tensors import _dist
from gradsurgeon.tensors.readable import readable
from gradsurgeon.tensors.sampling import sample

# The passes at which tensors are noted, and looked at again.
FIRST = 10
SECOND = 30
_OUTSIDE = (
    "{names} gets gradients in each backward pass and never moved: it belongs to no module and no optimizer. "
    "Register it as an attribute of a module (`nn.ParameterList` in the place of a list)"
)
_UNOWNED = (
    "{{names}}, {number} of {all} parameters of {module}, get gradients and never moved: no optimizer owns them. Give them "
    "to an optimizer, or set requires_grad to False"
)


class OutsideLeaves(Check):
    """Looks at the tensors that two passes reach besides the parameters of the model."""

    def __init__(self) -> None:
        self._passes = 0
        # With the first samples. Each leaf is held, so that no other leaf gets its id.
        self._noted: list[tuple[Tensor, Tensor]] = []

    def after_pass(self, done: Pass) -> Iterator[Finding]:
        self._passes += 1
        if self._passes == FIRST:
            self._noted = [*_reached(done)]
        elif self._passes == SECOND and self._noted:
            yield from self._unowned(done)
            self._noted.clear()

    def _unowned(self, done: Pass) -> Iterator[Finding]:
        owned = set[int]().union(*map(owned_ids, _live.instances(Optimizer)))
        own = owned.intersection(id(done.params[index]) for index in done.members)
        now = {}
        for leaf, values in _reached(done):
            if id(leaf) not in owned:
                now[id(leaf)] = values
        still = {}
        for leaf, before in self._noted:
            if id(leaf) in now and torch.equal(now[id(leaf)], before):
                still[id(leaf)] = leaf
        held = set[int]()
        for root in _roots(still):
            held |= param_ids(root)
            yield from _in_model(root, still, is_fact=_has_trained_twin(root, own))
        for index, leaf in still.items():
            if index not in held:
                yield Finding("outside", _OUTSIDE, names=(f"a tensor of shape {list(leaf.shape)}",))


def _reached(done: Pass) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the other leaves that a pass has reached, with samples."""
    for leaf in done.unregistered():
        values = readable(leaf)
        # `FullyShardedDataParallel` shows modules and optimizers views of its flat parameter.
        if values is not None and not _dist.is_flattened(leaf):
            yield leaf, sample(values)


def _roots(leaves: dict[int, Tensor]) -> list[nn.Module]:
    """Return the outermost modules that have some parameters."""
    modules = _live.instances(nn.Module)
    holders = [each for each in modules if not leaves.keys().isdisjoint(param_ids(each))]
    inside = set[int]()
    for holder in holders:
        inside.update(map(id, holder.children()))
    return [holder for holder in holders if id(holder) not in inside]


def _has_trained_twin(root: nn.Module, trained: set[int]) -> bool:
    """Tell whether trained parameters are of a model of the same class and shapes: this one may be its target network."""
    shapes = [param.shape for param in root.parameters()]
    for other in _live.instances(type(root)):
        is_alike = [param.shape for param in other.parameters()] == shapes
        if is_alike and trained.issuperset(param_ids(other)):
            return True
    return False


def _in_model(root: nn.Module, leaves: dict[int, Tensor], *, is_fact: bool) -> Iterator[Finding]:
    """Yield a finding on the parameters of a model that are among some leaves."""
    variable = variable_of(lambda value: value is root)
    names: list[str] = []
    for path, module in root.named_modules(prefix=variable):
        # A network inside the loss is in evaluation mode, and not meant to train.
        if module.training:
            for name, param in module.named_parameters(path, recurse=False):
                if id(param) in leaves:
                    names.append(name)
    if names:
        shown = variable or f"a {type(root).__name__}"
        text = _UNOWNED.format(number=len(names), all=len(param_ids(root)), module=shown)
        yield Finding("unowned-module", text, names=tuple(names), is_fact=is_fact)
