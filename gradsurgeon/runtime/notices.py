"""Notices on gradients that rules do not see, or see only in part, and on rules that never fire."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import islice

from torch import Tensor

from gradsurgeon.actions import EditRule, LossRule, Rule, TrapRule
from gradsurgeon.errors import printable, shorten_names
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import StepCounter
from gradsurgeon.runtime.loss_rules import RESTS
from gradsurgeon.runtime.training_events import BackwardPass
from gradsurgeon.tensors.measure import read

_PASSES = (
    "bounds the contribution of each backward pass, and several passes feed one update: their sum can "
    "exceed the bound; use `at: step` to bound the sum"
)
_CALLS = (
    "combines the losses of each backward pass, and several passes feed one update: the losses can conflict "
    "again in the sum of the passes"
)
_RANKS = (
    "bounds what each rank contributes, before DDP averages it over the ranks: the result depends on "
    "how the batch is divided among them; use `at: step` to bound the average"
)
_REENTRANT = (
    "gets parts of a gradient, never their sum: backward passes ran inside one another, as "
    "checkpoint(use_reentrant=True) makes them, and more than one of them reached {name}; use "
    "`use_reentrant=False`, or `at: step` to get the sum"
)


def count_passes(context: Context, done: BackwardPass) -> None:
    counters = context.counters.among(done.tensors)
    for counter in counters:
        counter.passes += 1
    if not context.program.contributing:
        return
    if done.held and any(read(list(done.held.values()))):
        several = [tensor for tensor in done.tensors if context.counters[tensor].passes > 1]
        _say(context, "accumulation", several, _PASSES, linear=False)
        _say(context, "accumulation", several, _CALLS, linear=False, of_losses=True)
    if done.averaging:
        averaged, param = context.ranks.averaged(), context.parameters.param
        reduced = (tensor for tensor in done.tensors if id(param(tensor)) in averaged)
        _say(context, "ranks", reduced, _RANKS, linear=False)
    parts = (tensor for tensor, times in done.calls.items() if times > 1)
    _say(context, "reentrant", parts, _REENTRANT, linear=True)


def awaits_sum(context: Context, held: Mapping[int, Tensor]) -> list[int]:
    """Return at most one tensor that shows whether a pass adds to earlier gradients, if a rule must warn about it."""
    rules, is_noticed = context.program.contributing, context.event_log.is_noticed
    added_to = (t for t in held if t in rules and context.counters[t].passes)
    bounded = (
        t
        for t in added_to
        if any(not (rule.linear or is_noticed("accumulation", rule.id)) for rule in rules[t])
    )
    return list(islice(bounded, 1))


def _say(
    context: Context,
    topic: str,
    tensors: Iterable[int],
    text: str,
    *,
    linear: bool,
    of_losses: bool = False,
) -> None:
    """Warn once per rule at `backward` that acts on some of the tensors; ``linear`` includes linear observers."""
    event_log = context.event_log
    for tensor in tensors:
        step = context.counters[tensor].step
        for rule in context.program.contributing.get(tensor, ()):
            concerned = not rule.linear or (linear and not isinstance(rule, EditRule))
            concerned &= isinstance(rule, LossRule) is of_losses
            if concerned and rule.steps.due(step) and not event_log.is_noticed(topic, rule.id):
                said = text.replace("{name}", context.program.names[tensor])
                event_log.notice_once(topic, said, rule=rule.id, step=step, warn=True)


def warn_of_missing_pass(context: Context, counter: StepCounter, having: Sequence[int]) -> None:
    """Warn the rules at `backward` and `accumulated` about an update whose gradients came from no backward pass.

    The script either assigned the gradients or updates twice from one gradient. These cases look alike: an
    unchanged tensor can have new content.
    """
    due_rules = context.due_rules(counter)
    for bound_rule in (*due_rules.in_backward, *due_rules.after):
        rule = bound_rule.rule
        if not isinstance(rule, TrapRule) and not set(having).isdisjoint(bound_rule.tensors):
            text = _NOT_BY_BACKWARD.format(point=rule.point)
            context.event_log.notice_once(
                "no pass", text, rule=rule.id, step=counter.step, warn=True
            )


_NOT_BY_BACKWARD = (
    "no backward pass gave the gradients of this update (the script assigns them, as "
    "`p.grad = torch.autograd.grad(...)` does, or updates twice from one gradient), and this rule sees only "
    "gradients that a backward pass delivers (`at: {point}`): use `at: step` to see the gradients of the update"
)


class UnownedParams:
    """Parameters that get gradients but that no stepped optimizer owns: each rule reports them once, by name."""

    def __init__(self, context: Context) -> None:
        self._context = context
        # The number of passes after which each parameter had no owner.
        self._seen: Counter[int] = Counter()
        self._told: defaultdict[str, set[int]] = defaultdict(set)

    def add(self, tensors: Sequence[int]) -> list[int]:
        """Count one more pass in which the tensors had no owner; return the tensors that just reached the limit."""
        self._seen.update(tensors)
        return [tensor for tensor in tensors if self._seen[tensor] == SETTLED]

    def tell(self, tensors: Collection[int]) -> None:
        """Report tensors that have reached the limit, once per rule."""
        settled = {tensor for tensor in tensors if self._seen[tensor] >= SETTLED}
        context, step = self._context, self._context.counters.latest
        for rule, matched in self._rules_at_update() if settled else ():
            news = [t for t in matched if t in settled and t not in self._told[rule.id]]
            cause = context.event_log.cause(rule.id)
            # A rule that was not due yet may still meet their optimizer. One notice per rule is enough.
            if not news or not (cause or context.event_log.has_fired(rule.id)):
                continue
            self._told[rule.id].update(news)
            if cause != _UNOWNED:
                names = shorten_names([context.program.names[tensor] for tensor in news])
                text = _NO_OPTIMIZER.format(names=names)
                context.event_log.emit("notice", text, rule=rule.id, step=step, warn=True)

    def _rules_at_update(self) -> Iterable[tuple[Rule, Sequence[int]]]:
        program = self._context.program
        stages = {stage.rule.id: stage for stage in (*program.traps, *program.at_step)}
        return [(stage.rule, stage.tensors) for stage in stages.values()]


# By this pass most scripts have stepped their optimizers; the session searches for others.
SETTLED = 3
_NO_OPTIMIZER = (
    "gradients come to {names}, but no optimizer that has stepped so far owns these parameters: this rule acts right "
    "before an update, so it does not act there; give them to an optimizer, or exclude them"
)


def count_due_rules(
    context: Context,
    counter: StepCounter,
    counter_of: Callable[[str], StepCounter],
    *,
    owned: bool,
    arrived: AbstractSet[int],
) -> None:
    """Count a step for every rule that is due in it.

    Args:
        context: the context of the session.
        counter: the counter of the optimizer that has stepped.
        counter_of: returns the counter of a module.
        owned: whether an optimizer owns parameters.
        arrived: the tensors that have received gradients since their last update.
    """
    for bound_rule in context.due_rules(counter).bound_rules:
        rule, tensors = bound_rule.rule, bound_rule.tensors
        cause = partial(_why_silent, context, rule, tensors, owned=owned, arrived=arrived)
        context.event_log.note_due(bound_rule.rule.id, counter.step, cause)
    for rule, owner in context.program.site_rules:
        if counter_of(owner) is counter and context.is_due(rule, counter):
            context.event_log.note_due(
                rule.id, counter.step, partial(_why_no_tensor, context, rule)
            )


_UNOWNED = "no optimizer that steps owns any parameter the rule matched"
_UNSEEN = "no backward pass that the rule could see gave its parameters their gradients"
_NONE_REACHED = "no gradient reached any parameter the rule matched"
_CLEARED = (
    "backward gave its parameters gradients, and the script cleared them before the update: call zero_grad() before "
    "backward or after step(), not between them"
)


def _why_silent(
    context: Context,
    rule: Rule,
    tensors: Sequence[int],
    *,
    owned: bool,
    arrived: AbstractSet[int],
) -> str:
    params = [param for param in context.parameters.params(tensors) if param is not None]
    if not params:
        return "the parameters the rule matched are gone from the model"
    if not any(param.requires_grad for param in params):
        return "no parameter the rule matched has requires_grad"
    if isinstance(rule, LossRule):
        return _why_no_loss(context, rule)
    if all(param.grad is None for param in params):
        return _NONE_REACHED if arrived.isdisjoint(tensors) else _CLEARED
    unowned = owned and context.counters[tensors[0]] is context.counters.common
    return _UNOWNED if unowned else _UNSEEN


def _why_no_loss(context: Context, rule: LossRule) -> str:
    if any(context.event_log.is_noticed(why, rule.id) for why in RESTS):
        return "another rank was paused or ran a plain `.backward()`, and all ranks took the plain sum with it"
    names = ", ".join(map(printable, rule.losses or ()))
    return f"no gradsurgeon.backward gave the losses the rule names ({names}), or they reach no parameter it matched"


def _why_no_tensor(context: Context, rule: Rule) -> str:
    if context.event_log.is_noticed("unreadable", rule.id):
        return "all tensors the rule matched had no numbers to read"
    if rule.target == "tensors":
        return "the script tagged no tensor with such a name"
    if isinstance(rule, LossRule):
        return "no two of the modules the rule matched sent gradients back to one tensor"
    if rule.ref.grad:
        return f"no gradient reached the {rule.ref.side} of any module the rule matched"
    return "no forward pass went through any module the rule matched"


def why_never(due: int, cause: str, *, unstepped: bool, stepped: bool) -> str:
    """Return the final message on a rule that never fired.

    Args:
        due: the number of steps in which it was due.
        cause: why the rule did not fire, empty if unknown.
        unstepped: whether gradients came and no update followed.
        stepped: whether there was any update.
    """
    if cause:
        was_due = f"was due in {due} steps and " if due else ""
        return f"{was_due}never fired: {cause}"
    if due:
        return "was due and never fired"
    if unstepped:
        return "never fired: gradients came, but no optimizer that owns them ever stepped"
    if not stepped:
        return (
            "never fired: no parameter had a gradient at the end of a backward pass (hooks that update inside backward, "
            "as LOMO does, drop each gradient before), and nothing was updated"
        )
    return "was never due"
