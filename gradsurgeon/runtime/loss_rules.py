"""Rules on the gradients of named losses: which rules act in a pass, on all ranks alike, and how parameters get the result."""

import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from gradsurgeon.actions import LossRule
from gradsurgeon.errors import GradSurgeonError, did_you_mean, printable
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.effects import Effects
from gradsurgeon.runtime.loss_effects import DueLossRule, LossEffect
from gradsurgeon.runtime.rank_agreement import RankAgreement
from gradsurgeon.tensors import _dist, _numbers, _torch
from gradsurgeon.tensors._torch import uncompiled
from gradsurgeon.tensors.inner_products import weighted_sum

_UNLIKE = (
    "rule {rule}: ranks whose gradients are averaged must pass the same losses, in this pass they did not: call "
    "gradsurgeon.backward with the same names on all ranks (a zero for a missing loss), and pause all ranks or none"
)
_UNKNOWN = (
    "a backward pass reached {name} without the losses being known: call "
    'gradsurgeon.backward({{"seg": seg_loss, ...}}) instead of `.backward()` on the sum of the losses'
)
# The gradients of single losses must add up to the gradient of their sum, except for rounding, which is large in half
# precision.
_TOLERANCE, _ROUNDING = 0.05, 1e-3
_TWICE = (
    "rule {rule}: the gradients that the single losses give {name} do not add up to the gradient of their sum (off by "
    "{off:.3g} of {size:.3g}): the graph cannot be run twice. Possible causes: a custom autograd function that writes to "
    "its saved tensors, or a checkpoint that draws other random numbers (preserve_rng_state=False)"
)
_ASTRAY = (
    "rule {rule}: {name} got a gradient that no single loss gives it: part of the graph cannot be run for one loss "
    "alone, as with checkpoint(use_reentrant=True); use use_reentrant=False"
)
_DIVIDED = (
    "rule {rule}: the parameter {name} is sharded (fully_shard, FullyShardedDataParallel, tensor parallelism), so the "
    "gradients of single losses cannot be taken: combine at the inputs of the heads, `modules: [...]` and "
    "`tensor: input.grad`"
)


class NamedPass:
    """A backward pass of the sum of named losses: parameters get combined gradients, and these are checked."""

    def __init__(self, due: Sequence[DueLossRule]) -> None:
        self._params: dict[int, Tensor] = {}
        for due_rule in due:
            self._params.update(due_rule.params_by_id())
        # Each rule checks once whether the passes agree; after that only the combined gradients are kept.
        self._unverified = [due_rule for due_rule in due if not due_rule.effect.needs_no_check]
        self._accumulation = _torch.Accumulation()
        # The ids of the parameters that single losses gave a gradient; ``None`` if no gradients were taken.
        self._given: frozenset[int] | None = None
        # The ids of the parameters that got a gradient in this pass, but none from a single loss.
        self._astray: set[int] = set()
        self._problem = ""
        self._combined: dict[int, Tensor] = {}
        # Maps each parameter to the sum of the gradients of single losses, and the sum of their norms. If losses cancel,
        # rounding is small next to each gradient, but not next to their sum.
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}
        # Maps each parameter to the norm of the difference between the passes, and the sum of all norms.
        self._differences: dict[int, tuple[Tensor, Tensor]] = {}

    def combine(
        self, grads: dict[int, dict[str, Tensor]], weights: Mapping[int, Mapping[str, float]]
    ) -> None:
        """Combine gradients, by the ids of the parameters and then by loss, and remove them from ``grads`` to free memory."""
        self._given = frozenset(grads)
        to_verify: set[int] = set()
        for due_rule in self._unverified:
            to_verify.update(due_rule.params_by_id())
        for key in self._given:
            column = grads.pop(key)
            if key in to_verify:
                norms = torch.stack([_numbers.norm(grad) for grad in column.values()])
                self._sums[key] = weighted_sum(column, {}), norms.sum()
            if key in weights:
                self._combined[key] = weighted_sum(column, weights[key])

    @contextmanager
    def delivering(self) -> Iterator[None]:
        """Give parameters their combined gradients within the context; afterwards check the passes."""
        token = current.set(self)
        params: list[Tensor] = []
        if self._given is not None:
            params += self._params.values()
        handles = [_torch.register_first(param, self._hook(param)) for param in params]
        try:
            yield
        finally:
            current.reset(token)
            for handle in handles:
                handle.remove()
            for param in params:
                _torch.forget_empty_hooks(param)
        self._check()
        if self._problem:
            raise GradSurgeonError(self._problem)

    def _hook(self, param: Tensor) -> Callable[[Tensor], Tensor | None]:
        key = id(param)

        @uncompiled
        def deliver(grad: Tensor | None) -> Tensor | None:
            # A hook of the script may call `torch.autograd.grad` meanwhile: such passes are ignored.
            if grad is None or not self._accumulation.runs(param):
                return None
            if self._given is None or key not in self._given:
                self._astray.add(key)
            elif key in self._sums:
                total, size = self._sums.pop(key)
                with torch.no_grad():
                    self._differences[key] = _numbers.norm(grad - total), _numbers.norm(grad) + size
            return self._combined.pop(key, None)

        deliver.__name__ = "gradsurgeon.backward"
        return deliver

    def reached(self, context: Context, rule: LossRule, indices: Sequence[int]) -> None:
        """Compare the parameters that got gradients with the parameters that the rules expected."""
        for index, param in zip(indices, context.parameters.params(indices), strict=True):
            if _dist.is_divided(param):
                problem = _DIVIDED
            elif id(param) not in self._params or id(param) in self._astray:
                problem = _ASTRAY
            else:
                continue
            self._problem = problem.format(rule=rule.id, name=printable(context.names[index]))

    def _check(self) -> None:
        """Refuse a graph in which the gradients of single losses do not add up to the gradient of their sum."""
        differences_by_id = {}
        for key, (off, size) in self._differences.items():
            differences_by_id[key] = float(off), float(size)
        for due_rule in self._unverified:
            differences = {}
            for index, param in due_rule.params.items():
                if id(param) in differences_by_id:
                    differences[index] = differences_by_id[id(param)]
            # A gradient of pure rounding, such as of a bias before a batch norm, differs in every pass.
            least = _ROUNDING * math.hypot(*(size for _, size in differences.values()))
            for index, (distance, norm) in differences.items():
                if distance > max(least, _TOLERANCE * norm):
                    name = due_rule.name(index)
                    raise GradSurgeonError(
                        _TWICE.format(
                            rule=due_rule.effect.rule.id, name=name, off=distance, size=norm
                        )
                    )
            # Non-finite gradients prove nothing about the graph, so the rule stays unverified.
            if differences and math.isfinite(least):
                due_rule.effect.needs_no_check = True


