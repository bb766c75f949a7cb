"""Finds trained tensors outside of the model that no optimizer owns."""

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurgeon.actions.checks.base import (
    Check,
    Finding,
    Findings,
    Pass,
    Update,
    owned_ids,
    param_ids,
)
from gradsurgeon.actions.checks.models_of_passes import twins
from gradsurgeon.common import _live
from gradsurgeon.common._script import variable_of
from gradsurgeon.tensors import _dist
from gradsurgeon.tensors.readable import readable
from gradsurgeon.tensors.sampling import sample

# The passes, or updates, at which tensors are noted, and looked at again. The texts name the number between them.
FIRST = 10
SECOND = 30
_OUTSIDE = (
    "{names} gets gradients in each backward pass and did not move in 20 steps: it belongs to no module and no optimizer. "
    "Register it as an attribute of a module (`nn.ParameterList` in the place of a list)"
)
_UNOWNED = (
    "{{names}}, {number} of {all} parameters of {module}, get gradients and did not move in 20 steps: no optimizer owns them. Give them "
    "to an optimizer, or set requires_grad to False"
)


# The models that have been told: one pass may go through the models of several sessions.
_told: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class OutsideLeaves(Check):
    """Looks at the tensors that two passes reach besides the parameters of the model, or instead of them."""

    def __init__(self) -> None:
        self._passes = 0
        self._updates = 0
        # With the first samples. Each leaf is held, so that no other leaf gets its id.
        self._noted: list[tuple[Tensor, Tensor]] = []

    @property
    def waits_for(self) -> str:
        return "before_pass" if self._updates in (FIRST, SECOND) else ""

    def before_pass(self, starting: Pass) -> Findings:
        """Look at the passes of two updates that reach nothing else, unless gradients wait for an update."""
        if not self.waits_for or starting.graph is None:
            return
        leaves = [*starting.graph.leaves()]
        is_apart = len(starting.unregistered()) == len(leaves)
        if is_apart and not any(leaf.grad is not None and leaf.grad.any() for leaf in leaves):
            for finding in self._look(starting, self._updates):
                # A tensor of no module may be measured on purpose.
                if finding.cause == "unowned-module":
                    yield finding

    def after_pass(self, done: Pass) -> Findings:
        self._passes += 1
        return self._look(done, self._passes)

    def after_update(self, update: Update) -> Findings:  # noqa: ARG002 # of any optimizer
        self._updates += 1
        if min(self._passes, self._updates) > SECOND:
            self._noted.clear()
        return ()

    def _look(self, moment: Pass, number: int) -> Findings:
        if number == FIRST:
            self._noted += _reached(moment)
        elif number == SECOND and self._noted:
            return self._unowned(moment)
        return ()

    def _unowned(self, moment: Pass) -> Findings:
        """Yield findings on the leaves that have not moved since they were noted, and belong to no optimizer."""
        owned = set[int]()
        for optimizer in _live.instances(Optimizer):
            owned |= owned_ids(optimizer)
        own = owned.intersection(id(moment.params[index]) for index in moment.members)
        now = {}
        for leaf, values in _reached(moment):
            if id(leaf) not in owned:
                now[id(leaf)] = values
        still = {}
        for leaf, before in self._noted:
            if id(leaf) in now and torch.equal(now[id(leaf)], before):
                still[id(leaf)] = leaf
        held = set[int]()
        for root in _roots(still):
            held |= param_ids(root)
            if root not in _told:
                _told.add(root)
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
    return any(trained.issuperset(param_ids(twin)) for twin in twins(root))


def _in_model(root: nn.Module, leaves: dict[int, Tensor], *, is_fact: bool) -> Findings:
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
