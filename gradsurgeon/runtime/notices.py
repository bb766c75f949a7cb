"""Notices on gradients that rules do not see, or see only in part, and on rules that never fire."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor

from gradsurgeon.actions import CheckRule, LossRule, Rule
from gradsurgeon.errors import printable, shorten_names
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.device_outcome import DeviceOutcome, when_made
from gradsurgeon.runtime.effects import Effects, by_parameter
from gradsurgeon.runtime.passes import BackwardPass
from gradsurgeon.runtime.step_counters import StepCounter
from gradsurgeon.tensors.measure import read

# By this pass most scripts have stepped their optimizers; the session searches for others.
SETTLED = 3
_PASSES = "bounds the contribution of each backward pass, and several passes feed one update: use `at: step` to bound the sum"
_CALLS = "combines the losses of each backward pass, and several passes feed one update: the losses can conflict in their sum"
_ENGINE = "bounds what each backward pass of each rank contributes, before DeepSpeed adds up and averages: the average has no such bound"
_RANKS = (
    "bounds what each rank contributes, before DDP averages it: use `at: step` to bound the average"
)
_REENTRANT = (
    "gets parts of a gradient, never their sum: backward passes inside one another (checkpoint(use_reentrant=True)) reached "
    "{name}; use `use_reentrant=False`, or `at: step` to get the sum"
)
_NO_OPTIMIZER = "gradients come to {names}, but no optimizer that has stepped owns them: give them to one, or exclude them"
_NO_LOSS = "no gradsurgeon.backward gave the losses the rule names ({names}), or they reach no parameter it matched"
_NO_NAME = "no loss of an update has such a name: `loss` is what `backward()` is called on, `loss[1]` the second one of an update; the last update had {names}"
_UNOWNED = "no optimizer that steps owns any parameter the rule matched"
_UNSEEN = "no backward pass that the rule could see gave its parameters their gradients"
_NONE_REACHED = "no gradient reached any parameter the rule matched"
_CLEARED = "the script cleared the gradients between backward and the update: call zero_grad() before backward or after step()"


class Notices:
    """Knows which gradients came, and reports each rule that misses some of them once."""

    def __init__(self, context: Context, effects: Effects) -> None:
        self._context = context
        self._effects = effects
        # Maps each parameter to the rules that edit or record the contribution of one pass, rules on losses first.
        combining = [effect for effect in effects.on_params("losses") if effect.rule.edits]
        self._contributing = by_parameter([*combining, *effects.on_params("backward")])
        self._log = context.event_log
        # The tensors that got gradients since their last update.
        self.arrived: set[int] = set()
        # The number of updates after which each parameter had a gradient and no owner.
        self._unowned: Counter[int] = Counter()

    def awaits_sum(self, held: Mapping[int, Tensor]) -> list[int]:
        """Return at most one tensor that shows whether a pass adds to earlier gradients, if a rule must warn about it."""
        counters = self._context.counters
        for index in held:
            if not counters[index].passes:
                continue
            for effect in self._contributing.get(index, ()):
                rule = effect.rule
                if not rule.linear and not self._log.is_noticed("accumulation", rule.id):
                    return [index]
        return []

    def passed(self, done: BackwardPass) -> None:
        """Warn rules at `backward` that see only a part of a gradient in this pass."""
        context = self._context
        if not self._contributing:
            return
        # Computed only if a rule is to be warned.
        several = (index for index in done.indices if context.counters[index].passes > 1)
        if context.parameters.elsewhere is not None:
            # It adds gradients up and averages them outside of `.grad`.
            summed = done.indices if context.are_averaged else several
            self._warn_rules("engine", summed, _ENGINE)
        elif done.held and any(read(list(done.held.values()))):
            self._warn_rules("accumulation", several, _PASSES, of_losses=_CALLS)
        if done.averaging:
            averaged = context.ranks.averaged()
            param = context.parameters.param
            reduced = [index for index in done.indices if id(param(index)) in averaged]
            self._warn_rules("ranks", reduced, _RANKS)
        for index, times in done.seen.calls.items():
            if times > 1:
                self._warn_rules("reentrant", [index], _REENTRANT)

    def _warn_rules(
        self, topic: str, indices: Iterable[int], text: str, *, of_losses: str = ""
    ) -> None:
        """Warn once per rule whose result differs between the parts and their sum, if there is a text for it."""
        for index in indices:
            step = self._context.counters[index].step
            for effect in self._contributing.get(index, ()):
                rule = effect.rule
                template = text
                if isinstance(rule, LossRule):
                    template = of_losses
                # Sums of scaled parts are right, but the sum of their statistics is not.
                differs = not rule.linear or (topic == "reentrant" and not rule.edits)
                if template and differs and rule.steps.includes(step):
                    message = template.replace("{name}", self._context.names[index])
                    self._log.notice_once(topic, message, rule=rule.id, step=step, warn=True)

    def newly_unowned(self) -> list[int]:
        """Count an update; return the tensors that had gradients and no owner for some updates by now."""
        unowned = self._without_owner()
        self._unowned.update(unowned)
        return [index for index in unowned if self._unowned[index] == SETTLED]

    def _without_owner(self) -> list[int]:
        counters = self._context.counters
        return [index for index in sorted(self.arrived) if counters[index] is counters.common]

    def warn_of_unowned(self) -> None:
        """Report, once per rule, parameters that get gradients but that no stepped optimizer owns."""
        settled = {index for index in self._without_owner() if self._unowned[index] >= SETTLED}
        if not settled:
            return
        for effect in self._effects.on_params("check"):
            if isinstance(effect.rule, CheckRule) and effect.rule.tells_owners:
                settled.difference_update(effect.indices)
        for effect in (*self._effects.judging, *self._effects.on_params("step")):
            if effect.rule.judges_losses:
                continue
            indices = [index for index in effect.indices if index in settled]
            rule = effect.rule.id
            cause = self._log.cause(rule)
            # A rule that was not due yet may still meet their optimizer.
            was_due = cause or rule not in self._log.silent
            if indices and was_due and cause != _UNOWNED:
                text = _NO_OPTIMIZER.format(names=shorten_names(self._context.names_of(indices)))
                self._log.notice_once("unowned", text, rule=rule, warn=True)

    def count_due(
        self, counter: StepCounter, outcome: DeviceOutcome | None = None, *, owned: bool
    ) -> None:
        """Count a step for every rule that is due in it; ``owned`` if an optimizer owns parameters."""
        context = self._context
        for bound in self._effects.due(counter).bound:
            cause = partial(self._why_silent, bound.rule, bound.indices, owned=owned)
            # With an ``outcome``, what a rule has done is not told yet.
            when_made(outcome, self._log.note_due, bound.rule.id, counter.step, cause)
        for effect, owner in self._effects.sites.items():
            rule = effect.rule
            if context.counters.of_module(owner) is counter and context.is_due(rule, counter):
                cause = partial(_why_no_tensor, rule)
                self._log.note_due(rule.id, counter.step, cause)

    def _why_silent(self, rule: Rule, indices: Sequence[int], *, owned: bool) -> str:
        params = self._context.parameters.present(indices)
        if not params:
            return "the parameters the rule matched are gone from the model"
        if not rule.ref.grad:
            return self._why_no_value(rule)
        if not any(param.requires_grad for param in params):
            return "no parameter the rule matched has requires_grad"
        if isinstance(rule, LossRule):
            names = [printable(name) for name in rule.losses or ()]
            return _NO_LOSS.format(names=", ".join(names))
        if all(param.grad is None for param in params):
            return _NONE_REACHED if self.arrived.isdisjoint(indices) else _CLEARED
        reason = _UNSEEN
        counters = self._context.counters
        if owned and counters[indices[0]] is counters.common:
            reason = _UNOWNED
        return reason

    def _why_no_value(self, rule: Rule) -> str:
        if rule.judges_losses:
            names = [f"`{name}`" for name in self._context.curves.feeding]
            return _NO_NAME.format(names=", ".join(names) or "no loss of a single number")
        if rule.ref.side == "state":
            return "no optimizer keeps this of a parameter the rule matched"
        return "no torch optimizer updated a parameter the rule matched"


def _why_no_tensor(rule: Rule) -> str:
    if rule.target == "tensors":
        return "the script tagged no tensor with such a name, or none with numbers to read"
    if isinstance(rule, LossRule):
        return "no two of the modules the rule matched sent gradients back to one tensor"
    if rule.ref.grad:
        return f"no gradient reached the {rule.ref.side} of any module the rule matched"
    return "no forward pass went through any module the rule matched, or none with numbers to read"