# The pass of named losses that this thread runs.
current: ContextVar[NamedPass | None] = ContextVar("current", default=None)


class LossRules:
    """The rules of one session on parameters that take the gradient of each loss."""

    def __init__(self, context: Context, agreement: RankAgreement, effects: Effects) -> None:
        self.context = context
        self._agreement = agreement
        on_params = effects.on_params("losses")
        self.effects = [effect for effect in on_params if isinstance(effect, LossEffect)]
        # Maps each rule id to the losses that calls passed while the rule was due.
        self._given: dict[str, set[str]] = {}

    def due(self, leaves: Sequence[Tensor], given: Collection[str] | None) -> list[DueLossRule]:
        """Return the rules that act in a pass. Runs a collective if ranks average the pass.

        If ranks average gradients, a rule acts on all parameters that it matches: ranks must measure equal tensors.

        Args:
            leaves: the leaves that the pass reaches.
            given: the names of its losses; ``None`` for a plain pass, in which no rule acts.
        """
        context = self.context
        reached = set(context.parameters.owned(leaves))
        keys = set(map(id, leaves))
        acting: list[DueLossRule] = []
        # A paused session does this too: other ranks may wait for it.
        for effect in self.effects:
            rule = effect.rule
            counters = context.counters
            indices = [t for t in effect.indices if rule.steps.includes(counters[t].step)]
            if not indices:
                continue
            groups, averaged = context.ranks.averaging(effect.indices, keys)
            reaches = not reached.isdisjoint(indices)
            candidates = self._trained(indices)
            if groups:
                self._agreement.roll(groups)
                names = [] if given is None else sorted(given)
                _refuse_unlike(rule, groups, (reaches, context.paused, names))
                # Ranks that average know no better which parameters the others reach.
                params = candidates
            else:
                params = {t: param for t, param in candidates.items() if t in reached}
            if not reaches or not params or given is None or context.paused:
                continue
            step = counters[next(iter(params))].step
            senders = rule.losses or ()
            acting.append(DueLossRule(effect, step, senders, params, groups, averaged))
            self._note_given(rule, step, list(given))
        return acting

    def _trained(self, indices: Sequence[int]) -> dict[int, Tensor]:
        """Return the parameters that can get a gradient in a pass."""
        trained = {}
        for index, param in self.context.parameters.present_by_index(indices):
            if not param.requires_grad:
                continue
            # A sharded parameter is refused once the pass reached it: the leaves of the graph do not show it.
            if not _dist.is_divided(param):
                trained[index] = param
        return trained

    def _note_given(self, rule: LossRule, step: int, losses: Sequence[str]) -> None:
        """Warn once if a rule names a loss that no call has passed, and this call passes one with a similar name."""
        given = self._given.setdefault(rule.id, set())
        given.update(losses)
        wanted = rule.losses or ()
        others = [name for name in losses if name not in wanted]
        for lacking in set(wanted) - given:
            hint = did_you_mean(lacking, others)
            if hint:
                text = f"no loss is called {printable(lacking)}: {hint}"
                log = self.context.event_log
                log.notice_once(f"unknown {lacking}", text, rule=rule.id, step=step, warn=True)

    def never_given(self) -> Iterator[tuple[LossRule, str]]:
        """Yield each rule that was due, with each loss that it names and that no call passed."""
        for effect in self.effects:
            rule = effect.rule
            given = self._given.get(rule.id)
            if not given or not rule.losses:
                continue
            for name in rule.losses:
                if name not in given:
                    yield rule, name

    def passed(self, indices: Sequence[int]) -> None:
        """Check the gradients that a pass left: warn if the losses were unknown, else compare the parameters."""
        context = self.context
        named = current.get()
        for effect in self.effects:
            rule = effect.rule
            among = set(effect.indices)
            due = []
            for index in indices:
                if index not in among:
                    continue
                if context.is_due(rule, context.counters[index]):
                    due.append(index)
            if due and named is None:
                text = _UNKNOWN.format(name=printable(context.names[due[0]]))
                step = context.counters[due[0]].step
                context.event_log.notice_once("plain", text, rule=rule.id, step=step, warn=True)
            elif named is not None:
                named.reached(context, rule, due)


def _refuse_unlike(rule: LossRule, groups: _dist.Groups, facts: object) -> None:
    """Raise on all ranks if the facts differ between them: they would wait for each other. A collective."""
    digest = zlib.crc32(repr(facts).encode())
    both = torch.tensor([digest, -digest], device="cpu")
    high, low = _dist.reduce(both, groups, "max").tolist()
    if high != -low:
        raise GradSurgeonError(_UNLIKE.format(rule=rule.id))
