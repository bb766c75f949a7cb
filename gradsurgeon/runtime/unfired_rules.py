"""Why a rule that was due in a step has not fired."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from gradsurgeon.actions import Rule
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.step_counter import StepCounter


def count_due_rules(
    context: Context, counter: StepCounter, counter_of: Callable[[str], StepCounter], *, owned: bool
) -> None:
    """Note which rules were due in a step that is over, and warn of those that never fire.

    Args:
        context: what the parts of a session share.
        counter: whose step it was.
        counter_of: the clock of the optimizer that owns a module.
        owned: whether any optimizer is known to own parameters.
    """
    for bound_rule in context.due_rules(counter).bound_rules:
        cause = partial(_why_silent, context, bound_rule.tensors, owned=owned)
        context.event_log.passed(bound_rule.rule.id, counter.step, cause)
    for rule, owner in context.program.site_rules:
        if counter_of(owner) is counter and rule.steps.due(counter.step):
            context.event_log.passed(rule.id, counter.step, partial(_why_no_tensor, context, rule))


def _why_silent(context: Context, tensors: Sequence[int], *, owned: bool) -> str:
    params = [
        param for tensor in tensors if (param := context.parameters.param(tensor)) is not None
    ]
    if not params:
        return "the parameters it matched are gone from the model"
    if not any(param.requires_grad for param in params):
        return "no parameter it matched has requires_grad"
    if all(param.grad is None for param in params):
        return "no gradient reached any parameter it matched"
    if owned and context.counters[tensors[0]] is context.counters.common:
        return "no optimizer that steps owns any parameter it matched"
    return "the gradients of its parameters did not pass through its hooks"


def _why_no_tensor(context: Context, rule: Rule) -> str:
    if context.event_log.said("unreadable", rule.id):
        return "all tensors it matched had no numbers to read"
    if rule.target == "tensors":
        return "the script tagged no tensor with such a name"
    if rule.ref.grad:
        return f"no gradient reached the {rule.ref.side} of any module it matched"
    return "no forward pass went through any module it matched"
