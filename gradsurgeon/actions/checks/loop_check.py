"""Finds faults of a training loop: gradients kept too long or lost, scaled clips, modes, losses."""

import math
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from gradsurgeon.actions.checks.base import Check, Finding, Findings, Pass, Update
from gradsurgeon.actions.checks.cleared_passes import ClearedPasses
from gradsurgeon.actions.checks.frozen_moves import FrozenMoves
from gradsurgeon.actions.checks.kept_gradients import IN_A_ROW, Gone, Stale, Twice
from gradsurgeon.actions.checks.loop_facts import LoopFacts, RateFacts
from gradsurgeon.actions.checks.loss_scale import LossScale
from gradsurgeon.actions.checks.optimizer_checks import Checks
from gradsurgeon.actions.checks.script_clips import ClipOrder
from gradsurgeon.actions.checks.stale_copies import StaleCopies
from gradsurgeon.actions.checks.undone_updates import UndoneUpdates
from gradsurgeon.tensors.backward_graph import operation_of

# After so many updates without a fault, only a few in a hundred are looked at.
SETTLED = 20
LATER = 100
# So few parameters tell whether gradients were cleared: a script clears all of an optimizer or none.
_MOST_SAMPLED = 4

_EVALUATED = (
    "since step {since} each forward pass that feeds an update has run in evaluation mode: dropout is off, and batch "
    "norms use their running statistics. Call `model.train()` after each evaluation"
)
_LOSS = "the loss of step {step}{maker} was {value} although all gradients are finite. {remedy}"
_UNSEEN = "Its graph does not show which operation made it: look at what it is made of"
_GROWN = (
    "It has outgrown its dtype, or is made of the logarithm of 0: look at the losses before this step, at the learning rate, "
    "and at what goes into a logarithm"
)
_BY_A_NUMBER = frozenset({"MulBackward0", "DivBackward0"})


class LoopCheck(Checks):
    """Looks at gradients before and after passes and updates, and at the loss and the mode of the model."""

    def __init__(self) -> None:
        super().__init__(
            [NonfiniteLosses(), Mode(), StaleCopies(), LoopFacts()],
            Gone,
            Stale,
            Twice,
            FrozenMoves,
            UndoneUpdates,
            ClipOrder,
            ClearedPasses,
            LossScale,
            RateFacts,
        )

    def before_unscaling(self, update: Update) -> Findings:
        for check in self.owner_of(update).checks:
            yield from check.before_unscaling(update)

    def before_update(self, update: Update) -> Findings:
        owner = self.owner_of(update)
        if owner.looks:
            owner.indices = list(update.groups)
            owner.others = [other for other in self.owners.values() if other is not owner]
            stride = max(1, len(owner.indices) // _MOST_SAMPLED)
            sampled = owner.indices[::stride][:_MOST_SAMPLED]
            # Gradients that two optimizers use are seen at a parameter that both have.
            owner.sampled = list(dict.fromkeys([*sorted(owner.shared)[:1], *sampled]))
        yield from super().before_update(update)

    def after_update(self, update: Update) -> Findings:
        yield from super().after_update(update)
        owner = self.owner_of(update)
        # One update more than a fault needs, because the first of them shows what the next one begins with.
        owner.looks = owner.updates < SETTLED or owner.updates % LATER <= IN_A_ROW


class NonfiniteLosses(Check):
    """Reports a loss that is not finite at the next update, unless the script clears its gradients before."""

    def __init__(self) -> None:
        self._findings: list[Finding] = []
        # Whether losses are not finite since a pass whose gradients were not either.
        self._follows_nonfinite_grads = False

    def before_pass(self, starting: Pass) -> Findings:
        if self._findings and not starting.is_any(starting.members):
            self._findings.clear()
        return ()

    def after_pass(self, done: Pass) -> Findings:
        loss = done.loss
        if loss is not None:
            done.later(loss.float(), partial(self._judge, done))
        return ()

    def before_update(self, update: Update) -> Findings:  # noqa: ARG002 # of any optimizer
        findings = self._findings
        self._findings = []
        return findings

    def _judge(self, done: Pass, seen: Tensor) -> Findings:
        loss = float(seen)
        if math.isfinite(loss):
            self._follows_nonfinite_grads = False
            return ()
        # The trap reports a NaN that is in the gradients also, and weights may keep it.
        self._follows_nonfinite_grads |= not _are_finite(done)
        if self._follows_nonfinite_grads or not done.grads:
            return ()
        value = f"{loss:g}"
        remedy = _GROWN
        if math.isnan(loss):
            value = "NaN"
            remedy = _UNSEEN
        source = done.source_in_loss()
        if source is not None and source.diagnosis is not None and source.diagnosis.cause:
            remedy = f"{source.diagnosis.headline}: {source.diagnosis.cause.advice}"
        text = _LOSS.format(step=done.step, maker=_maker(done), value=value, remedy=remedy)
        self._findings.append(Finding("loss", text, step=done.step, source=source))
        return ()


class Mode(Check):
    """Looks for a model that an evaluation has left in evaluation mode."""

    def __init__(self) -> None:
        # For each pass since the last update, whether it ran in evaluation mode.
        self._modes: set[bool | None] = set()
        # The number of evaluations before the last update from a forward pass in training mode, and whether there was one.
        self._evaluations: int | None = None
        self._has_trained = False
        # The updates since then.
        self._steps: list[int] = []
        # The script may change the mode itself: back after an evaluation, or for training.
        self._is_meant = False

    def after_pass(self, done: Pass) -> Findings:
        self._modes.add(done.model.is_evaluated())
        return ()

    def before_update(self, update: Update) -> Findings:
        modes = self._modes - {None}
        self._modes = set()
        is_known = update.evaluations is not None
        is_same = update.evaluations == self._evaluations
        if False in modes:
            self._is_meant |= self._has_trained and not is_same
            self._has_trained = True
            self._evaluations = update.evaluations
            self._steps = []
        elif modes and self._has_trained:
            self._is_meant |= not self._steps and is_known and is_same
            self._steps.append(update.step)
            if len(self._steps) == IN_A_ROW and not self._is_meant:
                yield Finding("mode", _EVALUATED.format(since=self._steps[0]))


def _are_finite(done: Pass) -> bool:
    for index in done.indices:
        if index in done.grads and not done.has_finite_grad(index):
            return False
    return True


def _maker(done: Pass) -> str:
    """Return the operation that made the loss, such as ``nll_loss``; multiplying by a number made none."""
    if done.graph is None:
        return ""
    node: Any = done.graph.roots[0]
    while isinstance(node, Node) and node.name() in _BY_A_NUMBER:
        node, _ = node.next_functions[0]
    if not isinstance(node, Node):
        return ""
    return f" (made by `{operation_of(node.name())}`)"
