"""Makes the effects of rules: the value that a rule compiles to decides which effect it gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gradsurgeon.actions import (
    ByNorm,
    Combination,
    Decision,
    Edit,
    EditRule,
    Examination,
    LossComparison,
    LossRule,
    MaskedUpdate,
    Observer,
    Rule,
    Spikes,
    in_order,
)
from gradsurgeon.actions._effects import Copies, Hidden
from gradsurgeon.errors import BindError, GradSurgeonError
from gradsurgeon.language.planning import Plan
from gradsurgeon.runtime.check_effects import CheckEffect, ModelFacts
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.editing_effects import Hide, NormEdit
from gradsurgeon.runtime.effect import Effect
from gradsurgeon.runtime.effects import Effects, ModuleEffects
from gradsurgeon.runtime.element_edits import ElementEdit, MaskedEdit
from gradsurgeon.runtime.loss_effects import LossEffect
from gradsurgeon.runtime.loss_spikes import LossSpikes
from gradsurgeon.runtime.observing_effects import Copy, Record, RecordContributions, RecordTogether
from gradsurgeon.runtime.spike_effect import SpikeEffect
from gradsurgeon.runtime.trap_effects import NONFINITE, NonfiniteTrap, TensorTrap, ThresholdTrap
from gradsurgeon.runtime.weight_edits import UpdateSpikes, WeightEdit
from gradsurgeon.runtime.weight_effects import RecordState, RecordWeights
from gradsurgeon.tensors.statistics import columns_of

_SEVERAL = "is several numbers, and a trap judges one: use another statistic, such as `l2`, or `norm-log` to record it"
_Make = Callable[[Rule, Context, tuple[int, ...], Any], Effect]


def _trap(rule: Rule, context: Context, indices: tuple[int, ...], decision: Decision) -> Effect:
    if len(columns_of(decision.statistic)) > 1:
        raise BindError([f"rule {rule.id}: {decision.statistic} {_SEVERAL}"])
    if rule.target != "params":
        return TensorTrap(rule, context, indices, decision)
    if decision.statistic == NONFINITE:
        return NonfiniteTrap(rule, context, indices, decision)
    return ThresholdTrap(rule, context, indices, decision)


def _record(rule: Rule, context: Context, indices: tuple[int, ...], observer: Observer) -> Effect:
    kind: type[Effect] = Record
    if rule.target == "params" and not rule.ref.grad:
        kind = RecordState if rule.ref.side == "state" else RecordWeights
    elif rule.target == "params" and rule.point == "backward":
        kind = RecordContributions
    elif observer.joins:
        kind = RecordTogether
    return kind(rule, context, indices, observer)


def _edit(rule: Rule, context: Context, indices: tuple[int, ...], edit: Edit) -> Effect:
    if rule.target == "params" and rule.point == "updated":
        return WeightEdit(rule, context, indices, edit)
    return ElementEdit(rule, context, indices, edit)


def _spikes(rule: Rule, context: Context, indices: tuple[int, ...], spikes: Spikes) -> Effect:
    if rule.judges_losses:
        return LossSpikes(rule, context, indices, spikes)
    if rule.point == "updated":
        return UpdateSpikes(rule, context, indices, spikes)
    return SpikeEffect(rule, context, indices, spikes)


_EFFECTS: Mapping[type, Any] = {
    Edit: _edit,
    MaskedUpdate: MaskedEdit,
    ByNorm: NormEdit,
    Hidden: Hide,
    Copies: Copy,
    Observer: _record,
    Decision: _trap,
    Spikes: _spikes,
    Combination: LossEffect,
    LossComparison: LossEffect,
}


def effects_of(context: Context, plan: Plan, facts: ModelFacts | None) -> Effects:
    """Return the effects of all rules; ``facts`` are for checks, if there are any."""
    effects: dict[str, Effect] = {}
    refused: list[str] = []
    for rule in in_order(plan.rules.rules):
        compiled = _compiled(rule)
        names = [binding.name for binding in plan.of(rule.id)]
        indices: tuple[int, ...] = ()
        if rule.target == "params":
            indices = tuple([context.index_of[name] for name in names])
        elif rule.judges_losses and names:
            # The loss of an update concerns all parameters.
            indices = tuple(range(len(context.names)))
        if isinstance(compiled, Examination):
            assert facts is not None  # noqa: S101 # a check rule compiled to it
            effect: Effect = CheckEffect(rule, context, indices, compiled, facts)
        else:
            effect = _maker(compiled)(rule, context, indices, compiled)
        if isinstance(effect, ElementEdit):
            place = plan.rules.place_to_correct(rule.id)
            refused += [f"{place}: rule {rule.id}: {text}" for text in effect.refusals()]
        effects[rule.id] = effect
    if refused:
        raise BindError(refused)
    modules = list(_modules(plan, effects))
    _trust_passes(effects.values(), modules)
    tags = []
    for effect in effects.values():
        is_on_tags = effect.rule.target == "tensors" and not effect.rule.judges_losses
        if is_on_tags and plan.of(effect.rule.id):
            tags.append(effect)
    return Effects(context, list(effects.values()), modules, tags)


def _trust_passes(effects: Iterable[Effect], modules: Sequence[ModuleEffects]) -> None:
    """Do not check that the gradients of single losses add up: rules on modules combine in the training pass alone, so its gradients differ from the sum."""
    combine = False
    for module in modules:
        combine |= any(effect.rule.edits for effect in module.on_shared)
    if not combine:
        return
    for effect in effects:
        if isinstance(effect, LossEffect):
            effect.needs_no_check = True


def _compiled(rule: Rule) -> Any:
    if isinstance(rule, EditRule):
        rule = rule.in_step(rule.steps.from_)
    try:
        return rule.compile()
    except BindError:
        raise
    except GradSurgeonError as error:  # a library is missing
        raise BindError([f"rule {rule.id}: {error}"]) from error


def _maker(compiled: Any) -> _Make:
    kind = next(kind for kind in type(compiled).__mro__ if kind in _EFFECTS)
    make: _Make = _EFFECTS[kind]
    return make


def _modules(plan: Plan, effects: Mapping[str, Effect]) -> Iterator[ModuleEffects]:
    by_name: dict[str, list[Effect]] = {}
    for effect in effects.values():
        if effect.rule.target == "modules":
            for binding in plan.of(effect.rule.id):
                by_name.setdefault(binding.name, []).append(effect)
    for module in plan.manifest.modules:
        if module.name not in by_name:
            continue
        on_shared: list[Effect] = []
        on_input: list[Effect] = []
        on_output: list[Effect] = []
        for effect in by_name[module.name]:
            side = effect.rule.ref.side
            if isinstance(effect.rule, LossRule):
                on_shared.append(effect)
            elif side == "input":
                on_input.append(effect)
            if side == "output":
                on_output.append(effect)
        yield ModuleEffects(module.name, on_input, on_output, on_shared)
