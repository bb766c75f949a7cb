"""Finds trained tensors outside of the model that no optimizer owns."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurgeon.actions.checks.base import Finding, Pass, owned_ids
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


class OutsideLeaves:
    """Looks at the tensors that two passes reach besides the parameters of the model."""

    def __init__(self) -> None:
        self._passes = 0
        # With the first samples. Each leaf is held, so that no other leaf gets its id.
        self._noted: list[tuple[Tensor, Tensor]] = []

    def after_pass(self, done: Pass) -> Iterator[Finding]:
        self._passes += 1
        if self._passes == FIRST:
            for leaf in done.unregistered():
                values = readable(leaf)
                # `FullyShardedDataParallel` shows modules and optimizers views of its flat parameter.
                if values is not None and not _dist.is_flattened(leaf):
                    self._noted.append((leaf, sample(values)))
        elif self._passes == SECOND:
            yield from self._unowned(done)
            self._noted.clear()

    def _unowned(self, done: Pass) -> Iterator[Finding]:
        if not self._noted:
            return
        reached = set(map(id, done.unregistered()))
        for optimizer in _live.instances(Optimizer):
            reached -= owned_ids(optimizer)
        still = {}
        for leaf, before in self._noted:
            values = readable(leaf)
            if id(leaf) in reached and values is not None and torch.equal(sample(values), before):
                still[id(leaf)] = leaf
        held: set[int] = set()
        for root in _roots(still):
            held.update(map(id, root.parameters()))
            yield from _in_model(root, still)
        for index, leaf in still.items():
            if index not in held:
                yield Finding("outside", _OUTSIDE, names=(f"a tensor of shape {list(leaf.shape)}",))


def _roots(leaves: dict[int, Tensor]) -> list[nn.Module]:
    """Return the outermost modules that have some parameters."""
    holders = []
    inside: set[int] = set()
    for module in _live.instances(nn.Module):
        if not leaves.keys().isdisjoint(map(id, module.parameters())):
            holders.append(module)
            inside.update(map(id, module.children()))
    return [module for module in holders if id(module) not in inside]


def _in_model(root: nn.Module, leaves: dict[int, Tensor]) -> Iterator[Finding]:
    """Yield a finding on the parameters of a model that are among some leaves."""
    variable = variable_of(lambda value: value is root)
    names: list[str] = []
    for path, module in root.named_modules(prefix=variable):
        # A network inside the loss is in evaluation mode, and not meant to train.
        if module.training:
            params = module.named_parameters(path, recurse=False)
            names += [name for name, param in params if id(param) in leaves]
    if names:
        shown = variable
        if not variable:
            shown = f"a {type(root).__name__}"
        total = len(list(root.parameters()))
        text = _UNOWNED.format(number=len(names), all=total, module=shown)
        yield Finding("unowned-module", text, names=tuple(names))
