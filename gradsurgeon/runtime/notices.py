"""What is said once of gradients that rules do not see, or not as the whole that they are taken for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from gradsurgeon.actions import EditRule, ObserverRule, Rule, TrapRule
from gradsurgeon.errors import printable
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.measure import read
from gradsurgeon.runtime.step_counter import StepCounter
from gradsurgeon.runtime.training_events import BackwardPass

_PASSES = (
    "bounds the contribution of each backward pass, and several feed one update: their sum can "
    "exceed the bound; use `at: step` to bound the sum"
)
_RANKS = (
    "bounds what each rank contributes, before DDP averages it over the ranks: what comes out depends on "
    "how the batch is divided among them; use `at: step` to bound the average"
)
_REENTRANT = (
    "{does}: backward passes ran inside one another, as checkpoint(use_reentrant=True) makes them, and "
    "more than one of them reached {{name}}; use `use_reentrant=False`, or `at: {point}` to {to} the sum"
)
_BOUNDS_PARTS = "bounds parts of a gradient, and their sum can exceed the bound"
_SEES_PARTS = "sees parts of a gradient, never their sum"


def count_passes(context: Context, done: BackwardPass) -> None:
    """Count a backward pass for the updates that it feeds, and say what a sum makes of a rule."""
    counters = context.counters.among(done.order)
    for counter in counters:
        counter.passes += 1
    if not context.program.per_tensor:
        return
    if done.added_to and any(read(list(done.added_to.values()))):
        several = (tensor for tensor in done.order if context.counters[tensor].passes > 1)
        _say(context, "accumulation", several, lambda rule: "" if rule.linear else _PASSES)
    if context.ranks.is_reducing:
        _say(context, "ranks", _averaged(context, done), lambda rule: "" if rule.linear else _RANKS)
    # Passes inside one another have been put together, piece by piece.
    if len(done.runs) > 1:
        several = (tensor for tensor, times in Counter(done.order).items() if times > 1)
        _say(context, "reentrant", several, _on_parts)


def warn_of_missing_pass(context: Context, counter: StepCounter, having: Sequence[int]) -> None:
    """Say of an update with gradients that no backward pass has given, which rules that concerns.

    Either the script has assigned them, or it updates twice from one gradient. Nobody can tell which: that
    a tensor is the same does not say that its content is.
    """
    due_rules = context.due_rules(counter)
    with_gradient = set(having)
    for bound_rule in (*due_rules.in_backward, *due_rules.after):
        if not isinstance(bound_rule.rule, TrapRule) and not with_gradient.isdisjoint(
            bound_rule.tensors
        ):
            text = _PAST_HOOKS.format(
                does=_DOES.get(bound_rule.rule.role, "acts on"), point=bound_rule.rule.point
            )
            context.event_log.once(
                "no pass", text, rule=bound_rule.rule.id, step=counter.step, warn=True
            )


_DOES = {"observe": "records", "capture": "captures", "edit": "edits"}
_PAST_HOOKS = (
    "no backward pass gave the gradients of this update (the script assigns them, as "
    "`p.grad = torch.autograd.grad(...)` does, or updates twice from one gradient), and this rule {does} only "
    "what a backward pass delivers (`at: {point}`): use `at: step` for what the optimizer gets"
)


def warn_of_unowned_params(context: Context, tensors: Sequence[int]) -> None:
    """Say which rules act right before an update on parameters that get none."""
    without = set(tensors)
    stages = [*context.program.traps, *context.program.at_step]
    for rule, matched in {stage.rule.id: stage.tensors for stage in stages}.items():
        names = [context.program.names[tensor] for tensor in matched if tensor in without]
        # Of one that has never fired that is said anyway.
        if names and context.event_log.has_fired(rule):
            text = (
                f"gradients come to {shorten_names(names)}, which no optimizer updates that has stepped so far: "
                "this rule acts right before an update, and so not there; give them to an optimizer, or "
                "exclude them"
            )
            step = context.counters.latest
            context.event_log.once("unowned", text, rule=rule, step=step, warn=True)


_SHOWN = 3


def shorten_names(names: Sequence[str]) -> str:
    """Return the first few of some names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(printable(name) for name in names[:_SHOWN]) + more


def _averaged(context: Context, done: BackwardPass) -> Iterator[int]:
    """Yield the tensors whose gradients of a pass are averaged over ranks."""
    averaged = context.ranks.averaged()
    yield from (tensor for tensor in done.order if id(context.parameters.param(tensor)) in averaged)


def _on_parts(rule: Rule) -> str:
    """Return what to say of a rule that acted on parts of the gradient of one pass."""
    if isinstance(rule, EditRule):
        return (
            "" if rule.linear else _REENTRANT.format(does=_BOUNDS_PARTS, point="step", to="bound")
        )
    records = ", and records one of them" if isinstance(rule, ObserverRule) else ""
    return _REENTRANT.format(does=_SEES_PARTS + records, point="accumulated", to="see")


def _say(context: Context, topic: str, tensors: Iterable[int], text: Callable[[Rule], str]) -> None:
    """Warn once of each rule at `backward` that acts on some of the tensors and that there is a text for."""
    per_tensor = context.program.per_tensor
    rules = {rule.id: rule for rules in per_tensor.values() for rule in rules}
    unsaid = (rule for rule in rules.values() if not context.event_log.said(topic, rule.id))
    texts = {rule.id: said for rule in unsaid if (said := text(rule))}
    if not texts:
        return
    for tensor in tensors:
        step = context.counters[tensor].step
        for rule in per_tensor.get(tensor, ()):
            if rule.id in texts and rule.steps.due(step):
                said = texts.pop(rule.id).replace("{name}", context.program.names[tensor])
                context.event_log.once(topic, said, rule=rule.id, step=step, warn=True)
