"""Makes the effects of rules: the value that a rule compiles to decides which effect it gets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradsurgeon.actions import (
    ByNorm,
    Combination,
    Edit,
    EditRule,
    Examination,
    LossComparison,
    LossRule,
    MaskedUpdate,
    Rule,
    Spikes,
    in_order,
)
from gradsurgeon.actions._effects import Copies, Hidden, Judgement
from gradsurgeon.errors import BindError, GradSurgeonError
from gradsurgeon.language.planning import Plan
from gradsurgeon.runtime.check_effects import CheckEffect
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.editing_effects import Hide, NormEdit
from gradsurgeon.runtime.effect import Effect
from gradsurgeon.runtime.effects import Effects
from gradsurgeon.runtime.element_edits import ElementEdit, MaskedEdit
from gradsurgeon.runtime.loss_effects import LossEffect
from gradsurgeon.runtime.loss_spikes import LossSpikes
from gradsurgeon.runtime.observing_effects import Copy, Record, RecordContributions, RecordTogether
from gradsurgeon.runtime.spike_effect import SpikeEffect
from gradsurgeon.runtime.trap_effects import NONFINITE, NonfiniteTrap, TensorTrap, ThresholdTrap
from gradsurgeon.runtime.weight_edits import UpdateSpikes, WeightEdit
from gradsurgeon.runtime.weight_effects import RecordState, RecordWeights

# Kinds whose rules all have one effect.
_EFFECTS: Mapping[type, type[Effect]] = {
    ByNorm: NormEdit,
    Hidden: Hide,
    Copies: Copy,
    Combination: LossEffect,
    LossComparison: LossEffect,
    MaskedUpdate: MaskedEdit,
    Examination: CheckEffect,
}


def _kind_of(rule: Rule, compiled: Any) -> type[Effect]:
    """Return which effect a rule has, by the value that it compiles to."""
    on_params = rule.target == "params"
    is_updated = on_params and rule.point == "updated"
    for kind, effect in _EFFECTS.items():
        if isinstance(compiled, kind):
            return effect
    if isinstance(compiled, Edit):
        return WeightEdit if is_updated else ElementEdit
    if isinstance(compiled, Judgement):
        return _kind_of_trap(rule, compiled)
    if is_updated:
        return RecordState if rule.ref.side == "state" else RecordWeights
    if on_params and rule.point == "backward":
        return RecordContributions
    return RecordTogether if compiled.joins else Record


def _kind_of_trap(rule: Rule, compiled: Any) -> type[Effect]:
    kind: type[Effect] = ThresholdTrap
    if isinstance(compiled, Spikes):
        kind = UpdateSpikes if rule.point == "updated" else SpikeEffect
        if rule.judges_losses:
            kind = LossSpikes
    elif rule.target != "params":
        kind = TensorTrap
    elif compiled.statistic == NONFINITE:
        kind = NonfiniteTrap
    return kind


def effects_of(context: Context, plan: Plan) -> Effects:
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
        effect = _kind_of(rule, compiled)(rule, context, indices, compiled)
        if isinstance(effect, ElementEdit):
            place = plan.rules.place_to_correct(rule.id)
            refused += [f"{place}: rule {rule.id}: {text}" for text in effect.refusals()]
        effects[rule.id] = effect
    if refused:
        raise BindError(refused)
    return _all_effects(context, plan, list(effects.values()))


def _all_effects(context: Context, plan: Plan, effects: Sequence[Effect]) -> Effects:
    by_name = defaultdict(list)
    tags = []
    for effect in effects:
        rule = effect.rule
        matched = plan.of(rule.id)
        if rule.target == "modules":
            for binding in matched:
                by_name[binding.name].append(effect)
            if matched and isinstance(rule, LossRule) and rule.edits:
                _trust_passes(effects)
        elif rule.target == "tensors" and matched and not rule.judges_losses:
            tags.append(effect)
    names = [module.name for module in plan.manifest.modules if module.name in by_name]
    modules = {name: by_name[name] for name in names}
    return Effects(context, effects, modules, tags)


def _trust_passes(effects: Iterable[Effect]) -> None:
    """Do not check that the gradients of single losses add up: rules on modules combine in the training pass alone, so its gradients differ from the sum."""
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
