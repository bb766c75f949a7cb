"""Rules on the gradients of named losses: which act in a pass, on all ranks alike, and how parameters get what they made."""

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
        self._params = {id(param): param for one in due for param in one.params.values()}
        # Each rule checks once whether the passes agree; after that only the combined gradients are kept.
        self._asked = [one for one in due if not one.effect.is_verified]
        self._accumulation = _torch.Accumulation()
        # The ids of the parameters that single losses gave a gradient; ``None`` if no gradients were taken.
        self._given: frozenset[int] | None = None
        # The ids of the parameters that got a gradient in this pass, but none from a single loss.
        self._astray: set[int] = set()
        self._problem = ""
        self._combined: dict[int, Tensor] = {}
        # By parameter, the sum of the gradients of single losses, and the sum of their norms. If losses cancel,
        # rounding is small next to each gradient, but not next to their sum.
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}
        # By parameter, the norm of the difference between the passes, and the sum of all norms.
        self._differences: dict[int, tuple[Tensor, Tensor]] = {}

    def take(
        self, grads: dict[int, dict[str, Tensor]], weights: Mapping[int, Mapping[str, float]]
    ) -> None:
        """Combine gradients, by the ids of the parameters and then by loss, and remove them from ``grads`` to free memory."""
        self._given = frozenset(grads)
        asked = {id(param) for one in self._asked for param in one.params.values()}
        for key in self._given:
            column = grads.pop(key)
            if key in asked:
                norms = torch.stack([_numbers.norm(grad) for grad in column.values()])
                self._sums[key] = weighted_sum(column, {}), norms.sum()
            if key in weights:
                self._combined[key] = weighted_sum(column, weights[key])

    @contextmanager
    def delivering(self) -> Iterator[None]:
        """Give parameters their combined gradients within the context; afterwards check the passes."""
        token = current.set(self)
        params = list(self._params.values()) if self._given is not None else []
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
            if key not in (self._given or ()):
                self._astray.add(key)
            elif (known := self._sums.pop(key, None)) is not None:
                total, size = known
                with torch.no_grad():
                    self._differences[key] = _numbers.norm(grad - total), _numbers.norm(grad) + size
            return self._combined.pop(key, None)

        deliver.__name__ = "gradsurgeon.backward"
        return deliver

    def reached(self, context: Context, rule: LossRule, indices: Sequence[int]) -> None:
        """Compare the parameters that got gradients with the parameters that the rules expected."""
        for index, param in zip(indices, context.parameters.params(indices), strict=True):
            is_divided = _dist.is_divided(param)
            if is_divided or id(param) not in self._params or id(param) in self._astray:
                name = printable(context.names[index])
                self._problem = (_DIVIDED if is_divided else _ASTRAY).format(
                    rule=rule.id, name=name
                )

    def _check(self) -> None:
        """Refuse a graph in which the gradients of single losses do not add up to the gradient of their sum."""
        known = {key: (float(off), float(size)) for key, (off, size) in self._differences.items()}
        for one in self._asked:
            found = [(n, *known[id(p)]) for n, p in one.params.items() if id(p) in known]
            # A gradient of pure rounding, such as of a bias before a batch norm, differs in every pass.
            least = _ROUNDING * math.hypot(*(size for _, _, size in found))
            for number, off, size in found:
                if off > max(least, _TOLERANCE * size):
                    name = one.name(number)
                    raise GradSurgeonError(
                        _TWICE.format(rule=one.rule.id, name=name, off=off, size=size)
                    )
            # Non-finite gradients prove nothing about the graph, so the rule stays unverified.
            if found and math.isfinite(least):
                one.effect.is_verified = True


# The pass of named losses that this thread runs.
current: ContextVar[NamedPass | None] = ContextVar("current", default=None)


class LossRules:
    """The rules of one session on parameters that take the gradient of each loss."""

    def __init__(
        self, context: Context, agreement: RankAgreement, effects: Sequence[LossEffect]
    ) -> None:
        self.context = context
        self._agreement = agreement
        self.effects = effects
        # By rule id, the losses that calls passed while the rule was due.
        self._given: dict[str, set[str]] = {}

    def due(self, leaves: Sequence[Tensor], given: Collection[str] | None) -> list[DueLossRule]:
        """Return the rules that act in a pass. Runs a collective if ranks average the pass.

        If ranks average gradients, a rule acts on all parameters that it matches: ranks must measure equal tensors.

        Args:
            leaves: the leaves that the pass reaches.
            given: the names of its losses; ``None`` for a plain pass, in which no rule acts.
        """
        context = self.context
        reached, keys = set(context.parameters.owned(leaves)), set(map(id, leaves))
        acting: list[DueLossRule] = []
        # A paused session does this too: other ranks may wait for it.
        for effect in self.effects:
            rule = effect.rule
            matched = effect.indices
            indices = [t for t in matched if rule.steps.includes(context.counters[t].step)]
            if not indices:
                continue
            groups, averaged = context.ranks.averaging(matched, keys)
            reaches, step = not reached.isdisjoint(indices), context.counters[indices[0]].step
            if groups:
                self._agreement.roll(groups)
                _refuse_unlike(rule, groups, (reaches, context.paused, sorted(given or ())))
            # Ranks that average know no better which parameters the others reach.
            params = self._params(indices, None if groups else reached)
            if reaches and params and given is not None and not context.paused:
                step = context.counters[next(iter(params))].step
                senders = rule.losses or ()
                acting.append(DueLossRule(effect, step, senders, params, groups, averaged))
                self._note_given(rule, step, list(given))
        return acting

    def _params(self, indices: Sequence[int], reached: Collection[int] | None) -> dict[int, Tensor]:
        """Return the matched parameters that get a gradient in a pass; ``reached`` is ``None`` if it is unknown."""
        params = zip(indices, self.context.parameters.params(indices), strict=True)
        return {
            index: param
            for index, param in params
            if param is not None and param.requires_grad
            if reached is None or index in reached
            # A sharded parameter is refused once the pass reached it: the leaves of the graph do not show it.
            if not _dist.is_divided(param)
        }

    def _note_given(self, rule: LossRule, step: int, losses: Sequence[str]) -> None:
        """Warn once if a rule names a loss that no call has passed, and this call passes one with a similar name."""
        given = self._given.setdefault(rule.id, set())
        given.update(losses)
        others = [name for name in losses if name not in (rule.losses or ())]
        for lacking in set(rule.losses or ()) - given:
            if hint := did_you_mean(lacking, others):
                text = f"no loss is called {printable(lacking)}: {hint}"
                log = self.context.event_log
                log.notice_once(f"unknown {lacking}", text, rule=rule.id, step=step, warn=True)

    def never_given(self) -> Iterator[tuple[LossRule, str]]:
        """Yield each rule that was due, with each loss that it names and that no call passed."""
        for effect in self.effects:
            rule = effect.rule
            given = self._given.get(rule.id, ())
            yield from ((rule, name) for name in rule.losses or () if given and name not in given)

    def passed(self, indices: Sequence[int]) -> None:
        """Check the gradients that a pass left: warn if the losses were unknown, else compare the parameters."""
        context, named = self.context, current.get()
        for effect in self.effects:
            rule = effect.rule
            among = set(effect.indices)
            due = [t for t in indices if t in among and context.is_due(rule, context.counters[t])]
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
