"""Skipping a step without asking the host: the optimizer reads a flag, the report follows.

Fused optimizers leave weights and state alone where a flag on the device says so. What the flag was
made of waits on the device, and is read when it has come to the host anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsurgeon import _dist, _torch
from gradsurgeon.runtime import measure
from gradsurgeon.runtime.accumulated_rules import GradientSnapshot
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import BoundRule, DueRules
from gradsurgeon.runtime.step_counter import StepCounter
from gradsurgeon.runtime.step_decision import then_of
from gradsurgeon.runtime.trap_evidence import GradientEvidence, uncounted

# Updates whose flags travel together. Ranks must stop at the same update, so that a number of updates
# and no clock on the wall decides when an error is due.
EVERY = 16
# The largest element of others may not fit in float32.
_DTYPES = {torch.float32, torch.float16, torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class DeferredStep:
    """One update that the device has decided on.

    Attributes:
        counter: of the optimizer.
        step: what the clock said.
        bound_rules: the traps that had a gradient to judge.
        tensors: their gradients.
        snapshots: what was seen after each backward pass, on the device.
    """

    counter: StepCounter
    step: int
    bound_rules: Sequence[BoundRule]
    tensors: tuple[int, ...]
    snapshots: tuple[GradientSnapshot, ...]

    def evidence(self, numbers: Sequence[float]) -> GradientEvidence:
        """Return what was seen, by the numbers of `decide_on_device`."""
        if math.isfinite(sum(numbers)):  # float32 cannot make a sum of doubles overflow
            return GradientEvidence((), self.tensors, {})
        worst = zip(self.tensors, numbers, strict=False)  # the norms follow
        now = {tensor: uncounted(number) for tensor, number in worst if not math.isfinite(number)}
        # The report reads the norms again, from the device: it is rare enough to wait for it.
        return GradientEvidence(self.snapshots, self.tensors, now)


def decide_on_device(case: DeferredStep, grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Judge the gradients of a case on their device.

    Returns:
        The flag that tells the optimizer to skip, 0-dim float32; and the largest element of each gradient,
        followed by the norms after backward, float32.
    """
    # Not of norms, which overflow over elements that are finite.
    worst = measure.norms(case.tensors, grads, math.inf)[0][1]
    with torch.no_grad():
        norms = [values.float() for snapshot in case.snapshots for _, values in snapshot.norms]
        flag = worst.isfinite().logical_not_().any().to(torch.float32)
        return flag, torch.cat([worst, *norms])


def can_decide_on_device(
    context: Context,
    due_rules: DueRules,
    grads: Sequence[Tensor],
    snapshots: Sequence[GradientSnapshot],
) -> bool:
    """Tell whether nobody on the host has to know what becomes of an update."""
    if context.mode != "act" or not grads or _torch.is_host(grads[0]):
        return False
    if any(then_of(bound_rule.rule) != "skip-step" for bound_rule in due_rules.traps):
        return False
    # Traps on module tensors and tags count on the host, and decide there.
    if any(then_of(rule) for rule, _ in context.program.site_rules):
        return False
    if due_rules.frozen or any(bound_rule.rule.may_overflow for bound_rule in due_rules.at_step):
        return False
    devices = {values.device for snapshot in snapshots for _, values in snapshot.norms}
    return (
        not _dist.any_sharded(grads)
        and devices | {grad.device for grad in grads} == {grads[0].device}
        and all(grad.dtype in _DTYPES and grad.layout == torch.strided for grad in grads)
    )
