"""Notices on gradients that rules do not see, or see only in part, and on rules that never fire."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice

from torch import Tensor

from gradsurgeon.actions import CheckRule, EditRule, LossRule, Rule
from gradsurgeon.errors import printable, shorten_names
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import StepCounter
from gradsurgeon.runtime.training_events import BackwardPass
from gradsurgeon.tensors.measure import read

# By this pass most scripts have stepped their optimizers; the session searches for others.
SETTLED = 3
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
_NOT_BY_BACKWARD = (
    "no backward pass gave the gradients of this update (the script assigns them, as "
    "`p.grad = torch.autograd.grad(...)` does, or updates twice from one gradient), and this rule sees only "
    "gradients that a backward pass delivers (`at: {point}`): use `at: step` to see the gradients of the update"
)
_NO_OPTIMIZER = (
    "gradients come to {names}, but no optimizer that has stepped so far owns these parameters: this rule acts right "
    "before an update, so it does not act there; give them to an optimizer, or exclude them"
)
_UNOWNED = "no optimizer that steps owns any parameter the rule matched"
_UNSEEN = "no backward pass that the rule could see gave its parameters their gradients"
_NONE_REACHED = "no gradient reached any parameter the rule matched"
_CLEARED = (
    "backward gave its parameters gradients, and the script cleared them before the update: call zero_grad() before "
    "backward or after step(), not between them"
)


class Notices:
    """Knows which gradients came, and reports each rule that misses some of them once.

    Args:
        context: the context of the session.
        counter_of: returns the counter of a module.
    """

    def __init__(self, context: Context, counter_of: Callable[[str], StepCounter]) -> None:
        self._context = context
        self._log = context.event_log
        self._counter_of = counter_of
        # The tensors that got gradients since their last update.
        self.arrived: set[int] = set()
        # The number of updates after which each parameter had a gradient and no owner, and the reported ones.
        self._unowned: Counter[int] = Counter()
        self._told: defaultdict[str, set[int]] = defaultdict(set)

    def awaits_sum(self, held: Mapping[int, Tensor]) -> list[int]:
        """Return at most one tensor that shows whether a pass adds to earlier gradients, if a rule must warn about it."""
        rules, counters = self._context.program.contributing, self._context.counters
        bounded = (
            tensor
            for tensor in held
            if tensor in rules
            and counters[tensor].passes
            and any(
                not (r.linear or self._log.is_noticed("accumulation", r.id)) for r in rules[tensor]
            )
        )
        return list(islice(bounded, 1))

    def passed(self, done: BackwardPass) -> None:
        """Warn rules at `backward` that see only a part of a gradient in this pass."""
        context = self._context
        if not context.program.contributing:
            return
        if done.held and any(read(list(done.held.values()))):
            several = [tensor for tensor in done.tensors if context.counters[tensor].passes > 1]
            self._say("accumulation", several, lambda rule: _CALLS if _of_loss(rule) else _PASSES)
        if done.averaging:
            averaged, param = context.ranks.averaged(), context.parameters.param
            reduced = (tensor for tensor in done.tensors if id(param(tensor)) in averaged)
            self._say("ranks", reduced, lambda rule: "" if _of_loss(rule) else _RANKS)
        parts = (tensor for tensor, times in done.calls.items() if times > 1)
        self._say("reentrant", parts, lambda rule: "" if _of_loss(rule) else _REENTRANT)

    def _say(self, topic: str, tensors: Iterable[int], text_of: Callable[[Rule], str]) -> None:
        """Warn once per rule whose result differs between the parts and their sum, if there is a text for it."""
        for tensor in tensors:
            step = self._context.counters[tensor].step
            for rule in self._context.program.contributing.get(tensor, ()):
                # Sums of scaled parts are right, but the sum of their statistics is not.
                splits = not rule.linear or (
                    topic == "reentrant" and not isinstance(rule, EditRule)
                )
                if splits and rule.steps.due(step) and not self._log.is_noticed(topic, rule.id):
                    text = text_of(rule).replace("{name}", self._context.program.names[tensor])
                    if text:
                        self._log.notice_once(topic, text, rule=rule.id, step=step, warn=True)

    def missing_pass(self, counter: StepCounter, having: Sequence[int]) -> None:
        """Warn the rules at `backward` and `accumulated` about an update whose gradients came from no backward pass.

        The script either assigned the gradients or updates twice from one gradient. These cases look alike: an
        unchanged tensor can have new content.
        """
        for bound in self._context.due_rules(counter).of_passes:
            if not set(having).isdisjoint(bound.tensors):
                text, rule = _NOT_BY_BACKWARD.format(point=bound.rule.point), bound.rule.id
                self._log.notice_once("no pass", text, rule=rule, step=counter.step, warn=True)

    def newly_unowned(self) -> list[int]:
        """Count an update; return the tensors that had gradients and no owner for some updates by now."""
        unowned = self._without_owner()
        self._unowned.update(unowned)
        return [tensor for tensor in unowned if self._unowned[tensor] == SETTLED]

    def _without_owner(self) -> list[int]:
        counters = self._context.counters
        return sorted(t for t in self.arrived if counters[t] is counters.common)

    def tell_unowned(self) -> None:
        """Report, once per rule, parameters that get gradients but that no stepped optimizer owns."""
        context, step = self._context, self._context.counters.latest
        program = context.program
        settled = {t for t in self._without_owner() if self._unowned[t] >= SETTLED}
        for stage in program.checks:
            if isinstance(stage.rule, CheckRule) and stage.rule.tells_owners:
                settled.difference_update(stage.tensors)
        stages = {stage.rule.id: stage for stage in (*program.traps, *program.at_step)}
        for rule, stage in stages.items() if settled else ():
            news = [t for t in stage.tensors if t in settled and t not in self._told[rule]]
            cause = self._log.cause(rule)
            # A rule that was not due yet may still meet their optimizer. One notice per rule is enough.
            if news and (cause or rule not in self._log.silent):
                self._told[rule].update(news)
                if cause != _UNOWNED:
                    names = shorten_names([program.names[tensor] for tensor in news])
                    text = _NO_OPTIMIZER.format(names=names)
                    self._log.emit("notice", text, rule=rule, step=step, warn=True)

    def count_due(self, counter: StepCounter, *, owned: bool) -> None:
        """Count a step for every rule that is due in it; ``owned`` if an optimizer owns parameters."""
        context = self._context
        for bound in context.due_rules(counter).bound_rules:
            cause = partial(self._why_silent, bound.rule, bound.tensors, owned=owned)
            self._log.note_due(bound.rule.id, counter.step, cause)
        for rule, owner in context.program.site_rules:
            if self._counter_of(owner) is counter and context.is_due(rule, counter):
                cause = partial(_why_no_tensor, context, rule)
                self._log.note_due(rule.id, counter.step, cause)

    def _why_silent(self, rule: Rule, tensors: Sequence[int], *, owned: bool) -> str:
        counters, params = self._context.counters, self._context.parameters.params(tensors)
        there = [param for param in params if param is not None]
        if not there:
            return "the parameters the rule matched are gone from the model"
        if not rule.ref.grad:
            return "no torch optimizer updated a parameter the rule matched"
        if not any(param.requires_grad for param in there):
            return "no parameter the rule matched has requires_grad"
        if isinstance(rule, LossRule):
            return _why_no_loss(rule)
        if all(param.grad is None for param in there):
            return _NONE_REACHED if self.arrived.isdisjoint(tensors) else _CLEARED
        return _UNOWNED if owned and counters[tensors[0]] is counters.common else _UNSEEN


def _of_loss(rule: Rule) -> bool:
    return isinstance(rule, LossRule)


def _why_no_loss(rule: LossRule) -> str:
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
