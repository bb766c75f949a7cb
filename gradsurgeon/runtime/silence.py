"""Why a rule that was due in a step has not fired."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from gradsurgeon.actions import Rule
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.state import State


def notice_silence(
    state: State, clock: Clock, clock_of: Callable[[str], Clock], *, owned: bool
) -> None:
    """Note which rules were due in a step that is over, and warn of those that never fire.

    Args:
        state: what the parts of a session share.
        clock: whose step it was.
        clock_of: the clock of the optimizer that owns a module.
        owned: whether any optimizer is known to own parameters.
    """
    for lane in state.agenda(clock).lanes:
        cause = partial(_why_silent, state, lane.tensors, owned=owned)
        state.journal.passed(lane.rule.id, clock.step, cause)
    for rule, owner in state.program.site_rules:
        if clock_of(owner) is clock and rule.steps.due(clock.step):
            state.journal.passed(rule.id, clock.step, partial(_why_no_tensor, state, rule))


def _why_silent(state: State, tensors: Sequence[int], *, owned: bool) -> str:
    params = [param for tensor in tensors if (param := state.targets.param(tensor)) is not None]
    if not params:
        return "the parameters it matched are gone from the model"
    if not any(param.requires_grad for param in params):
        return "no parameter it matched has requires_grad"
    if all(param.grad is None for param in params):
        return "no gradient reached any parameter it matched"
    if owned and state.clocks[tensors[0]] is state.clocks.common:
        return "no optimizer that steps owns any parameter it matched"
    return "the gradients of its parameters did not pass through its hooks"


def _why_no_tensor(state: State, rule: Rule) -> str:
    if state.journal.said("vmap", rule.id):
        return "all tensors it matched were those of vmap"
    if rule.target == "tensors":
        return "the script tagged no tensor with such a name"
    if rule.ref.grad:
        return f"no gradient reached the {rule.ref.side} of any module it matched"
    return "no forward pass went through any module it matched"
