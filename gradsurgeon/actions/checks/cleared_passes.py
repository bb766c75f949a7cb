"""Finds backward passes whose gradients are cleared before the update, as by `zero_grad()` for each micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsurgeon.actions.checks.base import Finding, Findings, Pass, Update
from gradsurgeon.actions.checks.optimizer_checks import OptimizerCheck, Streak
from gradsurgeon.common._script import running_lines
from gradsurgeon.tensors import _torch, _unsaved_hooks
from gradsurgeon.tensors.backward_graph import operation_of
from gradsurgeon.tensors.sampling import sample

_IN_A_ROW = 10
# A clip shortens a gradient and leaves its direction.
_SAME_DIRECTION = 1 - 1e-4
_CLEARED = (
    "the gradients of {cleared} of {passes} backward passes were cleared before the next one, in ten updates in a row up to step "
    "{step}: each update uses the last pass alone. Call `zero_grad()` once per update, before its first backward pass"
)
_NOTHING = torch.empty(0)


@dataclass(slots=True)
class _Seen:
    """A pass since the last update: a parameter that it reached, and how often its gradient had been written then."""

    index: int
    writes: int
    operation: str
    # The number of its loss: torch numbers the nodes of a thread upwards.
    number: int
    # The lines of the script that ran the pass.
    lines: list[str]
    weight: Tensor = _NOTHING
    grad: Tensor = _NOTHING
    # Whether no gradient of the pass may have served for anything but the update.
    is_own: bool = True
    is_cleared: bool = False


class ClearedPasses(OptimizerCheck):
    """Looks at the passes between the updates of one optimizer."""

    def __init__(self) -> None:
        self._passes: list[_Seen] = []
        # The passes of the last update: whether each was cleared, and the operation that made its loss.
        self._last: list[tuple[bool, str]] = []
        self._streak = Streak(_IN_A_ROW)
        self._rests = False

    def before_pass(self, starting: Pass) -> Findings:
        if not self._passes or self._rests:
            return ()
        seen = self._passes[-1]
        grad = starting.grads.get(seen.index)
        is_written = grad is None or _torch.writes(grad) != seen.writes
        seen.is_cleared = is_written and not starting.is_any([seen.index])
        if (
            seen.is_cleared
            and len(seen.weight)
            and starting.graph
            and seen.index in starting.params
        ):
            numbers = [node._sequence_nr() for node in starting.graph.nodes()]  # noqa: SLF001 # no public name
            # A forward pass that both share, or weights that moved in between, have a use.
            is_same = torch.equal(seen.weight, sample(starting.params[seen.index]))
            seen.is_own &= is_same and min(numbers) > seen.number
        return ()

    def after_pass(self, done: Pass) -> Findings:
        reached = [index for index in self.owner.sampled if index in done.reached]
        with_grad = [index for index in reached if index in done.grads]
        if self._rests or not with_grad or done.graph is None:
            return ()
        first = with_grad[0]
        root = done.graph.roots[0]
        operation = "" if isinstance(root, Tensor) else operation_of(root.name())
        writes = _torch.writes(done.grads[first])
        seen = _Seen(
            first, writes, operation, done.graph.made, [line for line, _ in running_lines()]
        )
        if self._streak.count:
            # Attacks need the gradient of an input, players of a game the gradient of another one.
            ids = set(map(id, done.find(self.owner.indices)))
            seen.is_own = ids.issuperset(map(id, done.graph.leaves()))
            seen.weight = sample(done.params[first])
            seen.grad = sample(done.grads[first])
        self._passes.append(seen)
        return ()

    def before_update(self, update: Update) -> Findings:
        """Yield a finding if the same passes were cleared in each of the last updates."""
        passes = self._passes
        self._passes = []
        cleared = []
        kinds = []
        for seen in passes:
            kinds.append((seen.is_cleared, seen.operation))
            if seen.is_cleared:
                cleared.append(seen)
        is_same = kinds == self._last
        self._last = kinds
        is_used = bool(cleared) and is_same and passes[-1].index in update.grads
        if is_used and self._streak.count:
            self._rests |= not _are_lost(passes, cleared, update)
        if self._streak.reaches(is_used) and not self._rests and not _has_hooks(update):
            text = _CLEARED.format(step=update.step, cleared=len(cleared), passes=len(passes))
            # Nobody sees who reads a gradient. A loss of another kind, or at another line, is likely to have its use.
            origins = {(seen.operation, *seen.lines) for seen in [*cleared, passes[-1]]}
            yield Finding("cleared", text, is_fact=len(origins) > 1)


def _are_lost(passes: Sequence[_Seen], cleared: Sequence[_Seen], update: Update) -> bool:
    """Tell whether an update uses its last pass alone, and no gradient of the others may have served for anything."""
    used = passes[-1]
    grad = sample(update.grads[used.index])
    is_alone = torch.cosine_similarity(grad, used.grad, 0) > _SAME_DIRECTION
    are_alike = len({seen.index for seen in passes}) == 1
    return bool(is_alone) and are_alike and all(seen.is_own for seen in cleared)


def _has_hooks(update: Update) -> bool:
    """Tell whether the script has hooks on parameters or modules: they may have used the gradients."""
    root = update.model.root()
    for param in update.params.values():
        if param._backward_hooks or param._post_accumulate_grad_hooks:  # noqa: SLF001 # no public names
            return True
    return root is None or any(map(_unsaved_hooks.has_others, root.modules()))
